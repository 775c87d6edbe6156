"""Records every bug of the corpus with nxd-parity, and tells which it finds, and which it locates.

    PYTHONPATH=tools python -m silent_bugs
    PYTHONPATH=tools python -m silent_bugs --precision float64 --only "router-*" --verbose

Takes some minutes for a precision; leaves nothing behind. A bug is found if the comparison with one process says that
something differs, and does not say the same without the fault. It is located if the first difference has one of the
bug's names, and one of its kinds. A comparison that fails is neither, and counted by itself.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib import import_module

import torch
from nxd_parity import compare, record
from nxd_testing.pool import run_on_ranks

from silent_bugs.corpus import BUGS, Bug
from silent_bugs.outcomes import Outcome

PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SEEDS_OF_NOISE = (1, 2)


def recorded(program: str, faults: Sequence[str], dtype: torch.dtype, folder: str, noise: int | None = None) -> None:
    """Record a program's training into a folder, on this rank."""
    with record(folder, noise=noise):
        import_module(f"silent_bugs.programs.{program}").train(frozenset(faults), dtype=dtype)


def outcomes(bugs: Sequence[Bug], precision: str) -> Iterator[Outcome]:
    """Compare each program without faults, and with the fault of each bug, with one process."""
    dtype = PRECISIONS[precision]
    for program, ranks in sorted({(bug.program, bug.ranks) for bug in bugs}):
        with tempfile.TemporaryDirectory() as folder:
            reference = f"{folder}/reference"
            run_on_ranks(functools.partial(recorded, program, (), dtype, reference), 1)
            spread = [f"{folder}/noise{seed}" for seed in SEEDS_OF_NOISE] if precision != "float64" else []
            for seed, of_noise in zip(SEEDS_OF_NOISE, spread, strict=False):
                run_on_ranks(functools.partial(recorded, program, (), dtype, of_noise, seed), 1)
            without_fault = None
            cases: list[Bug | None] = [None, *(it for it in bugs if (it.program, it.ranks) == (program, ranks))]
            for number, bug in enumerate(cases):
                candidate = f"{folder}/candidate{number}"
                finding, error = None, ""
                try:
                    faults = () if bug is None else (bug.fault,)
                    run_on_ranks(functools.partial(recorded, program, faults, dtype, candidate), ranks)
                    finding = compare(reference, candidate, spread=spread).first
                except Exception as problem:  # a failure of one comparison is a row of the table
                    error = f"{type(problem).__name__}: {problem}".splitlines()[0]
                outcome = Outcome(f"{program} on {ranks} ranks", bug, finding, error, without_fault)
                without_fault = without_fault or outcome
                yield outcome


def totals(seen: Sequence[Outcome]) -> str:
    """Return the counts of a precision in a sentence."""
    of_bugs = [it for it in seen if it.bug is not None]
    of_programs = [it for it in seen if it.bug is None]
    found, located = sum(it.is_found for it in of_bugs), sum(it.is_located for it in of_bugs)
    alarms, agree = (sum(it.verdict == verdict for it in of_programs) for verdict in ("false alarm", "agrees"))
    failed = sum(bool(it.error) for it in of_bugs)
    return (
        f"{found} of {len(of_bugs)} bugs found, {located} located, {failed} comparisons failed; without faults "
        f"{agree} of {len(of_programs)} layouts agree, {alarms} raise a false alarm"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per program and bug, and totals; return 0 if every bug is found and every program agrees."""
    parser = argparse.ArgumentParser(
        prog="silent_bugs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="a precision; all by default")
    parser.add_argument("--only", default="*", help="a pattern of names of bugs or programs")
    parser.add_argument("--verbose", action="store_true", help="also list what is located")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in BUGS if fnmatch(bug.name, options.only) or fnmatch(bug.program, options.only)]
    is_well = True
    for precision in options.precision or PRECISIONS:
        seen: list[Outcome] = []
        for outcome in outcomes(bugs, precision):
            seen.append(outcome)
            if options.verbose or outcome.verdict not in ("agrees", "located"):
                print(f"{precision:8s}  {outcome}", flush=True)
        print(f"{precision}: {totals(seen)}", flush=True)
        is_well = is_well and all(it.is_found if it.bug else it.verdict == "agrees" for it in seen)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
