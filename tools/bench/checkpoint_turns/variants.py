"""The lines of the table: each a way to save or to load what a rank holds."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nxd_ckpt import async_save, load, save
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpoint_turns.turn import Turn

RAW_CALL_BYTES = 16 * 2**20
CHANGED = 0.05  # of the tensors, before an incremental save


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    Attributes:
        name: in the table.
        folder: it works in.
        run: what it does.
        saves: so its folder is emptied first.
        cold: its folder's pages are dropped first.
        prepare: what comes before the clock starts.
    """

    name: str
    folder: str
    run: Callable[[Turn], None]
    saves: bool = False
    cold: bool = False
    prepare: Callable[[Turn], None] | None = None


def raw_save(turn: Turn) -> None:
    with open(turn.place("raw") / str(turn.rank), "wb", buffering=0) as file:
        for tensor in turn.local.values():
            data = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
            for start in range(0, len(data), RAW_CALL_BYTES):
                file.write(data[start : start + RAW_CALL_BYTES])
        os.fsync(file.fileno())


def raw_load(turn: Turn) -> None:
    with open(turn.place("raw") / str(turn.rank), "rb", buffering=0) as file:
        for tensor in turn.local.values():
            data = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
            while data:
                data = data[file.readinto(data[:RAW_CALL_BYTES]) :]


def torch_save(turn: Turn) -> None:
    path = turn.place("torch") / str(turn.rank)
    torch.save(turn.local, path)
    _sync(path)


def torch_load(turn: Turn) -> None:
    _copy(turn, torch.load(turn.place("torch") / str(turn.rank), weights_only=True))


def safetensors_save(turn: Turn) -> None:
    path = turn.place("safetensors") / str(turn.rank)
    safetensors.torch.save_file(turn.local, path)
    _sync(path)


def safetensors_load(turn: Turn) -> None:
    _copy(turn, safetensors.torch.load_file(turn.place("safetensors") / str(turn.rank)))


def dcp_save(turn: Turn) -> None:
    dcp.save(turn.dtensors_by_rows(), checkpoint_id=turn.place("dcp"))


class _Future:
    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


def dcp_async_save(kind: AsyncCheckpointerType, turn: Turn) -> None:
    future = dcp.async_save(turn.dtensors_by_rows(), checkpoint_id=turn.place("dcp"), async_checkpointer_type=kind)
    turn.under_way = _Future(future)


def dcp_load(turn: Turn) -> None:
    dcp.load(turn.dtensors_by_rows(), checkpoint_id=turn.place("dcp"))


def dcp_reshard(turn: Turn) -> None:
    dcp.load(turn.dtensors_by_columns(), checkpoint_id=turn.place("dcp"))


def ckpt_save(turn: Turn) -> None:
    save(turn.place("ckpt"), "t", turn.by_rows())


def memory_copy(turn: Turn) -> None:
    for name, tensor in turn.local.items():
        turn.copies.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def ckpt_async_save(turn: Turn) -> None:
    turn.under_way = async_save(turn.place("ckpt"), "t", turn.by_rows())


def ckpt_async_save_late(turn: Turn) -> None:
    turn.under_way = async_save(turn.place("ckpt"), "t", turn.by_rows(), copy_in_background=True)


def ckpt_async_save_late_until_staged(turn: Turn) -> None:
    handle = async_save(turn.place("ckpt"), "t", turn.by_rows(), copy_in_background=True)
    handle.wait_until_staged()
    turn.under_way = handle


def until_durable(run: Callable[[Turn], None], turn: Turn) -> None:
    run(turn)
    finish(turn)


def finish(turn: Turn) -> None:
    """What goes on after the clock has stopped."""
    if turn.under_way is not None:
        turn.under_way.wait()
        turn.under_way = None


def ckpt_load(turn: Turn, *, verify: bool = True) -> None:
    load(turn.place("ckpt"), "t", into=turn.by_rows(), verify=verify)


def ckpt_reshard(turn: Turn) -> None:
    load(turn.place("ckpt"), "t", into=turn.by_columns())


def save_base(change: Callable[[Turn], None], turn: Turn) -> None:
    """Saves what the next save can refer to, and then changes a part of the tensors."""
    save(turn.place("incremental"), "base", turn.by_rows(), step=0, incremental=True)
    change(turn)


def change_tensors(turn: Turn) -> None:
    """Whole ones."""
    count = max(1, round(CHANGED * len(turn.local)))
    turn.changed_bytes = sum(tensor.add_(1).nbytes for tensor in list(turn.local.values())[:count])


def change_rows_together(turn: Turn) -> None:
    """Of each tensor its first rows."""
    turn.changed_bytes = 0
    for tensor in turn.local.values():
        turn.changed_bytes += tensor[: round(CHANGED * len(tensor))].add_(1).nbytes


def change_scattered_rows(turn: Turn) -> None:
    """Of each tensor some rows, here and there."""
    turn.changed_bytes = 0
    for tensor in turn.local.values():
        rows = torch.randperm(len(tensor))[: round(CHANGED * len(tensor))]
        tensor[rows] += 1
        turn.changed_bytes += tensor[rows].nbytes


def ckpt_incremental(turn: Turn) -> None:
    save(turn.place("incremental"), "t", turn.by_rows(), step=1, incremental=True)


THREAD = partial(dcp_async_save, AsyncCheckpointerType.THREAD)
PROCESS = partial(dcp_async_save, AsyncCheckpointerType.PROCESS)

VARIANTS = [
    Variant("raw write + fsync", "raw", raw_save, saves=True),
    Variant("nxd_ckpt.save", "ckpt", ckpt_save, saves=True),
    Variant("torch.save + fsync", "torch", torch_save, saves=True),
    Variant("safetensors.save_file + fsync", "safetensors", safetensors_save, saves=True),
    Variant("dcp.save", "dcp", dcp_save, saves=True),
    Variant("copy in memory, as async_save makes", "ckpt", memory_copy),
    Variant("nxd_ckpt.async_save, call", "ckpt", ckpt_async_save, saves=True),
    Variant("nxd_ckpt.async_save(late copy), call", "ckpt", ckpt_async_save_late, saves=True),
    Variant("the same, until a step may begin", "ckpt", ckpt_async_save_late_until_staged, saves=True),
    Variant("dcp.async_save(THREAD), call", "dcp", THREAD, saves=True),
    Variant("dcp.async_save(PROCESS), call", "dcp", PROCESS, saves=True),
    Variant("nxd_ckpt.async_save, until durable", "ckpt", partial(until_durable, ckpt_async_save), saves=True),
    Variant("dcp.async_save(THREAD), until written", "dcp", partial(until_durable, THREAD), saves=True),
    Variant("dcp.async_save(PROCESS), until written", "dcp", partial(until_durable, PROCESS), saves=True),
    Variant("raw read, cold", "raw", raw_load, cold=True),
    Variant("nxd_ckpt.load, cold", "ckpt", ckpt_load, cold=True),
    Variant("nxd_ckpt.load(verify=False), cold", "ckpt", partial(ckpt_load, verify=False), cold=True),
    Variant("torch.load, cold", "torch", torch_load, cold=True),
    Variant("safetensors.load_file, cold", "safetensors", safetensors_load, cold=True),
    Variant("dcp.load, cold", "dcp", dcp_load, cold=True),
    Variant("nxd_ckpt.load rows as columns, cold", "ckpt", ckpt_reshard, cold=True),
    Variant("dcp.load rows as columns, cold", "dcp", dcp_reshard, cold=True),
    Variant("raw read, warm", "raw", raw_load),
    Variant("nxd_ckpt.load, warm", "ckpt", ckpt_load),
    Variant("dcp.load, warm", "dcp", dcp_load),
    Variant("nxd_ckpt.load rows as columns, warm", "ckpt", ckpt_reshard),
    Variant("dcp.load rows as columns, warm", "dcp", dcp_reshard),
]

INCREMENTAL = [
    Variant(
        f"incremental save, 5% changed: {pattern}",
        "incremental",
        ckpt_incremental,
        saves=True,
        prepare=partial(save_base, change),
    )
    for pattern, change in (
        ("tensors", change_tensors),
        ("rows together", change_rows_together),
        ("rows here and there", change_scattered_rows),
    )
]

MANY_TENSORS = [  # without dcp's PROCESS, which opens a file for each tensor of a rank, more than a process may
    Variant("nxd_ckpt.save", "ckpt", ckpt_save, saves=True),
    Variant("dcp.save", "dcp", dcp_save, saves=True),
    Variant("nxd_ckpt.async_save, call", "ckpt", ckpt_async_save, saves=True),
    Variant("nxd_ckpt.async_save(late copy), call", "ckpt", ckpt_async_save_late, saves=True),
    Variant("the same, until a step may begin", "ckpt", ckpt_async_save_late_until_staged, saves=True),
    Variant("dcp.async_save(THREAD), call", "dcp", THREAD, saves=True),
]


def bytes_of_data(turn: Turn, tag: str) -> int:
    """What the data files of an incremental checkpoint take, by all ranks together."""
    folder = turn.place("incremental") / tag
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def changed_bytes_of_all(turn: Turn) -> int:
    total = torch.tensor(turn.changed_bytes)
    dist.all_reduce(total)
    return int(total)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _copy(turn: Turn, loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in turn.local.items():
        tensor.copy_(loaded[name])
