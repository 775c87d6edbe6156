"""A small run: a few files of text and a recipe that trains on them in seconds."""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tests of this folder share a module
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # which is no package


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """Twelve files of made-up words, the same in every session."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 7))) for _ in range(50)]
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(" ".join(generator.choices(words, k=400)))
    return folder


@pytest.fixture
def settings(text_folder, tmp_path) -> list[str]:
    """Recipe settings of a tiny model in float64."""
    return [
        f"data.path={text_folder}",
        f"output={tmp_path / 'run'}",
        "data.sequence_length=16",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=4",
        "train.dtype=float64",
        "train.global_batch_size=8",
        "train.steps=20",
        "train.log_every=1",
        "train.eval_every=10",
        "train.eval_batches=2",
        "optimizer.warmup_steps=4",
        "optimizer.lr=1e-2",
        "checkpoint.save_every=0",
    ]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """`folder_of("Qwen3")`: the folder of one of the models of `optimizer_parity`."""
    from optimizer_parity import save_model

    root = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            save_model(name, folder)
        return folder

    return make
