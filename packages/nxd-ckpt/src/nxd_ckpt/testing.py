"""Runs several ranks in one process, to try or test a layout without a launcher; and tests for any store.

Each rank is a thread. Ranks exchange messages through a barrier, encoded as they would be between processes.
"""

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest.mock import patch

import torch

import nxd_ckpt
from nxd_ckpt import CheckpointError, Coordinator, Shard, ShardedTensor
from nxd_ckpt.errors import RanksLostError
from nxd_ckpt.messages import decode_message, encode_message
from nxd_ckpt.safetensors_file import file_parts

Result = TypeVar("Result")


class Killed(BaseException):
    """Ends a rank that raises it as a kill would: nothing catches it, and the other ranks lose contact."""


class _Meeting:
    def __init__(self, world_size: int, timeout: float) -> None:
        self.values: list[bytes] = [b""] * world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout)


class _ThreadCoordinator:
    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self._meeting = meeting

    def all_gather_object(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = encode_message(value)
        try:
            self._meeting.barrier.wait()
            values = list(self._meeting.values)
            self._meeting.barrier.wait()  # no rank may overwrite a value that another has not seen
        except threading.BrokenBarrierError:
            raise RanksLostError(f"rank {self.rank} of {self.world_size} lost contact with the other ranks") from None
        return [decode_message(data) for data in values]


def outcomes_on_threads(
    function: Callable[[Coordinator], Result], world_size: int, *, timeout: float = 60.0
) -> list[Result | BaseException]:
    """Call `function(coordinator)` for each rank at the same time; pass the coordinator as `process_group`.

    Returns:
        The result or exception of each rank, in rank order.
    """
    meeting = _Meeting(world_size, timeout)
    outcomes: list[Result | BaseException] = [RuntimeError("did not run")] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(_ThreadCoordinator(rank, world_size, meeting))
        except Exception as error:
            outcomes[rank] = error
        except BaseException as error:
            outcomes[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def run_on_threads(
    function: Callable[[Coordinator], Result], world_size: int, *, timeout: float = 60.0
) -> list[Result]:
    """Like `outcomes_on_threads`, but raises the exception of the first rank that failed."""
    results: list[Result] = []
    for outcome in outcomes_on_threads(function, world_size, timeout=timeout):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


class StoreTests:
    """Tests for any store: inherit from this class, and define a pytest fixture `root`, the path of an empty store."""

    def test_save_by_rows_loads_by_columns(self, root: str) -> None:
        """Checkpoints load at any layout."""
        whole = torch.arange(48.0).reshape(6, 8)

        def save_rows(ranks: Coordinator) -> None:
            shard = Shard(whole[2 * ranks.rank : 2 * ranks.rank + 2], (2 * ranks.rank, 0))
            nxd_ckpt.save(root, "t", {"w": ShardedTensor((6, 8), [shard])}, process_group=ranks)

        def load_columns(ranks: Coordinator) -> torch.Tensor:
            mine = torch.zeros(6, 4)
            into = {"w": ShardedTensor((6, 8), [Shard(mine, (0, 4 * ranks.rank))])}
            nxd_ckpt.load(root, "t", into=into, process_group=ranks)
            return mine

        run_on_threads(save_rows, 3)

        assert torch.equal(torch.cat(run_on_threads(load_columns, 2), dim=1), whole)

    def test_list_checkpoints_orders_by_step_and_finds_nothing_in_an_empty_place(self, root: str) -> None:
        """The newest checkpoint comes last."""
        assert nxd_ckpt.latest(root) is None
        for step in (10, 9, 100):
            _save_value(root, f"s{step}", step)

        assert _tags(root) == ["s9", "s10", "s100"]
        assert nxd_ckpt.open_checkpoint(root).tag == "s100"

    def test_save_under_a_taken_tag_is_refused_and_overwrites_if_asked_to(self, root: str) -> None:
        """Nothing of the replaced checkpoint remains."""
        _save_value(root, "t", 1)

        _expect_refusal("t exists; choose another tag or pass overwrite=True", lambda: _save_value(root, "t", 2))
        assert _value_of(root, "t") == 1
        _save_value(root, "t", 2, overwrite=True)

        assert _value_of(root, "t") == 2
        assert nxd_ckpt.gc(root, dead_after=0, dry_run=True) == []

    def test_save_that_fails_on_one_rank_leaves_nothing(self, root: str) -> None:
        """All ranks raise the reason."""

        def parts_of_rank_zero(*args: Any, **options: Any) -> "Iterator[bytes | memoryview]":
            for part in file_parts(*args, **options):
                yield part
                if threading.current_thread().name == "rank 1":
                    raise OSError("the disk is on fire")

        def save_one(ranks: Coordinator) -> None:
            part = Shard(torch.ones(2), (2 * ranks.rank,))
            nxd_ckpt.save(root, "t", {"w": ShardedTensor((4,), [part])}, process_group=ranks)

        with patch("nxd_ckpt.saving.file_parts", parts_of_rank_zero):
            outcomes = outcomes_on_threads(save_one, 2)

        assert str(outcomes[0]) == str(outcomes[1])
        assert "failed on 1 of 2 ranks\n  rank 1: OSError: the disk is on fire" in str(outcomes[0])
        assert _tags(root) == []
        assert nxd_ckpt.gc(root, dead_after=0) == []

    def test_tag_that_is_not_there_is_refused_with_those_that_are(self, root: str) -> None:
        """Loading and pinning raise an error that lists the existing tags."""
        _expect_refusal("no checkpoint 'x' in .*; available: none", lambda: nxd_ckpt.pin(root, "x"))
        _save_value(root, "t", 1)

        _expect_refusal("no checkpoint 'x' in .*; available: t", lambda: nxd_ckpt.load(root, "x", into={}))

    def test_delete_takes_a_checkpoint_away_and_its_data(self, root: str) -> None:
        """Other checkpoints remain."""
        _save_value(root, "a", 1)
        _save_value(root, "b", 2)

        nxd_ckpt.delete(root, "a")

        assert _tags(root) == ["b"]
        assert _value_of(root, "b") == 2
        assert nxd_ckpt.gc(root, dead_after=0) == []

    def test_pin_survives_an_overwrite_and_keeps_from_delete_until_unpin(self, root: str) -> None:
        """Unpinning twice is not an error."""
        _save_value(root, "a", 1)
        nxd_ckpt.pin(root, "a")
        _save_value(root, "a", 2, overwrite=True)
        nxd_ckpt.gc(root, dead_after=0)

        assert nxd_ckpt.list_checkpoints(root)[0].pinned
        _expect_refusal("'a' in .* is pinned; unpin it first", lambda: nxd_ckpt.delete(root, "a"))

        nxd_ckpt.unpin(root, "a")
        nxd_ckpt.unpin(root, "a")
        nxd_ckpt.delete(root, "a")
        assert _tags(root) == []


def _save_value(root: str, tag: str, value: int, *, overwrite: bool = False) -> None:
    nxd_ckpt.save(root, tag, {"w": torch.full((4, 6), float(value))}, step=value, overwrite=overwrite)


def _value_of(root: str, tag: str) -> float:
    return nxd_ckpt.open_checkpoint(root, tag).read("w").unique().item()


def _tags(root: str) -> list[str]:
    return [info.tag for info in nxd_ckpt.list_checkpoints(root)]


def _expect_refusal(pattern: str, action: Callable[[], object]) -> None:
    try:
        action()
    except CheckpointError as error:
        message = str(error)
    else:
        message = "it was not refused"
    assert re.search(pattern, message), message
