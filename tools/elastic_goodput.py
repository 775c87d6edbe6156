"""Measures how much of its time a training makes progress while its ranks are killed, and draws it.

    python tools/elastic_goodput.py --rows goodput.jsonl                          twenty minutes on two idle cores
    python tools/elastic_goodput.py --rows goodput.jsonl --picture goodput.png    draws what such runs have shown

The same small Llama on two ranks, in three ways: elastic with a checkpoint in memory each step; elastic with one on
disk every ten steps; and under torchrun, which starts all ranks again after a death, with the same ones on disk. Ranks
are killed by a seed, one after the other, at moments whose mean distance is given.

Goodput is the share of its time that a run would have needed for the steps that it has kept, had it neither saved nor
lost anything: its steps, times the seconds of a step of such a run in between, over the seconds from its first step on.
So it counts what saving costs as well.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_elastic.chaos import DisturbancePlan, FollowedRun, disturb

DISTANCES = (30.0, 12.0, 6.0, 3.0)  # mean seconds between kills
PATIENCE = 120.0  # seconds without a step
SMALL = {
    "data.path": "text",
    "data.sequence_length": 256,
    "model.hidden_size": 256,
    "model.intermediate_size": 704,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "train.global_batch_size": 8,
    "train.steps": 1_000_000,
    "train.log_every": 1,
    "train.eval_every": 0,
}
RANKS = "2"
OWN = ["-m", "nxd_cli", "train", "--nproc", RANKS]
ELASTIC = ["--elastic", f"{RANKS}:{RANKS}"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS, "--max-restarts", "1000"]
NOT_TO_DISK, TO_DISK = "checkpoint.save_every=0", "checkpoint.save_every=10"
ALONE = "alone"
WAYS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "elastic, in memory each step": (OWN, [*ELASTIC, NOT_TO_DISK, "checkpoint.memory_every=1"]),
    "elastic, on disk every 10 steps": (OWN, [*ELASTIC, TO_DISK]),
    "torchrun, on disk every 10 steps": ([*TORCHRUN, "-m", "nxd_cli", "train"], [TO_DISK]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="a file of a line per run")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="draw the rows instead of measuring")
    options = parser.parse_args()
    if options.picture is not None:
        draw([json.loads(line) for line in options.rows.read_text().splitlines()], options.picture)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        (folder / "text/0.txt").write_text("the quick brown fox jumps over the lazy dog. " * 4000)
        step_seconds = 0.0
        for seed, (way, distance) in enumerate([(ALONE, None), *points(), (ALONE, None)], options.seed):
            row = measure_run(folder, way, distance, seed, options.seconds)
            step_seconds = step_seconds or row["seconds"] / row["steps"]
            row["goodput"] = round(row["steps"] * step_seconds / row["seconds"], 3)
            print(json.dumps(row), flush=True)
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")


def points() -> list[tuple[str, float | None]]:
    """What is measured: each way without kills first, then more and more often."""
    return [(way, distance) for distance in (None, *DISTANCES) for way in WAYS]


class _Limited:
    """A process that counts as ended some seconds after the first step of its run."""

    def __init__(self, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        self.process, self.seconds = process, seconds
        self.run: FollowedRun | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        first = self.run.seen[0].at if self.run is not None and self.run.seen else None
        if first is not None and time.monotonic() - first > self.seconds:
            return 0
        return self.process.poll()


def measure_run(folder: Path, way: str, distance: float | None, seed: int, seconds: float) -> dict[str, Any]:
    """One run, as a row."""
    launcher, further = WAYS.get(way, (OWN, [NOT_TO_DISK]))
    output = folder / f"run-{seed}"
    settings = [f"{name}={value}" for name, value in {**SMALL, "output": output}.items()]
    command = [sys.executable, *launcher, *settings, *further]
    log = folder / f"run-{seed}.log"
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT) as process,
    ):
        limited = _Limited(process, seconds)
        run = limited.run = FollowedRun(limited, output, patience=PATIENCE)
        plan = (
            DisturbancePlan(seed, 0)
            if distance is None
            else DisturbancePlan(seed, seconds=(0.5 * distance, 1.5 * distance))
        )
        try:
            kills = disturb(run, plan)
        finally:
            process.terminate()
    if not run.seen:
        raise SystemExit(f"{way!r} has taken no step:\n{log.read_text()}")
    shutil.rmtree(output, ignore_errors=True)
    steps = run.step - run.seen[0].record.step
    return {"way": way, "distance": distance, "seconds": seconds, "steps": steps, "kills": len(kills)}


def draw(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Goodput over kills per minute, a line for each way; needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for way in WAYS:
        found = sorted((60 * row["kills"] / row["seconds"], row["goodput"]) for row in rows if row["way"] == way)
        axes.plot(*zip(*found, strict=True), marker="o", label=way)
    axes.set(xlabel="kills per minute", ylabel="goodput", ylim=(0, 1.05))
    axes.legend()
    figure.savefig(picture, dpi=160)


if __name__ == "__main__":
    main()
