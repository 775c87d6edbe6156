"""The state that one rank keeps between background saves, and the thread that completes each of them.

The caller's thread fills the arena; the save's own thread has the writer process write it and commits with the other
ranks. Saves of a rank follow one another: the next fills the arena when the writer is done with it, and begins when
the one before has ended, well or not.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nxd_ckpt.asynchronous.arena import Arena, default_limit, stage
from nxd_ckpt.asynchronous.channel import Channel
from nxd_ckpt.asynchronous.handle import AsyncSave
from nxd_ckpt.asynchronous.handover import Handover, Stopped
from nxd_ckpt.asynchronous.late_copies import LateCopies
from nxd_ckpt.asynchronous.staged_file import ChunkHashes, staged_parts
from nxd_ckpt.asynchronous.writer import FileToWrite
from nxd_ckpt.asynchronous.writer_process import WriterProcess
from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import data_file_name
from nxd_ckpt.safetensors_file import Hashes
from nxd_ckpt.save_task import SaveTask
from nxd_ckpt.saving import run_save

_SLOT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Job:
    task: SaveTask
    request: FileToWrite
    channel: Channel
    handover: Handover
    save: AsyncSave
    previous: AsyncSave | None
    timeout: float
    in_this_process: bool


class Background:
    """Arena and writer process of one rank."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._writer: WriterProcess | None = None
        self._last: tuple[AsyncSave, Handover, threading.Thread] | None = None
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
        """Starts a save and returns when the tensors are in the arena, or written as far as they do not fit there.

        With `copy_in_background` it returns before, if they all fit.
        """
        previous: AsyncSave | None = None
        if self._last is not None:
            previous, in_use, _ = self._last
            in_use.wait_until_stopped()
        if self._copying is not None:  # it may still go on if that save has failed
            self._copying.join()
        sizes = [write.num_bytes for write in task.layout.placed]
        limit = default_limit(channel.world_size, self._arena.memory.nbytes) if memory_limit is None else memory_limit
        num_slots, slot_bytes = _slots(sum(sizes), limit)
        handover = Handover(num_slots)
        file = data_file_name(task.save_id, channel.rank)
        # The transaction is copied before it begins here: its later state is of no use to another process.
        request = FileToWrite(copy.copy(task.transaction), file, task.layout.header, sizes)
        job = _Job(task, request, channel, handover, save, previous, timeout, in_this_process)
        name = f"nxd_ckpt save {save.tag}"
        thread = threading.Thread(target=self._see_through, args=(job,), name=name, daemon=False)
        self._last = (save, handover, thread)
        try:
            self._arena.reserve(num_slots * slot_bytes)  # before the thread starts, since others then use it
        except OSError as error:
            handover.stop(CheckpointError(f"taking {num_slots * slot_bytes} bytes of memory: {error}"))
        thread.start()
        tensors = [tensor_of(write.name, write.box) for write in task.layout.placed]
        with _stopped_by_errors(handover):
            if copy_in_background and num_slots == 1:
                names = [write.name for write in task.layout.placed]
                late = LateCopies(names, tensors, self._arena.memory, handover)
                save.needs_its_caller = False
                self._copying = threading.Thread(target=_finish, args=(late, handover, save), name=name)
                self._copying.start()
                return
            stage(tensors, self._arena.memory, slot_bytes, handover)
        save.set_staged()

    def close(self) -> None:
        """Waits for the saves under way, ends the writer and frees the memory."""
        if self._last is not None:
            self._last[-1].join()
        if self._copying is not None:
            self._copying.join()
        if self._writer is not None:
            self._writer.close()
        self._arena.close()

    def _see_through(self, job: _Job) -> None:
        failure: str | None = f"saving checkpoint {job.save.tag!r} was broken off"
        error_type = CheckpointError
        try:
            if job.previous is not None:
                job.previous.wait_until_done()
            run_save(job.task, lambda: self._write(job), job.channel)
            failure = None
            job.channel.leave()  # first: a caller who knows that it is committed may end this process at once
        except CheckpointError as error:
            failure, error_type = str(error), type(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            job.handover.stop()
            job.save.set_done(failure, error_type)
        if failure is not None:
            job.channel.leave()

    def _write(self, job: _Job) -> Hashes:
        """Writes this rank's data file; the arena is free again afterwards."""
        request, slices = job.request, job.handover.slices()
        try:
            if not request.chunk_sizes:
                return []
            if job.in_this_process:
                hashes = ChunkHashes(request.chunk_sizes)
                parts = staged_parts(request.header, self._arena.view, slices, hashes)
                job.task.transaction.write_file(request.file, parts, request.num_bytes)
                return hashes.done
            return self._living_writer().write(request, slices, job.timeout)
        finally:
            job.handover.stop()

    def _living_writer(self) -> WriterProcess:
        if self._writer is None or not self._writer.is_alive():
            self._writer = WriterProcess(self._arena.fd)
        return self._writer


@contextlib.contextmanager
def _stopped_by_errors(handover: Handover) -> Iterator[None]:
    """An error ends the save, whose handle then says why."""
    try:
        yield
    except Stopped:
        pass  # the save has failed, and its handle says so
    except CheckpointError as error:
        handover.stop(error)
    except BaseException as error:
        handover.stop(CheckpointError(f"copying tensors to memory: {type(error).__name__}: {error}"))
        if not isinstance(error, Exception):
            raise


def _finish(late: LateCopies, handover: Handover, save: AsyncSave) -> None:
    with _stopped_by_errors(handover):
        late.finish()
    save.set_staged()


def _slots(payload: int, limit: int) -> tuple[int, int]:
    """How many slots of how many bytes: one for everything, or two that take turns."""
    if payload <= limit:
        return 1, -(-payload // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    return 2, limit // 2 // _SLOT_ALIGNMENT * _SLOT_ALIGNMENT
