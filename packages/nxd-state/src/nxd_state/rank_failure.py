"""The failure of a rank: it releases the ranks that wait for it, and reports why it ends.

The failure of one rank fails the others as well: their collectives never complete. Only the first failure says what is
wrong, so it is shown in full. The other ranks wait until it has been shown; then each shows one line: what it was
doing. A full or missing disk takes one line as well: no line of the program is wrong.
"""

import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import nn

from nxd_state.group import Group
from nxd_state.heartbeat import ask_ranks, call_site, is_collective, last_heartbeat
from nxd_state.process_groups import job_store
from nxd_state.script_world import rank_of_job, size_of_job, store_of_job
from nxd_state.store_messages import PeerError, printable

EXIT_FAILED, EXIT_PEER_FAILED = 1, 5  # 2 to 4 are exit codes of commands: nxd parity ends with 3 if tensors differ
FAILURE_SHOWN = "nxd_state/failure_shown"  # key of the launcher's store: the rank whose failure can be read already

_PATIENCE = 5.0  # seconds, for the failure to be shown, for the lines of other ranks, and until silent ranks are named
_SECONDS_TO_ANSWER = 4.0  # for silent ranks; the other ranks wait for this with the patience above
_PAUSE = 0.02
# The store's server is gone, or belongs to an elastic run whose ranks have separated.
_STORE_HAS_ENDED = (dist.DistError, PeerError)
_LONGEST_MESSAGE = 600  # characters
# torch has no classes for these errors of gloo and nccl; and what another rank gave as its reason comes as text.
_TIMEOUT = re.compile(
    r"[Tt]imed out waiting|Application timeout|did not reach what rank|no answer within|collective operation timeout"
)
_BACKEND_FAILURE = re.compile(
    r"(?s)gloo.*(peer|Broken pipe|[Cc]onnect)|NCCL communicator was aborted|NCCL error: remote process exited"
)
_FAILURES_OF_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 1  # no message has it, so none is taken for an answer
_ADVICE_OF_GLOO = " This is typically caused by"


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception was raised on this rank only because of another rank."""
    return any(
        isinstance(link, (PeerError, dist.DistNetworkError, dist.DistStoreError))
        or (isinstance(link, RuntimeError) and bool(_BACKEND_FAILURE.search(str(link)) or _timed_out(link)))
        for link in _chain(error)
    )


def report_failure(error: BaseException) -> int:
    """Show on standard error why this rank ends; call it where no other code handles the exception.

    Returns:
        The exit code for the process: 1 for a failure of this rank, 5 if another rank failed.
    """
    rank = rank_of_job() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if not is_peer_failure(error):
        if isinstance(error, OSError) and error.errno in _FAILURES_OF_STORAGE:
            text = f"rank {rank} failed: {describe_failure(error)}"
        else:
            text = "".join(traceback.format_exception(error))
            text = f"rank {rank} failed:\n{text}" if "RANK" in os.environ else text
        _show(text)
        _tell(FAILURE_SHOWN, str(rank))
        return EXIT_FAILED
    _tell(f"{FAILURE_SHOWN}/line_of_{rank}", "1")
    _await(FAILURE_SHOWN)
    _show(f"rank {rank} ended: {describe_failure(error)}")
    if dist.is_initialized() and any(map(_timed_out, _chain(error))):
        _name_silent_ranks(rank)
    return EXIT_PEER_FAILED


def _show(text: str) -> None:
    """Print to standard error in one write, so that lines of several ranks do not mix.

    Messages hold texts of files and of other processes: what would steer the terminal is escaped.
    """
    print(printable(text), file=sys.stderr, flush=True)


def describe_failure(error: BaseException) -> str:
    """One line: the message, the collective, the modules whose forward was running, and the line of code."""
    message = " ".join(str(error).partition(_ADVICE_OF_GLOO)[0].split())
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}..."
    frames = [frame for link in _chain(error) for frame in _frames(link.__traceback__)]
    places = [note for link in _chain(error) for note in getattr(link, "__notes__", ())]
    collectives = [frame for frame in frames if is_collective(frame)]
    if collectives:
        first = collectives[0]
        group = first.f_locals.get("group")
        of = f" of group {group.axis} {list(group.ranks)}" if isinstance(group, Group) else ""
        places.append(f"{first.f_code.co_name}{of}")
    modules = [type(frame.f_locals["self"]).__name__ for frame in frames if _is_forward(frame)]
    if modules:
        places.append("forward of " + " > ".join(modules[-3:]))
    site = call_site(frames)
    if site is not None:
        places.append(site)
    return f"{type(error).__name__}: {message}" + (f" [{'; '.join(places)}]" if places else "")


def report_uncaught_failures() -> None:
    """Have exceptions that nothing handles shown by `report_failure`, unless the program shows them in its own way.

    To be called once torch.distributed runs: it sets a hook of its own, which puts the rank before each line.
    """
    if sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith("torch."):
        sys.excepthook = partial(_report_uncaught, os.getpid())


def _report_uncaught(rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`rank` is the process of the rank: one that is forked from it fails for itself, and has no store to tell."""
    if isinstance(error, Exception) and os.getpid() == rank:
        report_failure(error)
    else:
        sys.__excepthook__(kind, error, trace)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes and contexts, outermost first."""
    link: BaseException | None = error
    seen: set[int] = set()  # an exception that is kept and raised again can be its own cause
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _timed_out(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(_TIMEOUT.search(str(error)))


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(trace))


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)


def _name_silent_ranks(rank: int) -> None:
    """After a timeout, the first rank to notice names the silent ranks and what they say they are doing."""
    lines = {other: f"{FAILURE_SHOWN}/line_of_{other}" for other in range(size_of_job())}
    named = f"{FAILURE_SHOWN}/silent_ranks_named"
    _await(*lines.values())
    with suppress(*_STORE_HAS_ENDED):
        store = job_store()
        silent = [other for other, line in lines.items() if not store.check([line])]
        if silent and rank == min(set(lines) - set(silent)):
            answers = ask_ranks(silent, store, _SECONDS_TO_ANSWER)
            _show("\n".join(_describe_silent_rank(other, answers.get(other), store) for other in silent))
            store.set(named, "1")
        elif silent:
            _await(named)  # a launcher ends all ranks once one has ended


def _describe_silent_rank(rank: int, answer: str | None, store: dist.Store) -> str:
    if answer is not None:
        return f"rank {rank} is alive but did not join in time: {answer}; NXD_TIMEOUT sets the time to wait"
    heard = last_heartbeat(rank, store)
    last = "it never sent one" if heard is None else f"the last was {heard}"
    return (
        f"no heartbeat from rank {rank}: it has stopped or is cut off from the network; {last}; "
        "NXD_TIMEOUT sets the time to wait"
    )


def _tell(key: str, value: str) -> None:
    if dist.is_initialized():
        with suppress(*_STORE_HAS_ENDED):
            job_store().set(key, value)


def _await(*keys: str) -> None:
    if not dist.is_initialized():
        return
    give_up = time.monotonic() + _PATIENCE
    with suppress(*_STORE_HAS_ENDED):
        # Asked again and again: when `Store.wait` times out, torch writes warnings to standard error.
        while not job_store().check(list(keys)) and time.monotonic() < give_up:
            time.sleep(_PAUSE)


def abort_group(group: Group, reason: str) -> str:
    """Break this rank's connections to the others of the group: those that wait for it raise, now or when they do.

    For a rank that cannot continue, or that learnt from a collective's exception that another rank could not. The
    group is unusable afterwards; groups of other ranks are not affected. Over nccl only this rank's own calls are
    sure to end: the others may not notice before the timeout of the group.

    Args:
        group: the group to abort.
        reason: why this rank cannot continue.

    Returns:
        The reason given by the first rank that aborted this group: `reason`, if this one was first.
    """
    if group.size == 1:
        return reason
    first = _first_reason(group, reason)
    if group.shared_memory is not None:
        group.shared_memory.abort(first)
    if dist.get_backend(group.process_group) == "gloo":
        _close_gloo(group)
    elif group.process_group is not None:
        group.process_group.abort()
    return first


def _first_reason(group: Group, reason: str) -> str:
    try:
        first = store_of_job().compare_set(f"nxd_aborted/{group.name}", "", reason)
        return printable(first.decode(errors="replace"))
    except dist.DistError:  # the rank that serves the store has ended
        return reason


def _close_gloo(group: Group) -> None:
    """gloo's own abort leaves connections open; but one that has waited in vain closes all connections of its group."""
    for rank in set(group.ranks) - {group.ranks[group.rank]}:
        with suppress(RuntimeError):  # as meant; or closed before
            work = dist.irecv(torch.empty(1), src=rank, group=group.process_group, tag=_UNUSED_TAG)
            assert work is not None  # this rank is in its group
            work.wait(_AT_ONCE)
