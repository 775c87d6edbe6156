"""Writes the recording of one rank: lines of events, and the values of tensors in files of bounded size.

Values are copied into a buffer, and a thread writes full buffers to files while the program goes on. Lines of tensors
are written after their values. Lines of collectives are written at once, to a file of their own: a program that hangs
in a collective leaves them behind.
"""

import json
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nxd_parity.digest import bytes_of, digest_of, largest_of
from nxd_parity.events import CollectiveEvent, Placement, TensorEvent, to_line

FILE_BYTES = 64 * 2**20  # a larger tensor has a file of its own
HEADER_BYTES = 2**16  # in front of a buffer's values, for the header of safetensors
DIRECT_BYTES = 2**20  # larger files bypass the cache of the operating system
PAGE = 4096  # what they are aligned to
BUFFERS = 2  # what a recording takes of memory, beside a copy of one tensor larger than them
EVENTS = "events.jsonl"
COLLECTIVES = "collectives.jsonl"
DESCRIPTION = "recording.json"
FORMAT = 1  # of recordings
REACHED, RAISED = "reached", "raised"  # how a rank's recording ends; one that was killed has no end
SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank's part of a recording."""
    return folder / f"rank-{rank:05d}"


def values_file(folder: Path, number: int) -> Path:
    """Return a file of values of a rank's part of a recording."""
    return folder / f"tensors-{number:05d}.safetensors"


@dataclass
class _File:
    """A file of values that is not written yet, and the events that follow it.

    Attributes:
        values: room for the header, and the bytes of the tensors, one after the other.
        size: how many bytes of tensors there are.
        entries: the tensors, as safetensors has them in its header.
        events: events whose values are in this file, or in earlier ones.
    """

    number: int
    values: Tensor
    size: int = 0
    entries: dict[str, object] = field(default_factory=dict)
    events: list[TensorEvent] = field(default_factory=list)


class RankWriter:
    """The files of one rank. Equal tensors are written once.

    Forks of the process, such as workers of a data loader, write nothing.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Make the rank's folder.

        Raises:
            FileExistsError: the rank has a recording there.
        """
        self._folder = rank_folder(folder, rank)
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:
            raise FileExistsError(f"{self._folder} is there already; record to a new folder, or delete it") from None
        for name in (EVENTS, COLLECTIVES):
            (self._folder / name).touch()
        self._process = os.getpid()
        self._keys = 0
        self.tensors = 0  # that were recorded
        self._known: dict[tuple[str, torch.dtype, tuple[int, ...]], tuple[int, str]] = {}
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        with torch.inference_mode(False):
            for _ in range(BUFFERS):  # whole pages
                self._free.put(torch.frombuffer(mmap.mmap(-1, HEADER_BYTES + FILE_BYTES), dtype=torch.uint8))
        self._full: queue.Queue[_File | None] = queue.Queue()
        self._error: BaseException | None = None
        self._file = _File(0, self._free.get())
        self._lines = (self._folder / COLLECTIVES).open("a", encoding="utf-8")
        self._thread = threading.Thread(target=self._write_files, name="nxd-parity writer", daemon=True)
        self._thread.start()

    def tensor(
        self,
        step: int,
        kind: str,
        name: str,
        value: Tensor,
        *,
        call: int = 0,
        output: int = 0,
        model_call: int = 0,
        model: int = 0,
        order: int = 0,
        placement: Placement | None = None,
        inputs: tuple[str, ...] = (),
    ) -> None:
        """Record a tensor; see `TensorEvent`. Its values are copied before the call returns.

        Raises:
            OSError: earlier values could not be written.
        """
        if os.getpid() != self._process:
            return
        # Modes of the program, such as one that makes every float32 a float64, are not for the recording.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            digest, largest, file, key = self._values(value.detach())
        self.tensors += 1
        self._file.events.append(
            TensorEvent(
                step=step,
                kind=kind,
                name=name,
                call=call,
                output=output,
                shape=tuple(value.shape),
                dtype=value.dtype,
                digest=digest,
                file=file,
                key=key,
                largest=largest,
                model_call=model_call,
                model=model,
                order=order,
                placement=placement,
                inputs=inputs,
            )
        )

    def collective(self, event: CollectiveEvent) -> None:
        """Record a collective. Its line is written when the call returns: the collective may never end."""
        if os.getpid() == self._process:
            self._lines.write(to_line(event) + "\n")
            self._lines.flush()

    def flush(self) -> None:
        """Have the thread write what waits.

        Raises:
            OSError: earlier values could not be written.
        """
        if os.getpid() == self._process and (self._file.size or self._file.events):
            self._next_file()

    def close(self) -> None:
        """Write what waits and end the thread.

        Raises:
            OSError: values could not be written.
        """
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        self._full.put(self._file)
        self._full.put(None)
        self._thread.join()
        self._lines.close()
        self._check()

    def _values(self, value: Tensor) -> tuple[str, float, int, str]:
        """Copy a tensor's values, unless they are known; returns their digest, largest value, file and key."""
        if value.nbytes > FILE_BYTES:
            copy = value.to("cpu").contiguous()
            digest, largest = digest_of(copy), largest_of(copy)
        else:
            if self._file.size + 8 + value.nbytes > FILE_BYTES:
                self._next_file()
            start = -(-self._file.size // 8) * 8
            room = self._file.values[HEADER_BYTES + start : HEADER_BYTES + start + value.nbytes]
            copy = room.view(value.dtype).view(value.shape)
            copy.copy_(value)
            digest, largest = digest_of(copy), largest_of(copy)
        known = (digest, value.dtype, tuple(value.shape))
        if known not in self._known:
            key = str(self._keys)
            self._keys += 1
            if value.nbytes > FILE_BYTES:
                self._known[known] = self._file_of_its_own(copy, key), key
            else:
                self._known[known] = self._file.number, key
                self._add(key, value, start)
        return digest, largest, *self._known[known]

    def _add(self, key: str, value: Tensor, start: int) -> None:
        """Add a tensor to the file's header; gaps, which the format does not have, are tensors of bytes."""
        if start > self._file.size:
            gap = start - self._file.size
            self._file.entries[f"gap before {key}"] = _entry(torch.uint8, (gap,), self._file.size, start)
        self._file.entries[key] = _entry(value.dtype, tuple(value.shape), start, start + value.nbytes)
        self._file.size = start + value.nbytes

    def _file_of_its_own(self, value: Tensor, key: str) -> int:
        """Write a tensor that no buffer holds; returns the number of its file."""
        if self._file.size:
            self._next_file()
        number = self._file.number
        header = _header({key: _entry(value.dtype, tuple(value.shape), 0, value.nbytes)})
        with values_file(self._folder, number).open("wb", buffering=0) as target:
            _write_all(target.fileno(), header, bytes_of(value))
        self._file.number += 1
        return number

    def _next_file(self) -> None:
        self._full.put(self._file)
        self._file = _File(self._file.number + bool(self._file.size), self._free.get())
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_files(self) -> None:
        """Write files until there are no more; after an error, only return their buffers."""
        for file in iter(self._full.get, None):
            try:
                if self._error is None:
                    _write(self._folder, file)
            except BaseException as error:  # which the program gets at its next tensor
                self._error = error
            self._free.put(file.values)


def _entry(dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [start, stop]}


def _header(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(folder: Path, file: _File) -> None:
    """Write a file: values first, so that each event that can be read has its values."""
    if file.size:
        _write_values(values_file(folder, file.number), file)
    with (folder / EVENTS).open("a", encoding="utf-8") as lines:
        lines.writelines(to_line(event) + "\n" for event in file.events)


def _write_values(path: Path, file: _File) -> None:
    header, data = _header(file.entries), bytes_of(file.values)
    direct = getattr(os, "O_DIRECT", 0)
    if direct and file.size >= DIRECT_BYTES and len(header) <= HEADER_BYTES:
        try:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o666)
        except OSError:  # a file system that has only files in memory
            pass
        else:
            padded = header[8:].ljust(HEADER_BYTES - 8)
            data[:HEADER_BYTES] = (HEADER_BYTES - 8).to_bytes(8, "little") + padded
            size = HEADER_BYTES + file.size
            try:
                _write_all(target, data[: -(-size // PAGE) * PAGE])
                os.ftruncate(target, size)
            finally:
                os.close(target)
            return
    with path.open("wb", buffering=0) as plain:
        _write_all(plain.fileno(), header, data[HEADER_BYTES : HEADER_BYTES + file.size])


def _write_all(target: int, *parts: bytes | memoryview) -> None:
    for part in parts:
        rest = memoryview(part)
        while rest:  # a single write takes at most 2 GiB
            rest = rest[os.write(target, rest) :]
