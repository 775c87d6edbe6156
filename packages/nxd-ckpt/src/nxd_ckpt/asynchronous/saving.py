"""`async_save`: as `save`, but in the background once the tensors are copied.

Schedulers send SIGTERM some time before they kill, and that may be enough to finish a save under way.
"""

import atexit
import copy
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from nxd_ckpt.arguments import check_flags, check_timeout, default_timeout
from nxd_ckpt.asynchronous import pending
from nxd_ckpt.asynchronous.background import Background
from nxd_ckpt.asynchronous.channel import Channel
from nxd_ckpt.asynchronous.handle import AsyncSave
from nxd_ckpt.asynchronous.late_copies import hold_optimizers, release_optimizers
from nxd_ckpt.coordinator import Coordinator, abandoned_on_error, coordinator_for
from nxd_ckpt.save_task import SaveOptions, prepare_save
from nxd_ckpt.sharded_tensor import tensors_of
from nxd_ckpt.stores import open_store

if TYPE_CHECKING:
    import torch.distributed as dist

_MIN_MEMORY = 2**16
GRACE_SECONDS = 20.0  # launchers and schedulers usually wait 30 before they kill

_backgrounds: dict[pending.RankKey, Background] = {}


def async_save(
    path: "str | os.PathLike[str]",
    tag: str,
    state: Mapping[str, Any],
    *,
    objects: Any = None,
    rank_objects: Any = None,
    extra: Mapping[str, bytes] | None = None,
    mesh: Any = None,
    step: int | None = None,
    overwrite: bool = False,
    check_replicas: bool = False,
    incremental: bool = False,
    memory_limit: int | None = None,
    copy_in_background: bool = False,
    timeout: float | None = None,
    process_group: "dist.ProcessGroup | Coordinator | None" = None,
) -> AsyncSave:
    """Writes a checkpoint in the background. Call it on all ranks; arguments not described here are those of `save`.

    Returns when this rank's tensors are copied to memory, so they may change again. A separate process writes them, and
    the ranks commit over a separate channel once all have written. The saves of a rank are written in order, and the
    next save's tensors are copied once those of the previous one are written.

    A program that exits normally finishes its saves first; one that SIGTERM would end (because it does not handle the
    signal) finishes them for up to 20 seconds. If it ends in any other way, an existing checkpoint stays unchanged.

    An incremental save waits until the previous one is committed, hashes this rank's data in the call, and copies only
    the data that it has to write.

    Args:
        memory_limit: bytes of memory for the copy on this rank; default: this rank's share of half the memory that is
            free at the first save. Tensors that need more are copied and written in turns, half the limit at a time,
            and the call returns when the last ones are copied.
        copy_in_background: return at once and copy while the program continues. Tensors must not change until the
            handle's `wait_until_staged()` returns; torch's optimizers wait for that before each step, so forward and
            backward hide the copy. A save whose tensors changed fails and names them. Tensors of up to 1 MiB and those
            on accelerators are copied in the call, as are all tensors if they do not fit in `memory_limit`.
        timeout: seconds to wait for the other ranks, and for a response of the writer process, at each step; None: the
            value of `NXD_TIMEOUT`, else half an hour.

    Returns:
        A handle to check on the save and wait for it.

    Raises:
        ValueError: as for `save`.
        CheckpointError: an earlier background save failed on any rank, and its `wait` was not called. This save was
            not started.
    """

    timeout = default_timeout() if timeout is None else timeout

    def check() -> None:
        check_timeout(timeout)
        check_flags(copy_in_background=copy_in_background)
        if memory_limit is not None and type(memory_limit) is not int:
            raise ValueError(f"memory_limit={memory_limit!r} is not a number of bytes; pass an int, or None")
        if memory_limit is not None and memory_limit < _MIN_MEMORY:
            raise ValueError(f"memory_limit={memory_limit} bytes is too small; pass at least {_MIN_MEMORY}, or None")

    coordinator = coordinator_for(process_group, timeout)
    options = SaveOptions(tag, step, overwrite, check_replicas, incremental, objects, rank_objects, extra, mesh)
    with abandoned_on_error(coordinator):
        if incremental is True:
            pending.wait_for_saves()
        task, sharded = prepare_save(path, state, options, coordinator, check)
        task = dataclasses.replace(
            task, options=copy.deepcopy(task.options), all_rank_objects=copy.deepcopy(task.all_rank_objects)
        )
        channel = Channel(coordinator, task.save_id, timeout)
    save = AsyncSave(tag, task.save_id)
    key = pending.RankKey(coordinator.rank, coordinator.world_size)
    if key not in _backgrounds:
        _backgrounds[key] = Background()
    finish_saves_on_sigterm()
    pending.note(key, save)
    if copy_in_background:
        hold_optimizers()
    _backgrounds[key].begin(
        task,
        tensors_of(sharded),
        channel,
        save,
        memory_limit=memory_limit,
        timeout=timeout,
        in_this_process=not open_store(path).capabilities.other_processes,
        copy_in_background=copy_in_background,
    )
    return save


def end_async_saves() -> None:
    """Waits for all background saves of this process, ends its writer processes and frees their memory.

    Not needed before a program ends. A later `async_save` starts new ones.
    """
    while _backgrounds:
        _, background = _backgrounds.popitem()
        background.close()
    release_optimizers()


def _end() -> None:
    end_async_saves()
    pending.report_at_exit()


# Threads that complete saves are joined before this is called.
atexit.register(_end)
# Writers are the parent's, not those of a child forked from it.
os.register_at_fork(after_in_child=_backgrounds.clear)


def finish_saves_on_sigterm() -> None:
    """Makes SIGTERM wait for saves before it ends the process, unless the program handles the signal itself."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _finish_saves_and_die)


def _finish_saves_and_die(signal_number: int, frame: FrameType | None) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for save in pending.in_flight():
        # If it is not staged, its tensors may wait for this very thread, which may hold locks: none is used here.
        while (save.staged or not save.needs_its_caller) and not save.done() and time.monotonic() < deadline:
            time.sleep(0.02)
    signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)
