"""Checkpoints of tiny models in float64, written by whoever writes them, each at a layout of its own."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tests of this folder share a module


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder with a file of words."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "0.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return folder


@pytest.fixture(scope="session")
def written(text, tmp_path_factory):
    """`written("nxd train")`: a folder of checkpoints that this has written, once for all tests.

    `written("Lightning", "qwen3")`: the same of a model of transformers.
    """
    from nxd_testing import run_on_ranks
    from writers_and_readers import WRITERS, WRITERS_OF_TRANSFORMERS, of_transformers

    folders: dict[tuple[str, str | None], Path] = {}

    def write(writer: str, model_type: str | None = None) -> Path:
        if (writer, model_type) not in folders:
            folder = tmp_path_factory.mktemp("written")
            if model_type is None:
                run_on_ranks(WRITERS[writer], 2, folder, text)
            else:
                run_on_ranks(WRITERS_OF_TRANSFORMERS[writer], 2, folder, text, partial(of_transformers, model_type))
            folders[writer, model_type] = folder
        return folders[writer, model_type] / "checkpoints"

    return write
