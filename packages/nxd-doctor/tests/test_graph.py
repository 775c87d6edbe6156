"""`nxd doctor --graph`: what it says of recorded graphs, and that of real ones where torch-xla is installed."""

import importlib.util
import json
from dataclasses import replace
from io import StringIO

import pytest
from nxd_cli import main
from nxd_doctor.graph_report import analyse, render_report
from nxd_doctor.graphs import CapturedGraph
from nxd_doctor.recording import RecordedRank
from nxd_state import ParallelDegrees
from rich.console import Console

SUM = "add {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT z = f32[] add(x, y)\n}"


def graph(rows: int = 4, rate: str = "0.5", asked_by: str = "step (train.py:7)") -> CapturedGraph:
    """A product, its sum over two ranks, and its scaling by a constant."""
    text = f"""HloModule m

{SUM}

ENTRY e {{
  w = f32[8,8] parameter(0), metadata={{op_name="mlp.1/aten__mm"}}
  x = f32[{rows},8] parameter(1)
  y = f32[{rows},8] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="mlp.1/mm"}}
  s = f32[{rows},8] all-reduce(y), replica_groups={{{{0,1}}}}, to_apply=add
  k = f32[] constant({rate})
  b = f32[{rows},8] broadcast(k), dimensions={{}}
  m = f32[{rows},8] multiply(s, b)
  ROOT h = bf16[{rows},8] convert(m), metadata={{op_name="head.2/aten__to"}}
}}
"""
    return CapturedGraph(text, (asked_by,))


def report_of(*steps: list[CapturedGraph], other: list[list[CapturedGraph]] | None = None):
    recorded = [RecordedRank(0, list(steps))] + ([] if other is None else [RecordedRank(3, other)])
    return analyse("title", recorded, world_size=4)


def test_collectives_are_named_by_axis_and_those_of_zero_are_summed():
    text = f"""HloModule m

{SUM}

ENTRY e {{
  g = f32[8] parameter(0)
  t = f32[8] all-reduce(g), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=add
  r = f32[4] reduce-scatter(t), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}, to_apply=add
  h = bf16[4] convert(r)
  w = bf16[8] all-gather(h), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}
  p = bf16[8] all-reduce(w), replica_groups={{{{0,3}},{{1,2}}}}, to_apply=add
  ROOT o = bf16[8] negate(p)
}}
"""
    recorded = [RecordedRank(0, [[CapturedGraph(text, ())]])]

    sharded = analyse("title", recorded, world_size=4, degrees=ParallelDegrees(tp=2, zero_stage=2))
    whole = analyse("title", recorded, world_size=4, degrees=ParallelDegrees(tp=2))
    unknown = analyse("title", recorded, world_size=4)

    assert {(row.kind, row.dtype): row.axis for row in sharded.collectives} == {
        ("all-reduce", "f32"): "tp",
        ("reduce-scatter", "f32"): "dp",
        ("all-gather", "bf16"): "dp",
        ("all-reduce", "bf16"): "",
    }
    line = "ZeRO-2 sends 16 bytes of gradients (reduce-scatter) and 8 of parameters (all-gather) between replicas"
    assert line in shown(sharded)
    assert not whole.zero
    assert {row.axis for row in unknown.collectives} == {""}


def shown(report) -> str:
    stream = StringIO()
    render_report(report, Console(file=stream))
    return stream.getvalue()


def test_one_graph_for_all_steps_is_right():
    report = report_of([graph()], [graph()], [graph()])

    assert report.is_right
    assert report.verdict == "one graph per step; no new graphs after step 1"
    [row] = report.graphs
    assert (row.steps, row.flops, row.instructions) == ((1, 2, 3), 2 * 4 * 8 * 8, 8)


def test_two_graphs_a_step_are_wrong_and_told_with_the_lines_that_ask_for_them():
    step = [graph(), graph(rate="2", asked_by="log (train.py:9)")]

    report = report_of(step, step)

    assert not report.is_right
    assert report.verdict == "2 graphs per step; no new graphs after step 1"
    assert [row.asked_by for row in report.graphs] == ["step (train.py:7)", "log (train.py:9)"]
    assert [row.why for row in report.graphs] == ["", ""]  # each is the first of its line


def test_recompilation_is_told_with_its_reason():
    report = report_of([graph()], [graph(rate="0.25")], [graph(rows=6)])

    assert not report.is_right
    assert report.verdict == "one graph per step; the last step's graph is new"
    assert [row.why[:60] for row in report.graphs][1:] == [
        "instruction 5 of 8 (k): constant f32[] 0.5 in the one before",
        "argument 1 is f32[4,8] in the one before and f32[6,8] in thi",
    ]


@pytest.mark.parametrize(
    ("other", "finding", "is_right"),
    [
        ([[graph()], [graph()]], "ranks 0 and 3 build the same graphs", True),
        (
            [[graph()], [graph(rate="3")]],
            "in step 2: instruction 5 of 8 (k): constant f32[] 0.5 in rank 0, f32[]",
            False,
        ),
        ([[graph()], [graph(), graph()]], "1 graphs on rank 0 and 2 on rank 3 in step 2", False),
    ],
)
def test_ranks_are_compared(other, finding, is_right):
    report = report_of([graph()], [graph()], other=other)

    assert finding in report.ranks
    assert report.is_right == is_right


def test_the_graph_with_the_most_arithmetic_of_the_last_step_is_described():
    report = report_of([graph(rows=64)], [graph(asked_by="a"), graph(rows=16, asked_by="b")])

    assert report.main == 3
    [collective] = report.collectives
    assert (collective.kind, collective.groups, collective.count) == ("all-reduce", ((0, 1),), 1)
    assert collective.bytes_sent == 16 * 8 * 4
    assert collective.largest == "f32[16,8] of s"
    assert report.memory.arguments == (8 * 8 + 16 * 8) * 4
    assert [(cast.source, cast.target, cast.place) for cast in report.casts] == [("f32", "bf16", "head")]


def test_tables_show_what_was_counted():
    text = shown(report_of([graph()], [graph(rate="2")], [graph(rate="2")]))

    for part in (
        "title",
        "graph 2 is new: instruction 5 of 8",
        "collectives of graph 2",
        "[0, 1]",
        "casts of graph 2",
        "one graph per step; no new graphs after step 2",
        "assume ring algorithms",
    ):
        assert part in text
    assert "2-3" in text


def test_script_has_graphs_and_no_steps():
    recorded = RecordedRank(0, [[graph()], [graph(rate="2")], [graph()]], has_steps=False)

    report = analyse("script.py", [recorded], world_size=1)

    assert report.verdict == ""
    assert report.is_right
    assert [len(row.steps) for row in report.graphs] == [2, 1]
    assert report.main == 1
    assert "runs" in shown(report)


def test_loops_that_are_counted_once_are_named():
    report = report_of([graph()])

    assert "loops with unknown trip counts, counted once: w" in shown(replace(report, loops_counted_once=("w",)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "missing.py"], "script missing.py does not exist"),
        (["train.steps=2"], "unexpected argument train.steps=2; only --graph takes arguments"),
    ],
)
def test_what_cannot_be_looked_at_is_a_line_and_exit_code_2(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2

    assert message in capsys.readouterr().err


def test_recipe_without_what_records_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("nxd_doctor.command.RECORDERS", "nxd.nothing")

    assert main(["doctor", "--graph", "recipe.toml"]) == 2

    assert "pip install nxd-trainer, or pass a script" in capsys.readouterr().err


def test_without_torch_xla_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else find(name))

    script = tmp_path / "script.py"
    script.touch()
    assert main(["doctor", "--graph", str(script)]) == 2

    [line] = capsys.readouterr().err.splitlines()
    assert "pip install torch==2.9.1 torch_xla==2.9.0" in line


@pytest.mark.xla
def test_graphs_of_a_script_are_shown(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("""
import sys, torch, nxd_state
x = torch.ones(4, int(sys.argv[1])).to(nxd_state.get_device())
for _ in range(3):
    x = x @ x.T @ x
    nxd_state.step_boundary()
""")

    assert main(["doctor", "--graph", str(script), "8", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert [len(row["steps"]) for row in report["graphs"]] == [3]
    assert report["graphs"][0]["flops"] == 2 * (2 * 4 * 8 * 4)
    assert "script.py:6" in report["graphs"][0]["asked_by"]
