"""The saves that the crash tests make, and what is left of them afterwards."""

import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from nxd_ckpt import list_checkpoints, open_checkpoint, save
from nxd_ckpt.testing import run_on_threads

from .forked_ranks import Outcome, run_forked
from .system_calls import Call, Sabotage, SystemCalls, calls_in

WORLD_SIZE = 2

# The whole sweep takes a minute or two; the quick session takes one point in a few, other ones in each test.
SOME_OR_ALL = pytest.mark.parametrize(
    "every", [pytest.param(5, id="some"), pytest.param(1, marks=pytest.mark.slow, id="all")]
)
NEW_TAG, OVERWRITE = "u", "t"  # an old checkpoint lies at "t"


def sample(points: list[int], every: int, seed: str) -> list[int]:
    """All of them, or one in `every`, beginning at one that depends on the seed."""
    return points[zlib.crc32(seed.encode()) % min(every, len(points)) :: every]


def state_of(rank: int, value: float) -> dict[str, torch.Tensor]:
    """Both ranks hold `shared`, each has a tensor of its own; all elements are `value`."""
    return {"shared": torch.full((100,), float(value)), f"own{rank}": torch.full((50,), float(value))}


def save_one(root: Path, tag: str, value: int, rank: int, **options) -> None:
    """One rank's part of a save."""
    save(root, tag, state_of(rank, value), step=value, objects=value, overwrite=True, **options)


def save_all(root: Path, tag: str, value: int, ranks) -> None:
    save_one(root, tag, value, ranks.rank, process_group=ranks)


def make_old(root: Path) -> None:
    """A folder with the checkpoint "t" of value 1."""
    run_on_threads(lambda ranks: save_all(root, "t", 1, ranks), WORLD_SIZE)


def copy_of(old: Path, root: Path) -> Path:
    shutil.copytree(old, root)
    return root


def save_again(root: Path, tag: str, value: int) -> None:
    run_on_threads(lambda ranks: save_all(root, tag, value, ranks), WORLD_SIZE)


def sabotaged_save(
    root: Path, tag: str, log: Path, sabotage: Mapping[int, Sabotage] | None = None
) -> tuple[list[Outcome], list[Call]]:
    """Saves value 2 by forked ranks, of which those in `sabotage` have bad luck."""

    def rank_main(ranks):
        SystemCalls(ranks.rank, log, (sabotage or {}).get(ranks.rank))
        save_all(root, tag, 2, ranks)

    outcomes = run_forked(rank_main, WORLD_SIZE)
    return outcomes, calls_in(log)


def value_of(root: Path, tag: str) -> int:
    """The value that a checkpoint was saved with, after reading and comparing all of it."""
    checkpoint = open_checkpoint(root, tag)
    value = checkpoint.objects
    assert checkpoint.step == value
    assert sorted(checkpoint.tensors) == ["own0", "own1", "shared"]
    for name in checkpoint.tensors:
        expected = state_of(0, value)["shared"] if name == "shared" else state_of(0, value)["own0"]
        assert torch.equal(checkpoint.read(name), expected)
    return value


def check_old_or_new(root: Path, tag: str) -> None:
    """Each checkpoint that is listed is whole, and the old one is there unless it was to be overwritten."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of damaged manifests
        values = {info.tag: value_of(root, info.tag) for info in list_checkpoints(root)}
    assert values in ([{"t": 1}, {"t": 2}] if tag == "t" else [{"t": 1}, {"t": 1, "u": 2}])
