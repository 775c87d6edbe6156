"""Agreement before each collective, over a side channel, so that a mismatch raises instead of hanging.

On with `NXD_DEBUG_COLLECTIVES=1`. Every rank posts what it is about to do in the job's key-value store and reads
what its peers posted. Two things raise, on every rank concerned, with the call sites of both: peers that post
something else for the same turn of the same group, and a peer that is itself waiting for this rank in another group.
"""

import json
import os
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from nxd_state.group import Group

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(dist.__file__).parents[1])
_POLL_SECONDS = 0.001


class _Turns:
    """How many collectives each group has announced, counted afresh for each torch.distributed job."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._counts: Counter[str] = Counter()

    def next(self, store: dist.Store, group_name: str) -> int:
        if store is not self._store:
            self._store, self._counts = store, Counter()
        self._counts[group_name] += 1
        return self._counts[group_name]


_turns = _Turns()


class CollectiveMismatch(RuntimeError):
    """Ranks of a group were about to run different collectives."""


def enabled() -> bool:
    """Whether `NXD_DEBUG_COLLECTIVES=1` is set."""
    return os.environ.get("NXD_DEBUG_COLLECTIVES") == "1"


def agree(name: str, group: Group, tensor: Tensor | None, details: dict[str, Any]) -> None:
    """Wait until every rank of `group` has announced this same collective.

    Raises:
        CollectiveMismatch: a peer announced another operation, shape, dtype or argument; or waits elsewhere for us;
            or announced nothing within the process group's timeout.
    """
    store = _get_default_store()
    turn = _turns.next(store, group.name)
    prefix = f"nxd_debug/{group.name}/{turn}"
    mine = {"does": _describe(name, tensor, details), "at": _call_site()}
    me = group.ranks[group.rank]
    posted = json.dumps(mine | {"group": list(group.ranks), "axis": group.axis, "turn": turn})
    store.set(f"{prefix}/{group.rank}", posted)
    store.set(f"nxd_debug/waits/{me}", posted)
    announced = {
        index: mine if index == group.rank else _await_peer(store, f"{prefix}/{index}", rank, group, mine)
        for index, rank in enumerate(group.ranks)
    }
    store.set(f"nxd_debug/waits/{me}", "")
    if any(peer["does"] != mine["does"] for peer in announced.values()):
        lines = [f"  rank {group.ranks[i]}: {peer['does']}\n    {peer['at']}" for i, peer in announced.items()]
        raise CollectiveMismatch(
            f"ranks of group {group.axis} {list(group.ranks)} disagree at collective {turn}:\n" + "\n".join(lines)
        )


def _await_peer(store: dist.Store, key: str, rank: int, group: Group, mine: dict[str, str]) -> dict[str, str]:
    deadline = time.monotonic() + store.timeout.total_seconds()
    me = group.ranks[group.rank]
    while not store.check([key]):
        elsewhere = _read(store, f"nxd_debug/waits/{rank}")
        waits_for_me = elsewhere is not None and me in elsewhere["group"]
        if waits_for_me and elsewhere["group"] != list(group.ranks) and not store.check([key]):
            raise CollectiveMismatch(
                f"ranks {me} and {rank} wait for each other in different groups:\n"
                f"  rank {me}: {mine['does']} in group {group.axis} {list(group.ranks)}\n    {mine['at']}\n"
                f"  rank {rank}: {elsewhere['does']} in group {elsewhere['axis']} {elsewhere['group']}\n"
                f"    {elsewhere['at']}"
            )
        if time.monotonic() > deadline:
            raise CollectiveMismatch(
                f"rank {rank} announced no collective in group {group.axis} {list(group.ranks)}; "
                f"rank {me} waits at {mine['does']}\n    {mine['at']}"
            )
        time.sleep(_POLL_SECONDS)
    peer = _read(store, key)
    assert peer is not None
    return peer


def _read(store: dist.Store, key: str) -> dict[str, Any] | None:
    if not store.check([key]):
        return None
    text = store.get(key).decode()
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found


def _describe(name: str, tensor: Tensor | None, details: dict[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in details.items()]
    if tensor is not None:
        shown = [f"{tuple(tensor.shape)}", str(tensor.dtype), *shown]
    return f"{name}({', '.join(shown)})"


def _call_site() -> str:
    """The innermost frames outside this package and torch, outermost first."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((_PACKAGE, _TORCH, "<"))]
    return " -> ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames[-3:])
