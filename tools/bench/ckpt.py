"""Times and weighs saving and loading with nxd-ckpt beside the disk itself and other ways to do it.

    python tools/bench/ckpt.py [--rounds 5] [--mebibytes 1024] [--folder DIR] [--only WORD]

Two processes share a state of that size in 16 row-sharded float32 tensors. Takes about a minute per round, needs three
times the size on the disk, and leaves nothing behind. All variants take their turn in every round. Shown are the best
and the median throughput (of the slower rank, between two barriers), the processor seconds of both ranks together, and
the most memory that a rank took beyond what it held; both with its writer process, once that has been started. The
memory that saves in the background keep, as much as the tensors, was taken in the round that warms up. What is written
is durable when the clock stops, unless the name says otherwise; for loads named cold the file's pages have been dropped
from the system's cache.
"""

import argparse
import contextlib
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nxd_ckpt import AsyncSave, Shard, ShardedTensor, async_save, load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as ShardPlacement

WORLD_SIZE = 2
NUM_TENSORS = 16
COLUMNS = 1024
RAW_CALL_BYTES = 16 * 2**20


class Measurement(NamedTuple):
    """One turn: wall seconds of the slower rank, processor seconds of both, extra bytes of the larger."""

    wall: float
    cpu: float
    memory: int


class Turn:
    """What one rank holds and where it saves it."""

    def __init__(self, rank: int, folder: Path, mebibytes: int) -> None:
        self.rank = rank
        self.folder = folder
        rows = mebibytes * 2**20 // NUM_TENSORS // COLUMNS // 4
        self.global_shape = (rows, COLUMNS)
        self.mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        own = rows // WORLD_SIZE
        generator = torch.Generator().manual_seed(rank)
        self.local = {f"layer.{i}": torch.randn(own, COLUMNS, generator=generator) for i in range(NUM_TENSORS)}
        self.copies: dict[str, torch.Tensor] = {}
        self.under_way: AsyncSave | None = None

    def place(self, name: str) -> Path:
        """Where a variant keeps its files."""
        return self.folder / name

    def by_rows(self) -> dict[str, ShardedTensor | torch.Tensor]:
        """The local tensors as this rank's rows of global ones."""
        first = self.rank * self.global_shape[0] // WORLD_SIZE
        return {
            name: ShardedTensor(self.global_shape, [Shard(tensor, (first, 0))]) for name, tensor in self.local.items()
        }

    def by_columns(self) -> dict[str, ShardedTensor | torch.Tensor]:
        """The same memory as this rank's columns of global tensors."""
        rows, columns = self.global_shape[0], COLUMNS // WORLD_SIZE
        return {
            name: ShardedTensor(
                self.global_shape,
                [Shard(tensor.view(-1)[: rows * columns].view(rows, columns), (0, self.rank * columns))],
            )
            for name, tensor in self.local.items()
        }

    def as_dtensors(self) -> dict[str, torch.Tensor]:
        """The local tensors as torch's own distributed ones."""
        placements: list[Placement] = [ShardPlacement(0)]
        return {name: DTensor.from_local(tensor, self.mesh, placements) for name, tensor in self.local.items()}


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
    dcp.save(turn.as_dtensors(), checkpoint_id=turn.place("dcp"))


def dcp_load(turn: Turn) -> None:
    dcp.load(turn.as_dtensors(), checkpoint_id=turn.place("dcp"))


def ckpt_save(turn: Turn) -> None:
    save(turn.place("ckpt"), "t", turn.by_rows())


def memory_copy(turn: Turn) -> None:
    for name, tensor in turn.local.items():
        turn.copies.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def ckpt_async_save(turn: Turn) -> None:
    turn.under_way = async_save(turn.place("ckpt"), "t", turn.by_rows())


def ckpt_async_save_and_wait(turn: Turn) -> None:
    ckpt_async_save(turn)
    finish(turn)


def finish(turn: Turn) -> None:
    """What goes on after the clock has stopped."""
    if turn.under_way is not None:
        turn.under_way.wait()


def ckpt_load(turn: Turn, *, verify: bool = True) -> None:
    load(turn.place("ckpt"), "t", into=turn.by_rows(), verify=verify)


def ckpt_load_unverified(turn: Turn) -> None:
    ckpt_load(turn, verify=False)


def ckpt_reshard(turn: Turn) -> None:
    load(turn.place("ckpt"), "t", into=turn.by_columns())


class Variant(NamedTuple):
    """One line of the table.

    Attributes:
        name: in the table.
        folder: it works in.
        run: what it does.
        saves: so its folder is emptied first.
        cold: its folder's pages are dropped first.
    """

    name: str
    folder: str
    run: Callable[[Turn], None]
    saves: bool = False
    cold: bool = False


VARIANTS = [
    Variant("raw write + fsync", "raw", raw_save, saves=True),
    Variant("nxd_ckpt.save", "ckpt", ckpt_save, saves=True),
    Variant("copy in memory, as async_save makes", "ckpt", memory_copy),
    Variant("nxd_ckpt.async_save, until it returns", "ckpt", ckpt_async_save, saves=True),
    Variant("nxd_ckpt.async_save, until it is durable", "ckpt", ckpt_async_save_and_wait, saves=True),
    Variant("torch.save + fsync", "torch", torch_save, saves=True),
    Variant("safetensors.save_file + fsync", "safetensors", safetensors_save, saves=True),
    Variant("torch.distributed.checkpoint.save", "dcp", dcp_save, saves=True),
    Variant("raw read, cold", "raw", raw_load, cold=True),
    Variant("nxd_ckpt.load, cold", "ckpt", ckpt_load, cold=True),
    Variant("nxd_ckpt.load(verify=False), cold", "ckpt", ckpt_load_unverified, cold=True),
    Variant("torch.load, cold", "torch", torch_load, cold=True),
    Variant("safetensors.load_file, cold", "safetensors", safetensors_load, cold=True),
    Variant("torch.distributed.checkpoint.load, cold", "dcp", dcp_load, cold=True),
    Variant("nxd_ckpt.load rows as columns, cold", "ckpt", ckpt_reshard, cold=True),
    Variant("raw read, warm", "raw", raw_load),
    Variant("nxd_ckpt.load, warm", "ckpt", ckpt_load),
    Variant("torch.distributed.checkpoint.load, warm", "dcp", dcp_load),
]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _copy(turn: Turn, loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in turn.local.items():
        tensor.copy_(loaded[name])


def _drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory can be measured on Linux only")


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it has started."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    ticks = sum(sum(map(int, status[13:15])) for status in _status_of_children().values())
    return used.ru_utime + used.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def _memory_of_children() -> int:
    """Bytes that only they have; not the memory they share with this process, which counts here."""
    total = 0
    for child in _status_of_children():
        for line in Path(f"/proc/{child}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                total += int(line.split()[1]) * 1024
    return total


def _status_of_children() -> dict[int, list[str]]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            status = path.read_text().replace(") ", "\t").replace(" (", "\t").replace(" ", "\t").split("\t")
            if status[3] == str(os.getpid()):
                found[int(status[0])] = status
    return found


def _measure(turn: Turn, variant: Variant) -> Measurement:
    if turn.rank == 0:
        place = turn.place(variant.folder)
        if variant.saves:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        elif variant.cold:
            _drop_pages(place)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = _resident("VmRSS")
    dist.barrier()
    start, cpu = time.perf_counter(), _cpu_seconds()
    variant.run(turn)
    wall = time.perf_counter() - start
    finish(turn)
    cpu = _cpu_seconds() - cpu
    dist.barrier()
    return Measurement(wall, cpu, _resident("VmHWM") - before + _memory_of_children())


def _run_rank(rank: int, folder: Path, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    turn = Turn(rank, folder, arguments.mebibytes)
    variants = [variant for variant in VARIANTS if arguments.only in variant.name]
    for _ in range(arguments.rounds + 1):  # the first to warm up
        results.put((rank, [_measure(turn, variant) for variant in variants]))
    dist.destroy_process_group()


def _of_ranks(of_ranks: tuple[Measurement, ...]) -> Measurement:
    return Measurement(
        max(one.wall for one in of_ranks), sum(one.cpu for one in of_ranks), max(one.memory for one in of_ranks)
    )


def measure(arguments: argparse.Namespace, folder: Path) -> list[list[Measurement]]:
    """One list per round, of the variants in order."""
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.SimpleQueue()
    processes = [spawn.Process(target=_run_rank, args=(rank, folder, arguments, results)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    by_rank: dict[int, list[list[Measurement]]] = {rank: [] for rank in range(WORLD_SIZE)}
    for _ in range(WORLD_SIZE * (arguments.rounds + 1)):
        rank, of_round = results.get()
        by_rank[rank].append(of_round)
    for process in processes:
        process.join()
    rounds = list(zip(*by_rank.values(), strict=True))[1:]
    return [[_of_ranks(of_ranks) for of_ranks in zip(*of_round, strict=True)] for of_round in rounds]


def report(arguments: argparse.Namespace, rounds: list[list[Measurement]]) -> str:
    """A table, one line per variant."""
    lines = [f"{arguments.mebibytes} MiB on {WORLD_SIZE} ranks, {arguments.rounds} rounds"]
    lines.append(f"{'':42} {'best MB/s':>10} {'median':>10} {'cpu s':>7} {'extra memory':>13}")
    num_bytes = arguments.mebibytes * 2**20
    names = [variant.name for variant in VARIANTS if arguments.only in variant.name]
    for name, turns in zip(names, zip(*rounds, strict=True), strict=True):
        walls = [turn.wall for turn in turns]
        lines.append(
            f"{name:42} {num_bytes / min(walls) / 1e6:10.0f} {num_bytes / median(walls) / 1e6:10.0f} "
            f"{median(turn.cpu for turn in turns):7.2f} {max(turn.memory for turn in turns) / 2**20:9.0f} MiB"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's folder for temporary files")
    parser.add_argument("--only", default="", help="variants with this word in their name")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        print(report(arguments, measure(arguments, folder)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
