"""Names of the files that each rank writes, for both layouts and their older spellings."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from nxd_ckpt.errors import CheckpointError

BEGUN_MARKER = "checkpoint"
DONE_MARKER = "done"
USER_CONTENT = "user_content.pt"
V1_CONTENT = "checkpoint.pt"
TENSORS_SUFFIX = ".tensors"
INFO_SUFFIX = ".info.pt"

_V2_FILE = re.compile(r"dp_rank_(?P<dp>\d+)(?:_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_V1_ENTRY = re.compile(r"tp_rank_(?P<tp>\d+)(?:_pp_rank_(?P<pp>\d+))?(?:_dp_rank_(?P<dp>\d+))?")


@dataclass(frozen=True, order=True)
class Rank:
    """A position in the mesh of a NeuronX Distributed run."""

    pp: int
    ep: int
    tp: int
    dp: int

    def __str__(self) -> str:
        return f"pp rank {self.pp}, ep rank {self.ep}, tp rank {self.tp}, dp rank {self.dp}"


def v2_files(folder: str) -> dict[Rank, str]:
    """Return the rank files in `<tag>/model` or `<tag>/optim`; empty if there is no such folder.

    Raises:
        CheckpointError: a rank's file is missing.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return _complete(folder, ((_V2_FILE.fullmatch(name), os.path.join(folder, name)) for name in names))


def v1_files(folder: str) -> dict[Rank, str]:
    """Return the rank files below the folder passed to `parallel_layers.save`, plain or xser; empty if there are none.

    Raises:
        CheckpointError: a rank's file is missing.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = []
    for name in names:
        path = os.path.join(folder, name)
        match = _V1_ENTRY.fullmatch(name)
        found.append((match, os.path.join(path, V1_CONTENT) if os.path.isdir(path) else path))
    return _complete(folder, found)


def v2_name(rank: Rank, *, has_experts: bool = False) -> str:
    """Return the name of a rank's file in the v2 layout."""
    expert = f"_ep_rank_{rank.ep:02d}" if has_experts else ""
    return f"dp_rank_{rank.dp:02d}{expert}_tp_rank_{rank.tp:02d}_pp_rank_{rank.pp:02d}.pt"


def v1_name(rank: Rank) -> str:
    """Return the name of a rank's folder (plain) or skeleton file (xser) in the v1 layout."""
    return f"tp_rank_{rank.tp:02d}_pp_rank_{rank.pp:02d}"


def _complete(folder: str, entries: Iterable[tuple[re.Match[str] | None, str]]) -> dict[Rank, str]:
    files: dict[Rank, str] = {}
    for match, path in entries:
        if match is not None:
            numbers = {axis: int(number or 0) for axis, number in match.groupdict(default="0").items()}
            rank = Rank(numbers["pp"], numbers.get("ep", 0), numbers["tp"], numbers["dp"])
            if rank in files:
                raise CheckpointError(f"{folder} holds two files for {rank}: {files[rank]} and {path}")
            files[rank] = path
    missing = list(islice(_missing(files), 4))
    if missing:
        raise CheckpointError(f"{folder} is incomplete: there is no file of {'; '.join(map(str, missing))}")
    return dict(sorted(files.items()))


def _missing(files: Mapping[Rank, str]) -> Iterator[Rank]:
    """Yield the ranks missing from the smallest mesh that has all of these; lazily, as names can have any number."""
    size = {axis: 1 + max((getattr(rank, axis) for rank in files), default=-1) for axis in ("pp", "ep", "tp", "dp")}
    for pp in range(size["pp"]):
        for ep in range(size["ep"]):
            for tp in range(size["tp"]):
                for dp in range(size["dp"]):
                    if Rank(pp, ep, tp, dp) not in files:
                        yield Rank(pp, ep, tp, dp)
