"""Batches that are made, and copied to the device, before the steps that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import torch
from nxd_state import get_device, send_to_device

from nxd_data.image_processor import TOKEN_TYPES
from nxd_data.loader import Batch, HeldOutLoader, TrainLoader
from nxd_data.streaming import StreamLoader

STEPS_AHEAD = 2  # one is being copied to the device while the next is made

T = TypeVar("T")


class TrainBatches:
    """The batches of successive training steps.

    The loader's position, which checkpoints store, counts the batches taken, not those read ahead.

    Args:
        loader: the source of the batches; nothing else may change its position from the first step to `close`.
    """

    def __init__(self, loader: TrainLoader | StreamLoader) -> None:
        self._loader = loader
        self._ahead: Generator[Batch, None, None] | None = None

    def next_step(self) -> Batch:
        """Return this rank's microbatches of the next step, concatenated, on the device or being copied to it.

        Raises:
            Exception: the loader's error for this step.
        """
        if self._ahead is None:
            steps = self._loader.steps_from(self._loader.samples_consumed)
            self._ahead = read_ahead((_sent(concatenate(batches)) for batches in steps), STEPS_AHEAD)
        batch = next(self._ahead)
        self._loader.pass_step()
        return batch

    def close(self) -> None:
        """End the thread; the next step starts a new one."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def held_out_batches(loader: HeldOutLoader) -> Iterator[Batch]:
    """Return all batches of an evaluation, on the device or being copied to it."""
    return read_ahead(map(_sent, loader), STEPS_AHEAD)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Concatenate a step's microbatches into one batch, which the model splits again."""
    input_ids, labels, position_ids, normalizers, images = zip(*batches, strict=True)
    names = dict.fromkeys(name for of_batch in images for name in of_batch)
    joined = {name: _joined(name, [of_batch.get(name) for of_batch in images]) for name in names}
    return Batch(torch.cat(input_ids), torch.cat(labels), torch.cat(position_ids), normalizers[0], joined)


def _joined(name: str, values: list[Any]) -> Any:
    return torch.cat(values) if name in TOKEN_TYPES else values


def _sent(batch: Batch) -> Batch:
    # Not from a generator: code that walks all objects must not get hold of a tuple half built.
    input_ids, labels, position_ids, normalizer, images = batch
    sent = [send_to_device(tensor, get_device()) for tensor in (input_ids, labels, position_ids, normalizer)]
    return Batch(sent[0], sent[1], sent[2], sent[3], {name: _sent_input(value) for name, value in images.items()})


def _sent_input(value: Any) -> Any:
    if isinstance(value, list):  # a value per microbatch
        return [_sent_input(one) for one in value]
    return None if value is None else send_to_device(value, get_device())


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield items in order, making up to `depth` of them in advance.

    One thread makes them. It starts with the first item requested, and ends when this generator is exhausted, raises or
    is closed; items made by then but not used are dropped.

    Raises:
        Exception: the error of `items` for an item, with its traceback, when it is that item's turn.
    """

    def make() -> list[T]:
        return list(islice(items, 1))  # nothing at the end

    maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
    try:
        waiting = deque(maker.submit(make) for _ in range(depth + 1))
        while made := waiting.popleft().result():
            yield from made
            waiting.append(maker.submit(make))
    finally:
        maker.shutdown(cancel_futures=True)
