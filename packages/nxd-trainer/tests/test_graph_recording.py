"""`nxd doctor --graph` of a recipe: what it refuses, and the graphs of real steps where torch-xla is installed."""

import json

import pytest
from nxd_cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "", "parallel.pipeline_parallel_size=2"], "graphs of pipelines cannot be checked"),
        (
            ["--graph", "", "parallel.zero_stage=3"],
            "zero_stage=3 has no graph: on XLA parameters cannot be sharded",
        ),
        (["--graph", "", "parallel.tensor_parallel_size=2", "--ranks", "3"], "--ranks 3 must be a multiple of"),
        (
            ["--graph", "", "parallel.context_parallel_size=2", "--ranks", "3"],
            "--ranks 3 must be a multiple of parallel.tensor_parallel_size=1 times parallel.context_parallel_size=2",
        ),
        (
            ["--graph", "", "model.type=mixtral", "parallel.expert_parallel_size=4", "--ranks", "2"],
            "--ranks 2 must be a multiple of parallel.tensor_parallel_size=1, and of 4 ranks with the experts",
        ),
        (["--graph", "", "--steps", "0"], "--steps 0 must be 1 or more"),
        (["--graph", "", "train.stepz=2"], "train.stepz"),
    ],
)
def test_what_cannot_be_looked_at_is_a_line_and_exit_code_2(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2

    assert message in capsys.readouterr().err


RECIPE = [
    "data.sequence_length=16",
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "train.global_batch_size=4",
]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    return [f"data.path={tmp_path / 'text'}", f"data.cache_folder={tmp_path / 'tokens'}", f"output={tmp_path / 'run'}"]


@pytest.mark.xla
@pytest.mark.parametrize("ranks", [[], ["parallel.tensor_parallel_size=2", "--ranks", "4"]])
def test_step_of_a_recipe_is_one_graph_on_every_rank(text, tmp_path, capsys, ranks):
    code = main(["doctor", "--graph", "", *text, *RECIPE, *ranks, "--json"])

    captured = capsys.readouterr()
    assert code == 0, captured
    report = json.loads(captured.out)
    assert report["graphs_per_step"] == [1, 1, 1]
    assert report["new_after"] == 2  # the first makes the optimizer's states
    assert not (tmp_path / "run").exists()
    if ranks:
        assert report["ranks"] == "ranks 0 and 3 build the same graphs"
        groups = {(row["kind"], str(row["groups"])) for row in report["collectives"]}
        assert ("all-reduce", "[[0, 1], [2, 3]]") in groups  # tensor parallel
        assert ("all-reduce", "[[0, 2], [1, 3]]") in groups  # the replicas' gradients


@pytest.mark.xla
def test_step_of_cut_sequences_is_one_graph_that_exchanges_heads(text, capsys):
    code = main(["doctor", "--graph", "", *text, *RECIPE, "parallel.context_parallel_size=2", "--ranks", "4", "--json"])

    captured = capsys.readouterr()
    assert code == 0, captured
    report = json.loads(captured.out)
    assert "TP 1 x CP 2 x DP 2" in report["title"]
    assert report["ranks"] == "ranks 0 and 3 build the same graphs"
    groups = {(row["kind"], str(row["groups"])) for row in report["collectives"]}
    assert ("all-to-all", "[[0, 1], [2, 3]]") in groups  # heads for sequences
    assert ("all-reduce", "[[0, 1, 2, 3]]") in groups  # gradients of replicas, which these ranks are


EXPERTS = [
    "model.type=mixtral",
    "model.config.num_local_experts=4",
    "model.config.num_experts_per_tok=2",
    "parallel.expert_parallel_size=2",
]


@pytest.mark.xla
def test_step_of_experts_over_ranks_is_one_graph_that_gathers_tokens(text, capsys):
    pytest.importorskip("transformers")
    code = main(["doctor", "--graph", "", *text, *RECIPE, *EXPERTS, "--ranks", "4", "--json"])

    captured = capsys.readouterr()
    assert code == 0, captured
    report = json.loads(captured.out)
    assert "TP 1 x DP 4, EP 2" in report["title"]
    assert report["ranks"] == "ranks 0 and 3 build the same graphs"
    groups = {(row["kind"], str(row["groups"])) for row in report["collectives"]}
    assert ("all-gather", "[[0, 1], [2, 3]]") in groups  # tokens to the experts
    assert ("all-reduce", "[[0, 2], [1, 3]]") in groups  # gradients of experts
    assert ("all-reduce", "[[0, 1, 2, 3]]") in groups  # the others
