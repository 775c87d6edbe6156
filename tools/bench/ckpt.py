"""Times and weighs saving and loading with nxd-ckpt beside the disk itself, torch's distributed checkpoint and others.

    python tools/bench/ckpt.py [--rounds 5] [--mebibytes 1024] [--folder DIR] [--only WORD] [--many]
    python tools/bench/ckpt.py --kept 100

Two processes share a state of that size in 16 row-sharded float32 tensors; with `--many`, eight share 10,000 tensors of
32 KiB. Takes about a minute and a half per round, two with `--many`, needs four times the size on the disk, and leaves
nothing behind. All variants take their turn in every round. "dcp" is `torch.distributed.checkpoint`, and "late copy"
is `copy_in_background=True`.

Shown are the best and the median throughput (of the slower rank, between two barriers), the processor seconds of all
ranks together until the last byte is written, and the most memory that a rank took beyond what it held; both with the
processes that save in the background, once these have been started. The memory that nxd-ckpt's background saves keep,
as much as the tensors, was taken in the round that warms up. What is written is durable when the clock stops, unless
the name says "call" or "step may begin". For loads named cold the files' pages have been dropped from the system's
cache.

With `--kept`, instead, what calls cost that look through a folder of so many checkpoints; it takes two minutes for 100.
"""

import argparse
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing
from checkpoint_turns.kept import measure_kept
from checkpoint_turns.measuring import Measurement, measure, of_ranks
from checkpoint_turns.turn import Size, Turn
from checkpoint_turns.variants import INCREMENTAL, MANY_TENSORS, VARIANTS, Variant

LARGE = (2, 16, 1024)  # ranks, tensors, columns
MANY = Size(world_size=8, num_tensors=10_000, rows=8, columns=1024)

LATE_CALL = "nxd_ckpt.async_save(late copy), call"
RESHARD = "nxd_ckpt.load rows as columns"
GOALS = [  # what it is, the slower, the faster, by how much
    ("call of a background save, dcp THREAD", "dcp.async_save(THREAD), call", LATE_CALL, 10),
    ("call of a background save, dcp PROCESS", "dcp.async_save(PROCESS), call", LATE_CALL, 10),
    ("save, dcp", "dcp.save", "nxd_ckpt.save", 2),
    ("save, the disk", "raw write + fsync", "nxd_ckpt.save", 0.9),
    ("resharding load, cold, dcp", "dcp.load rows as columns, cold", f"{RESHARD}, cold", 2),
    ("resharding load, cold, the disk", "raw read, cold", f"{RESHARD}, cold", 0.9),
    ("resharding load, warm, dcp", "dcp.load rows as columns, warm", f"{RESHARD}, warm", 2),
]


def chosen(arguments: argparse.Namespace) -> list[Variant]:
    """The variants whose name has the word that is asked for, and the saves of what these load."""
    known = MANY_TENSORS if arguments.many else [*VARIANTS, *INCREMENTAL]
    asked = {variant for variant in known if arguments.only in variant.name}
    loaded = {variant.folder for variant in asked if not variant.saves}
    savers = {variant.folder: variant for variant in reversed(known) if variant.saves}
    return [variant for variant in known if variant in asked or variant in map(savers.get, loaded)]


def size_of(arguments: argparse.Namespace) -> Size:
    if arguments.many:
        return MANY
    world_size, num_tensors, columns = LARGE
    return Size(world_size, num_tensors, arguments.mebibytes * 2**20 // num_tensors // columns // 4, columns)


def run_rank(rank: int, folder: Path, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}  # for dcp's own processes
    size = size_of(arguments)
    os.environ["WORLD_SIZE"] = str(size.world_size)
    store = dist.FileStore(str(folder / "store"), size.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size.world_size)
    turn = Turn(rank, folder, size)
    rounds = [  # the first to warm up
        [measure(turn, variant) for variant in chosen(arguments)] for _ in range(arguments.rounds + 1)
    ]
    (folder / f"measured-{rank}.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def measure_rounds(arguments: argparse.Namespace, folder: Path) -> list[list[Measurement]]:
    """One list per round, of the variants in order; the first round warmed up."""
    world_size = size_of(arguments).world_size
    torch.multiprocessing.spawn(run_rank, args=(folder, arguments), nprocs=world_size)
    by_rank = [json.loads((folder / f"measured-{rank}.json").read_text()) for rank in range(world_size)]
    return [
        [of_ranks([Measurement(*one) for one in measured]) for measured in zip(*of_round, strict=True)]
        for of_round in zip(*by_rank, strict=True)
    ]


def report(arguments: argparse.Namespace, rounds: list[list[Measurement]]) -> str:
    """A table with a line per variant, and what the goals say."""
    size = size_of(arguments)
    lines = [
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        f"{size.num_bytes / 2**20:.0f} MiB in {size.num_tensors} tensors on {size.world_size} ranks, "
        f"{arguments.rounds} rounds",
        f"{'':42} {'first s':>8} {'median s':>9} {'best MB/s':>10} {'median':>8} {'cpu s':>7} {'extra memory':>13}",
    ]
    times: dict[str, list[float]] = {}
    for variant, (first, *turns) in zip(chosen(arguments), zip(*rounds, strict=True), strict=True):
        walls = times[variant.name] = [turn.wall for turn in turns]
        lines.append(
            f"{variant.name:42} {first.wall:8.3f} {median(walls):9.3f} {size.num_bytes / min(walls) / 1e6:10.0f} "
            f"{size.num_bytes / median(walls) / 1e6:8.0f} {median(turn.cpu for turn in turns):7.2f} "
            f"{max(turn.memory for turn in turns) / 2**20:9.0f} MiB"
            + (f"  writes {turns[-1].written:.3f} times what changed" if variant in INCREMENTAL else "")
        )
    for goal, slower, faster, factor in GOALS:
        if slower in times and faster in times:
            ratios = [one / other for one, other in zip(times[slower], times[faster], strict=True)]
            met = "met" if median(ratios) >= factor else "not met"
            lines.append(f"{goal}: {median(ratios):.2f} times as fast in the median round, {factor} asked: {met}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's folder for temporary files")
    parser.add_argument("--only", default="", help="variants with this word in their name; for loads also a save")
    parser.add_argument("--many", action="store_true", help="eight ranks with 10,000 tensors")
    parser.add_argument("--kept", type=int, metavar="N", help="calls that look through N checkpoints of 2,000 tensors")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} measures nothing; take 1 or more")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        if arguments.kept:
            print("\n".join(measure_kept(folder, arguments.kept)))
            return
        print(report(arguments, measure_rounds(arguments, folder)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
