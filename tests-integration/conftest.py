"""A run of `nxd train` that takes a second per rank, for whoever needs one."""

from collections.abc import Callable
from pathlib import Path

import pytest


def _tiny(folder: Path) -> list[str]:
    (folder / "text").mkdir()
    for number in range(4):
        (folder / f"text/{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return [
        "data.path=text",
        "output=run",
        "data.sequence_length=32",
        "model.hidden_size=32",
        "model.intermediate_size=64",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "train.global_batch_size=4",
        "train.steps=6",
        "train.log_every=1",
        "train.eval_every=3",
        "optimizer.warmup_steps=2",
    ]


@pytest.fixture(scope="session")
def tiny_in() -> Callable[[Path], list[str]]:
    """`tiny_in(folder)`: text in that folder, and the settings of a run on it; those given after them count."""
    return _tiny


@pytest.fixture
def tiny(tiny_in, tmp_path) -> list[str]:
    """Settings of a run in this test's folder."""
    return tiny_in(tmp_path)
