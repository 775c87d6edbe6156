"""`tools/gpu/check.py` on the CPU, where its own logic can be tried; on a GPU each of its parts is a test."""

import json
from pathlib import Path

import check
import pytest
import torch
from gpu_check.parts.numbers import LAYOUTS, Layout, error_of, in_layout, in_one_process
from gpu_check.ranks import in_group, transport_of
from gpu_check.rows import Row, table
from nxd_testing import run_on_ranks


@pytest.mark.gpu
@pytest.mark.parametrize("part", check.PARTS)
def test_part_finds_nothing_wrong_on_this_gpu(part: str) -> None:
    rows = check.run_part(part, "cuda", check.PARTS[part] * 3)

    print(table(rows))
    assert rows
    assert not [row for row in rows if row.outcome in ("wrong", "failed")]


@pytest.mark.parametrize("layout", LAYOUTS[-2:], ids=lambda it: it.name)
def test_ranks_that_share_a_device_train_as_one_process(layout: Layout) -> None:
    expected = in_one_process("llama", torch.float64)

    ranks = run_on_ranks(in_group, layout.num_ranks, "staged", in_layout, ("llama", layout, torch.float64))

    assert error_of(ranks, expected) < 1e-12


def test_ranks_of_one_gpu_are_staged_and_of_several_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert [transport_of("cuda", ranks) for ranks in (1, 2, 4)] == ["nccl", "nccl", "staged"]
    assert transport_of("cpu", 4) == "gloo"


def test_part_that_fails_or_takes_too_long_is_a_row_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table_file = tmp_path / "gpu.json"
    monkeypatch.setitem(check.PARTS, "kernels", 0.01)
    monkeypatch.setitem(check.PARTS, "nothing", 60.0)

    code = check.main(["--device", "cpu", "--parts", "kernels", "nothing", "--json", str(table_file)])

    content = json.loads(table_file.read_text())
    assert code == 1
    assert [(row["part"], row["outcome"]) for row in content["rows"]] == [("kernels", "failed"), ("nothing", "skipped")]
    assert content["rows"][0]["detail"] == "it took longer than 0 s"
    assert content["rows"][1]["detail"] == "gpu_check.parts.nothing is not installed"
    assert "2 rows, 1 of them wrong or failed" in capsys.readouterr().out


def test_row_is_read_from_its_line_and_other_output_is_not() -> None:
    row = Row("numbers", "llama TP 2", "ok", "error 1e-15")

    assert Row.of_line(row.to_line()) == row
    assert Row.of_line("a warning of a library") is None


@pytest.mark.slow
def test_kernels_of_the_cpu_are_exact() -> None:
    rows = check.run_part("kernels", "cpu", 300.0)

    assert len(rows) == 15
    assert {row.outcome for row in rows} <= {"ok", "skipped"}
