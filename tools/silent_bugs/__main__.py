"""Records every bug of the corpus with nxd-parity, and tells which it finds, and which it locates.

    PYTHONPATH=tools python -m silent_bugs
    PYTHONPATH=tools python -m silent_bugs --precision float64 --only "router-*" --verbose

Takes some minutes for a precision; leaves nothing behind. A bug is found if the comparison with one process says that
something differs. It is located if the first difference has one of the bug's names, and one of its kinds.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

import torch
from nxd_testing.pool import run_on_ranks

from silent_bugs.corpus import BUGS, Bug

parity: Any = import_module("nxd_parity")

PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
OF_THE_WHOLE = ("loss", "gradient norm", "input")
SEEDS_OF_NOISE = (1, 2)


@dataclass(frozen=True)
class Outcome:
    """What nxd-parity says of a program with one fault, or with none.

    Attributes:
        program: the program and its number of ranks.
        bug: the bug; None for the program without faults.
        precision: the dtype's name.
        finding: the first difference; None if there is none.
        error: why the comparison failed; empty if it did not.
    """

    program: str
    bug: Bug | None
    precision: str
    finding: Any
    error: str = ""

    @property
    def is_found(self) -> bool:
        """Whether a difference was seen."""
        return self.finding is not None

    @property
    def has_name(self) -> bool:
        """Whether the difference is where the bug is."""
        if self.finding is None or self.bug is None:
            return False
        if "" in self.bug.where and (not self.finding.name or self.finding.kind in OF_THE_WHOLE):
            return True
        return self.finding.name in self.bug.where or self.finding.name.rpartition("/")[0] in self.bug.where

    @property
    def has_kind(self) -> bool:
        """Whether the difference is called what the bug is."""
        if self.finding is None or self.bug is None:
            return False
        return self.finding.fault in (self.bug.fault_kind, *self.bug.other_kinds)


def recorded(program: str, faults: Sequence[str], dtype: torch.dtype, folder: str, noise: int | None = None) -> None:
    """Record a program's training into a folder, on this rank."""
    with parity.record(folder, noise=noise):
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
            cases: list[Bug | None] = [None, *(it for it in bugs if (it.program, it.ranks) == (program, ranks))]
            for number, bug in enumerate(cases):
                candidate = f"{folder}/candidate{number}"
                finding, error = None, ""
                try:
                    faults = () if bug is None else (bug.fault,)
                    run_on_ranks(functools.partial(recorded, program, faults, dtype, candidate), ranks)
                    finding = parity.compare(reference, candidate, spread=spread).first
                except Exception as problem:  # a failure of one comparison is a row of the table
                    error = f"{type(problem).__name__}: {problem}".splitlines()[0]
                yield Outcome(f"{program} on {ranks} ranks", bug, precision, finding, error)


def row(outcome: Outcome) -> str:
    """Return a line of the table."""
    if outcome.bug is None:
        verdict = "FALSE ALARM" if outcome.is_found else "agrees"
        return f"{verdict:12s} {outcome.program}  {outcome.finding or outcome.error}".rstrip("None ")
    verdict = "missed"
    if outcome.is_found:
        verdict = "located" if outcome.has_name and outcome.has_kind else "found"
        verdict += "" if outcome.has_name else ", not where"
        verdict += "" if outcome.has_kind else ", not what"
    expected = f"{outcome.bug.fault_kind} at {outcome.bug.where[0] or 'the whole model'}"
    return f"{verdict:12s} {outcome.bug.name}  ({expected})  {outcome.finding or outcome.error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per program and bug, and totals; return 0 if nothing is missed and there is no false alarm."""
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
            is_plain = outcome.bug is None and not outcome.is_found and not outcome.error
            if options.verbose or not (is_plain or (outcome.has_name and outcome.has_kind)):
                print(f"{precision:8s} {row(outcome)}", flush=True)
        of_bugs = [it for it in seen if it.bug is not None]
        alarms = sum(it.is_found for it in seen if it.bug is None)
        found, located = sum(it.is_found for it in of_bugs), sum(it.has_name and it.has_kind for it in of_bugs)
        print(_totals(precision, len(of_bugs), found, located, alarms, len(seen) - len(of_bugs)), flush=True)
        is_well = is_well and found == len(of_bugs) and alarms == 0
    return 0 if is_well else 1


def _totals(*values: Any) -> str:
    precision, bugs, found, located, alarms, programs = values
    return f"{precision}: {found} of {bugs} found, {located} located; {alarms} false alarms in {programs} layouts"


if __name__ == "__main__":
    sys.exit(main())
