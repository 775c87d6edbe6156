"""`nxd parity` of a recipe, in one process."""

import pytest
from nxd_cli import main
from nxd_state import destroy_model_parallel

TINY = [
    "data.sequence_length=8",
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "train.global_batch_size=4",
    "train.gradient_accumulation_steps=2",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The run's own folder, and no mesh afterwards."""
    monkeypatch.chdir(tmp_path)
    yield
    destroy_model_parallel()


def test_recipe_that_agrees_ends_with_0(capsys):
    assert main(["parity", *TINY, "--compare-steps", "1"]) == 0

    first, second = capsys.readouterr().out.splitlines()
    assert first == "TP 1 x DP 1 (1 ranks) against one process (float64, tolerance 1e-10), 1 steps"
    assert second.endswith("agree")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "nowhere.toml"),
        ([*TINY, "--compare-steps", "-1"], "there is nothing to compare in -1 steps; use 1 or more"),
    ],
)
def test_recipe_that_cannot_be_compared_is_a_mistake(capsys, arguments, message):
    assert main(["parity", *arguments]) == 2

    assert message in capsys.readouterr().err
