"""Writes the recording of one rank: lines of events, and the values of tensors in files of bounded size."""

import ctypes
import hashlib
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nxd_parity.events import CollectiveEvent, Event, Placement, TensorEvent, to_line

FILE_BYTES = 64 * 2**20  # values that wait for a file; what a recording takes of memory, beside its largest tensor
EVENTS = "events.jsonl"


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank's part of a recording."""
    return folder / f"rank-{rank:05d}"


def values_file(folder: Path, number: int) -> Path:
    """Return a file of values of a rank's part of a recording."""
    return folder / f"tensors-{number:05d}.safetensors"


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
        self._folder.mkdir(parents=True)
        self._process = os.getpid()
        self._waiting: dict[str, Tensor] = {}
        self._events: list[Event] = []
        self._bytes = self._files = self._keys = 0
        self._known: dict[tuple[str, torch.dtype, tuple[int, ...]], tuple[int, str]] = {}

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
        """Record a tensor; see `TensorEvent`. Its values are copied before the call returns."""
        if os.getpid() != self._process:
            return
        value = value.detach().to("cpu").contiguous()
        digest = _digest(value)
        known = (digest, value.dtype, tuple(value.shape))
        if known not in self._known:
            self._known[known] = self._files, str(self._keys)
            self._waiting[str(self._keys)] = value.clone()
            self._bytes += value.nbytes
            self._keys += 1
        file, key = self._known[known]
        self._events.append(
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
                largest=float(value.double().abs().max()) if value.numel() else 0.0,
                model_call=model_call,
                model=model,
                order=order,
                placement=placement,
                inputs=inputs,
            )
        )
        if self._bytes >= FILE_BYTES:
            self.flush()

    def collective(self, event: CollectiveEvent) -> None:
        """Record a collective."""
        if os.getpid() == self._process:
            self._events.append(event)

    def flush(self) -> None:
        """Write what waits: values first, so that each event that can be read has its values."""
        if os.getpid() != self._process:
            return
        if self._waiting:
            save_file(self._waiting, values_file(self._folder, self._files))
            self._files += 1
            self._waiting, self._bytes = {}, 0
        with (self._folder / EVENTS).open("a", encoding="utf-8") as file:
            file.writelines(to_line(event) + "\n" for event in self._events)
        self._events.clear()


def _digest(value: Tensor) -> str:
    # Not by numpy(), after which the program could not free the memory of a parameter by resizing it, as sharding does.
    data = (ctypes.c_char * value.nbytes).from_address(value.data_ptr()) if value.numel() else b""
    return hashlib.sha256(data).hexdigest()[:32]
