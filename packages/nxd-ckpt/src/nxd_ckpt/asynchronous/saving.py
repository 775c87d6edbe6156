"""`async_save`: like `save`, but in the background once the tensors are copied.

The caller's thread copies tensors to shared memory. A thread of the save has the writer process write them, and commits
with the other ranks. The saves of a rank follow one another: the next one fills the memory when the writer is done with
it, and begins when the previous one has ended.

Schedulers send SIGTERM some time before they kill, which may be enough to finish a save in progress.
"""

import atexit
import contextlib
import copy
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from nxd_ckpt.arguments import check_flags, check_timeout, default_timeout
from nxd_ckpt.asynchronous.channel import Channel
from nxd_ckpt.asynchronous.handle import (
    AsyncSave,
    RankKey,
    register,
    report_at_exit,
    saves_in_progress,
    wait_for_saves,
)
from nxd_ckpt.asynchronous.slices import ChunkHashes, SliceQueue, Stopped, staged_parts
from nxd_ckpt.asynchronous.staging import (
    DeferredCopies,
    SharedBuffer,
    default_limit,
    hold_optimizers,
    release_optimizers,
    stage,
)
from nxd_ckpt.asynchronous.writer_process import FileToWrite, WriterProcess
from nxd_ckpt.boxes import Box
from nxd_ckpt.coordinator import Coordinator, abandoned_on_error, coordinator_for
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import data_file_name
from nxd_ckpt.safetensors_file import Hashes
from nxd_ckpt.save_task import SaveOptions, SaveTask, prepare_save
from nxd_ckpt.saving import run_save
from nxd_ckpt.sharded_tensor import tensors_of
from nxd_ckpt.stores import open_store

if TYPE_CHECKING:
    import torch.distributed as dist

GRACE_SECONDS = 20.0  # after SIGTERM; launchers and schedulers usually wait 30 before they kill

_MIN_MEMORY = 2**16
_SLOT_ALIGNMENT = 64

_savers: dict[RankKey, "_BackgroundSaver"] = {}


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
    """Write a checkpoint in the background. Call it on all ranks; arguments not described here are those of `save`.

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
            wait_for_saves()
        task, sharded = prepare_save(path, state, options, coordinator, check)
        task = dataclasses.replace(
            task, options=copy.deepcopy(task.options), all_rank_objects=copy.deepcopy(task.all_rank_objects)
        )
        channel = Channel(coordinator, task.save_id, timeout)
    save = AsyncSave(tag, task.save_id)
    key = RankKey(coordinator.rank, coordinator.world_size)
    if key not in _savers:
        _savers[key] = _BackgroundSaver()
    finish_saves_on_sigterm()
    register(key, save)
    if copy_in_background:
        hold_optimizers()
    _savers[key].begin(
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
    """Wait for all background saves of this process, end its writer processes and free their memory.

    Not needed before a program ends. A later `async_save` starts new ones.
    """
    while _savers:
        _, saver = _savers.popitem()
        saver.close()
    release_optimizers()


def _end() -> None:
    end_async_saves()
    report_at_exit()


# Python joins the threads of saves before it calls this.
atexit.register(_end)
# A forked child does not own its parent's writers.
os.register_at_fork(after_in_child=_savers.clear)


def finish_saves_on_sigterm() -> None:
    """Make SIGTERM wait for saves before it ends the process, unless the program handles the signal itself."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _finish_saves_and_die)


def _finish_saves_and_die(signal_number: int, frame: FrameType | None) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for save in saves_in_progress():
        # A save that is not staged may wait for this very thread, which may hold locks; so no lock is used here.
        while (save.staged or not save.needs_caller) and not save.done() and time.monotonic() < deadline:
            time.sleep(0.02)
    signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)


@dataclass(frozen=True, slots=True)
class _RunningSave:
    task: SaveTask
    request: FileToWrite
    channel: Channel
    queue: SliceQueue
    save: AsyncSave
    previous: AsyncSave | None
    timeout: float
    in_this_process: bool


class _BackgroundSaver:
    """The shared memory and the writer process of one rank."""

    def __init__(self) -> None:
        self._buffer = SharedBuffer()
        self._writer: WriterProcess | None = None
        self._last: tuple[AsyncSave, SliceQueue, threading.Thread] | None = None
        self._copying: threading.Thread | None = None

    def begin(
        self,
        task: SaveTask,
        tensor_of: Callable[[str, Box], torch.Tensor],
        channel: Channel,
        save: AsyncSave,
        *,
        memory_limit: int | None,
        timeout: float,
        in_this_process: bool,
        copy_in_background: bool,
    ) -> None:
        """Start a save, and return when all tensors are in the memory, or written if they do not fit there.

        With `copy_in_background` it returns earlier if they all fit.
        """
        previous: AsyncSave | None = None
        if self._last is not None:
            previous, in_use, _ = self._last
            in_use.wait_until_stopped()
        if self._copying is not None:  # may still run if that save has failed
            self._copying.join()
        sizes = [write.num_bytes for write in task.layout.placed]
        limit = default_limit(channel.world_size, self._buffer.memory.nbytes) if memory_limit is None else memory_limit
        num_slots, slot_bytes = _slots(sum(sizes), limit)
        queue = SliceQueue(num_slots)
        file = data_file_name(task.save_id, channel.rank)
        # Another process needs the transaction as it is before it begins here.
        request = FileToWrite(copy.copy(task.transaction), file, task.layout.header, sizes)
        run = _RunningSave(task, request, channel, queue, save, previous, timeout, in_this_process)
        name = f"nxd_ckpt save {save.tag}"
        thread = threading.Thread(target=self._write_and_commit, args=(run,), name=name, daemon=False)
        self._last = (save, queue, thread)
        try:
            self._buffer.reserve(num_slots * slot_bytes)  # before the thread starts, which uses it
        except OSError as error:
            queue.stop(CheckpointError(f"taking {num_slots * slot_bytes} bytes of memory: {error}"))
        thread.start()
        tensors = [tensor_of(write.name, write.box) for write in task.layout.placed]
        with _stopped_by_errors(queue):
            if copy_in_background and num_slots == 1:
                names = [write.name for write in task.layout.placed]
                copies = DeferredCopies(names, tensors, self._buffer.memory, queue)
                save.needs_caller = False
                self._copying = threading.Thread(target=_finish, args=(copies, queue, save), name=name)
                self._copying.start()
                return
            stage(tensors, self._buffer.memory, slot_bytes, queue)
        save.set_staged()

    def close(self) -> None:
        """Wait for the saves in progress, end the writer and free the memory."""
        if self._last is not None:
            self._last[-1].join()
        if self._copying is not None:
            self._copying.join()
        if self._writer is not None:
            self._writer.close()
        self._buffer.close()

    def _write_and_commit(self, run: _RunningSave) -> None:
        failure: str | None = f"saving checkpoint {run.save.tag!r} was broken off"
        error_type = CheckpointError
        try:
            if run.previous is not None:
                run.previous.wait_until_done()
            run_save(run.task, lambda: self._write(run), run.channel)
            failure = None
            run.channel.leave()  # first: a caller that sees the commit may end this process at once
        except CheckpointError as error:
            failure, error_type = str(error), type(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            run.queue.stop()
            run.save.set_done(failure, error_type)
        if failure is not None:
            run.channel.leave()

    def _write(self, run: _RunningSave) -> Hashes:
        """Write this rank's data file; afterwards the memory is free again."""
        request, slices = run.request, run.queue.slices()
        try:
            if not request.chunk_sizes:
                return []
            if run.in_this_process:
                hashes = ChunkHashes(request.chunk_sizes)
                parts = staged_parts(request.header, self._buffer.view, slices, hashes)
                run.task.transaction.write_file(request.file, parts, request.num_bytes)
                return hashes.done
            return self._running_writer().write(request, slices, run.timeout)
        finally:
            run.queue.stop()

    def _running_writer(self) -> WriterProcess:
        if self._writer is None or not self._writer.is_alive():
            self._writer = WriterProcess(self._buffer.fd)
        return self._writer


@contextlib.contextmanager
def _stopped_by_errors(queue: SliceQueue) -> Iterator[None]:
    """End the save on an error, which its handle then raises."""
    try:
        yield
    except Stopped:
        pass  # the save has failed, and its handle has the reason
    except CheckpointError as error:
        queue.stop(error)
    except BaseException as error:
        queue.stop(CheckpointError(f"copying tensors to memory: {type(error).__name__}: {error}"))
        if not isinstance(error, Exception):
            raise


def _finish(copies: DeferredCopies, queue: SliceQueue, save: AsyncSave) -> None:
    with _stopped_by_errors(queue):
        copies.finish()
    save.set_staged()


def _slots(payload: int, limit: int) -> tuple[int, int]:
    """Return the number of slots and their size: one for everything, or two that take turns."""
    if payload <= limit:
        return 1, -(-payload // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    return 2, limit // 2 // _SLOT_ALIGNMENT * _SLOT_ALIGNMENT
