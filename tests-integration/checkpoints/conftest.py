"""Checkpoints of one tiny Llama in float64, written by whoever writes them, each at a layout of its own."""

import sys
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
    """`written("nxd train")`: a folder of checkpoints that this has written, once for all tests."""
    from nxd_state.testing import run_on_ranks
    from writers_and_readers import WRITERS

    folders: dict[str, Path] = {}

    def write(writer: str) -> Path:
        if writer not in folders:
            folders[writer] = tmp_path_factory.mktemp("written")
            run_on_ranks(WRITERS[writer], 2, folders[writer], text)
        return folders[writer] / "checkpoints"

    return write
