"""Kills ranks of elastic runs, thousands of times if asked for, and compares each run with one that is left alone.

    python tools/elastic_soak.py --losses 1000 --rows soak.jsonl      hours on two cores
    python tools/elastic_soak.py --summary soak.jsonl                 what such runs have shown

Each run is a small Llama in float64 with a checkpoint in memory each step and none on disk, at one of several layouts
on 4 or 8 ranks. By its seed ranks are killed, a few are stopped instead, at any moment of a step or, in every third
run, also in the middle of recoveries. In some runs lost ranks stay away for some time, so that the run goes on at
another layout and comes back. It must end as the run that is left alone: the same losses, each step once, and the same
weights, optimizer states and all else in its checkpoint, bit for bit, or to 1e-10 where it was at another layout in
between. It may lose one step at most with each rank, and must not begin again from the disk.

Appends a line of JSON per run to --rows. Runs that fail stay in --keep with their logs; nothing else is left.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nxd_ckpt
import torch
from nxd_elastic.chaos import DisturbancePlan, FollowedRun, Kind, disturb, measure

STEPS = 150
SILENCE = 4  # seconds after which a stopped rank is lost; a short one, so that more ranks can be lost in an hour
PATIENCE = 300.0  # seconds without a step
BOUND = 1e-10  # of runs that were at another layout in between

TINY = {
    "data.path": "text",
    "data.sequence_length": 32,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "train.global_batch_size": 4,
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.dtype": "float64",
    "optimizer.warmup_steps": 2,
    "checkpoint.save_every": 0,
}
KILL: Kind = "kill"
MOSTLY_KILLS: Sequence[Kind] = (*[KILL] * 18, "stop", "pause")


@dataclass(frozen=True)
class Case:
    """A layout, and how its ranks are lost.

    Attributes:
        ranks: that train.
        least: that it goes on with.
        settings: of the recipe.
        layouts: besides the recipe's.
        kinds: of disturbances.
        losses: in each run, about.
    """

    ranks: int
    least: int
    settings: dict[str, Any]
    layouts: str = ""
    kinds: Sequence[Kind] = MOSTLY_KILLS
    losses: int = 40

    @property
    def changes_layout(self) -> bool:
        """Whether the run goes on with fewer ranks in between."""
        return "absent" in self.kinds


TP, PP, ZERO = "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size", "parallel.zero_stage"
CASES = {
    "TP 2 x DP 2": Case(4, 4, {TP: 2}),
    "PP 2 x DP 2, ZeRO-1": Case(4, 4, {PP: 2, ZERO: "1"}),
    "TP 2 x PP 2": Case(4, 4, {TP: 2, PP: 2}),
    "TP 2 x PP 2 x DP 2": Case(8, 8, {TP: 2, PP: 2}),
    "TP 2 x DP 2, or TP 2": Case(4, 2, {TP: 2}, kinds=("absent",), losses=15),
    "TP 2 x PP 2, or TP 2, or PP 2": Case(
        4, 2, {TP: 2, PP: 2}, layouts="tp=2;pp=2", kinds=("absent", "kill"), losses=15
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=100, help="ranks to lose in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: %(default)s)")
    parser.add_argument("--case", action="append", choices=CASES, help="only these layouts")
    parser.add_argument("--rows", type=Path, help="a file to which each run appends a line")
    parser.add_argument("--keep", type=Path, default=Path("soak-failures"), help="where runs that fail stay")
    parser.add_argument(
        "--summary", type=Path, metavar="ROWS", help="print what the runs of a file have shown, and end"
    )
    options = parser.parse_args()
    if options.summary is not None:
        print(summary([json.loads(line) for line in options.summary.read_text().splitlines()]))
        return 0
    rows: list[dict[str, Any]] = []
    names = options.case or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.keep)
        for seed in range(options.seed, sys.maxsize):
            if sum(len(row["seconds"]) for row in rows) >= options.losses:
                break
            rows.append(soak.run(names[seed % len(names)], seed))
            print(json.dumps(rows[-1]), flush=True)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(summary(rows))
    return int(any(row["problems"] for row in rows))


class Soak:
    """Runs in a folder, and what they are compared with."""

    def __init__(self, folder: Path, keep: Path) -> None:
        self._folder, self._keep = folder, keep
        self._alone: dict[str, Path] = {}
        (folder / "text").mkdir()
        for number in range(4):
            (folder / f"text/{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)

    def run(self, name: str, seed: int) -> dict[str, Any]:
        """One disturbed run, as a row."""
        case = CASES[name]
        alone = self._run_alone(name)
        output = self._folder / f"run-{seed}"
        log = self._folder / f"run-{seed}.log"
        elastic = ["--elastic", f"{case.least}:{case.ranks}", "--elastic-grace", "2" if case.changes_layout else "30"]
        elastic += ["--elastic-silence", str(SILENCE), "--elastic-layouts", case.layouts, "checkpoint.memory_every=1"]
        plan = DisturbancePlan(seed, case.losses, case.kinds, steps=(1, 3), lasting=(2.5, 5.0))
        if seed // len(CASES) % 3 == 2 and not case.changes_layout:
            plan = replace(plan, seconds=(0.1, 4.0))
        began, stands_still = time.monotonic(), ""
        with (
            log.open("wb") as stream,
            subprocess.Popen(
                self._command(case, output, elastic), cwd=self._folder, stdout=stream, stderr=subprocess.STDOUT
            ) as process,
        ):
            run = FollowedRun(process, output, patience=PATIENCE)
            try:
                disturbances = disturb(run, plan)
            except TimeoutError as error:
                disturbances, stands_still = [], str(error)
                process.kill()
            code = process.wait()
        measures = measure(run, disturbances)
        text = log.read_text()
        problems = [] if code == 0 else [stands_still or f"exit code {code}"]
        if code == 0:
            problems += differences(alone, output, BOUND if case.changes_layout else 0.0)
        if max(measures.steps_lost, default=0) > 1:
            problems.append(f"steps lost: {measures.steps_lost}")
        in_memory, resumed = text.count("in the memory of the hosts"), text.count("; the run resumes from")
        if in_memory < resumed:
            problems.append(f"{resumed} resumes, {in_memory} of them from memory")
        if problems:
            self._keep.mkdir(exist_ok=True, parents=True)
            shutil.copy(log, self._keep / f"{seed}.log")
            shutil.copytree(output, self._keep / str(seed), dirs_exist_ok=True)
            (self._keep / f"{seed}.txt").write_text("\n".join([name, *problems, *map(str, disturbances)]))
        shutil.rmtree(output, ignore_errors=True)
        return {
            "seed": seed,
            "case": name,
            "seconds": [round(it, 2) for it in measures.recoveries],
            "steps_lost": list(measures.steps_lost),
            "kinds": [it.kind for it in disturbances],
            "goodput": round(measures.goodput, 3),
            "took": round(time.monotonic() - began),
            "problems": problems,
        }

    def _run_alone(self, name: str) -> Path:
        if name not in self._alone:
            output = self._folder / f"alone-{len(self._alone)}"
            subprocess.run(
                self._command(CASES[name], output, []), cwd=self._folder, check=True, capture_output=True, text=True
            )
            self._alone[name] = output
        return self._alone[name]

    def _command(self, case: Case, output: Path, further: Sequence[str]) -> list[str]:
        settings = [f"{name}={value}" for name, value in {**TINY, **case.settings, "output": output}.items()]
        return [sys.executable, "-m", "nxd_cli", "train", "--nproc", str(case.ranks), *settings, *further]


def differences(expected: Path, found: Path, bound: float) -> list[str]:
    """What two runs have ended with that is not the same, or further apart than a relative bound."""
    problems = []
    theirs, own = (read_losses(folder) for folder in (expected, found))
    if [step for step, _ in theirs] != [step for step, _ in own]:
        problems.append(f"steps in the metrics: {[step for step, _ in own]}")
    wrong_steps = [
        step for (step, a), (_, b) in zip(theirs, own, strict=False) if not math.isclose(a, b, rel_tol=bound)
    ]
    if wrong_steps:
        problems.append(f"losses differ from step {wrong_steps[0]} on")
    one, other = (nxd_ckpt.open_checkpoint(folder / "checkpoints") for folder in (expected, found))
    names = set(one.tensors)
    if bound:  # random streams are those of the layout
        names = {name for name in names if name in other.tensors and one.read(name).is_floating_point()}
    elif names != set(other.tensors):
        problems.append(f"tensors: {sorted(names ^ set(other.tensors))[:5]}")
        names &= set(other.tensors)
    wrong = [name for name in sorted(names) if not _equal(one.read(name), other.read(name), bound)]
    return problems + ([f"{len(wrong)} tensors differ, such as {wrong[:3]}"] if wrong else [])


def _equal(one: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    if not bound:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=bound, atol=bound * float(one.abs().max()))


def read_losses(output: Path) -> list[tuple[int, float]]:
    """Step and loss of each record."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """A table by layout, as Markdown."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    by_case["all"] = [row for group in by_case.values() for row in group]
    lines = [
        "| layout | runs | ranks lost | p50 | p90 | max | steps lost | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, group in by_case.items():
        seconds = sorted(value for row in group for value in row["seconds"])
        lost = [value for row in group for value in row["steps_lost"]]
        if not seconds:
            continue
        middle, late = (seconds[math.ceil(share * len(seconds)) - 1] for share in (0.5, 0.9))
        failed = sum(bool(row["problems"]) for row in group)
        lines.append(
            f"| {name} | {len(group)} | {len(seconds)} | {middle:.1f} s | {late:.1f} s | {seconds[-1]:.1f} s | "
            f"{max(lost)} at most | {failed} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
