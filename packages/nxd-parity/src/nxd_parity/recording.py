"""Reads a recording: the events of its ranks and, one by one, the values of its tensors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nxd_parity.events import CollectiveEvent, Event, TensorEvent, from_line
from nxd_parity.writer import COLLECTIVES, DESCRIPTION, EVENTS, FORMAT, REACHED, values_file

MOST_COUNTED = 10**12
MOST_OPEN_FILES = 8  # of each recording: what is read of an open file counts as memory
E = TypeVar("E", bound=Event)


class Recording:
    """A recording of all ranks of a program, opened to be read."""

    def __init__(self, folder: Path | str, rank: int | None = None) -> None:
        """Find the ranks' parts.

        Args:
            folder: the folder that was given to `record`.
            rank: if given, the only rank that is read, as if it were a program of one process.

        Raises:
            FileNotFoundError: there is no recording.
            ValueError: the part of a rank is missing, or of another format.
        """
        self.folder = Path(folder)
        found = sorted(it for it in self.folder.glob("rank-*") if (it / EVENTS).is_file())
        if not found:
            raise FileNotFoundError(
                f"{self.folder} has no recording; make one with nxd_parity.record, or nxd-parity run"
            )
        for number, part in enumerate(found):
            if part.name != f"rank-{number:05d}":
                raise ValueError(f"{self.folder} lacks the recording of rank {number}; copy the folders of all ranks")
        self._facts = [_facts_of(it / DESCRIPTION) for it in found]
        # A program may have no process group when a rank begins or ends: the most that a rank says counts.
        stated = max(_count_in(facts, "world_size") or 0 for facts in self._facts)
        if stated > len(found):
            raise ValueError(
                f"{self.folder} lacks the recording of rank {len(found)} of {stated}; copy the folders of all ranks"
            )
        self.ranks = range(len(found)) if rank is None else (rank,)
        self._parts, self._facts = [found[it] for it in self.ranks], [self._facts[it] for it in self.ranks]
        self._files: dict[Path, Any] = {}

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._parts)

    def replace_tensors(self, rank: int, tensors: Sequence[TensorEvent]) -> None:
        """Let a rank's tensors be others, such as those with other names."""
        self.tensors = (*self.tensors[:rank], tuple(tensors), *self.tensors[rank + 1 :])

    @cached_property
    def tensors(self) -> tuple[tuple[TensorEvent, ...], ...]:
        """The tensors of each rank, in execution order."""
        return tuple(map(self._tensors_of, range(self.world_size)))

    def _tensors_of(self, rank: int) -> tuple[TensorEvent, ...]:
        path = self._parts[rank] / EVENTS
        found = tuple(_events_of(path, TensorEvent))
        written = _count_in(self._facts[rank], "tensors")
        if written is not None and len(found) != written:
            raise ValueError(f"{path} has {len(found)} of {written} tensors: it was cut off; copy the recording again")
        return found

    @cached_property
    def collectives(self) -> tuple[tuple[CollectiveEvent, ...], ...]:
        """The collectives of each rank, in execution order."""
        return tuple(tuple(_events_of(it / COLLECTIVES, CollectiveEvent)) for it in self._parts)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """How the recording of each rank ended; see `nxd_parity.record.description`."""
        return tuple(str(facts.get("end", REACHED)) for facts in self._facts)

    def _opened(self, path: Path) -> Any:
        """Return an open file; the one that was opened first is closed when there are many."""
        if path not in self._files:
            if len(self._files) >= MOST_OPEN_FILES:
                del self._files[next(iter(self._files))]
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]

    def read(self, rank: int, event: TensorEvent) -> Tensor:
        """Return the values of a rank's tensor.

        Raises:
            ValueError: the file is missing or damaged, or its tensor is not the one that was recorded.
        """
        path = values_file(self._parts[rank], event.file)
        if not path.is_file():
            raise ValueError(f"{path}, which has {event.name!r}, is missing; copy the folders of all ranks whole")
        try:
            value: Tensor = self._opened(path).get_tensor(event.key)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} does not have tensor {event.key} of {event.name!r}: {error}") from error
        if tuple(value.shape) != event.shape or value.dtype != event.dtype:
            raise ValueError(
                f"{path}: tensor {event.key} is {value.dtype} {list(value.shape)}; {event.name!r} was recorded as "
                f"{event.dtype} {list(event.shape)}"
            )
        return value


def _facts_of(path: Path) -> Mapping[str, Any]:
    """Return what a rank's description says, if it has one; see `nxd_parity.record.description`."""
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not the description of a recording: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else facts
        raise ValueError(f"{path} is of format {str(found)[:20]!r}; this nxd-parity reads format {FORMAT}")
    return facts


def _count_in(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) and 0 <= value <= MOST_COUNTED else None


def _events_of(path: Path, kind: type[E]) -> Iterator[E]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return  # a program that was killed may leave the last line unfinished
            try:
                event = from_line(line)
                if not isinstance(event, kind):
                    raise ValueError(f"{line[:80]!r} is not a line of a recording: no {kind.__name__}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            yield event
