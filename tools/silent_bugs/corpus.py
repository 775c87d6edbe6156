"""The corpus: `BUGS`, read from `bugs.toml`, and how to run one of them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

KINDS = (
    "missing sum",
    "missing term",
    "summed twice",
    "scaled",
    "wrong shard or order",
    "stale values",
    "random numbers",
    "wrong positions",
    "wrong mask",
    "module not called",
    "module called again",
    "dropped tokens",
    "different data",
    "wrong averaging",
    "state of another parameter",
    "drift",
    "lower precision",
    "different values",
)


@dataclass(frozen=True)
class Bug:
    """A published bug, and what a perfect report of it would name.

    Attributes:
        name: the bug's name in this corpus.
        repository: where it was published, as owner/name on GitHub.
        number: the number of its issue or pull request there.
        about: one sentence on it.
        program: the program that has it, a module of `silent_bugs.programs`.
        fault: the name of the fault in the program.
        ranks: the number of ranks of the smallest layout that shows it.
        fault_kind: its kind, one of `KINDS`.
        where: names of modules or parameters, as in the program run by one process; a perfect report names one of them.
            The empty name is the whole model: its loss, its gradient norm, its inputs or all its gradients.
        step: the optimizer step in which it first shows, from 1.
        other_kinds: kinds that describe it as well.
        note: what the thread does not say and this corpus assumes.
    """

    name: str
    repository: str
    number: int
    about: str
    program: str
    fault: str
    ranks: int
    fault_kind: str
    where: tuple[str, ...]
    step: int = 1
    other_kinds: tuple[str, ...] = ()
    note: str = ""

    @property
    def url(self) -> str:
        """The address of the thread; GitHub redirects it where the number is a pull request."""
        return f"https://github.com/{self.repository}/issues/{self.number}"

    def module(self) -> ModuleType:
        """Import the program."""
        return import_module(f"silent_bugs.programs.{self.program}")


def _read(path: Path) -> tuple[Bug, ...]:
    bugs = []
    for row in tomllib.loads(path.read_text(encoding="utf8"))["bug"]:
        values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in row.items()}
        bugs.append(Bug(**values))
    return tuple(bugs)


BUGS = _read(Path(__file__).with_name("bugs.toml"))
