"""Splitting a batch into microbatches, and the number of the one whose forward is running."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_under_way: ContextVar[int] = ContextVar("microbatch_under_way", default=0)


def current_microbatch() -> int:
    """Return the number of the microbatch whose forward is running, for hooks on modules; 0 outside `NxDPPModel`."""
    return _under_way.get()


@contextmanager
def forward_of(microbatch: int) -> Iterator[None]:
    """Return a block in which `current_microbatch` is this one."""
    token = _under_way.set(microbatch)
    try:
        yield
    finally:
        _under_way.reset(token)


class Microbatches(list[Any]):
    """An input that is already split: one value for each microbatch, None for those that have none.

    It is for inputs whose dim 0 is not the batch, such as the pixels of all images of some rows.
    """


def split_batch(batch: Mapping[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Split a batch into equal microbatches, in order, as views.

    Tensors of `[batch, ...]` are cut; those of `[1, ...]`, scalars and everything else go to each microbatch whole.
    `Microbatches` are split already; beside them there need not be a tensor to cut.

    Raises:
        ValueError: nothing has microbatches, tensors disagree about the batch, or it cannot be cut evenly; or
            `Microbatches` have another number of values.
    """
    split = {name: value for name, value in batch.items() if isinstance(value, Microbatches)}
    for name, values in split.items():
        if len(values) != num_microbatches:
            raise ValueError(f"{name} has {len(values)} microbatches; expected num_microbatches={num_microbatches}")
    rest = {name: value for name, value in batch.items() if name not in split}
    whole = _cut(rest, num_microbatches, needs_batch=not split)
    return [
        {name: split[name][index] if name in split else parts[name] for name in batch}
        for index, parts in enumerate(whole)
    ]


def _cut(batch: Mapping[str, Any], num_microbatches: int, *, needs_batch: bool) -> list[dict[str, Any]]:
    lengths = {tensor.shape[0] for tensor in tree_leaves(dict(batch)) if isinstance(tensor, Tensor) and tensor.dim()}
    lengths.discard(1)
    if num_microbatches == 1 or not (lengths or needs_batch):
        return [dict(batch)] * num_microbatches
    if len(lengths) != 1:
        shapes = tree_map(lambda it: tuple(it.shape) if isinstance(it, Tensor) else type(it).__name__, dict(batch))
        found = "disagree about the length of dim 0" if lengths else "have no batch along dim 0"
        raise ValueError(
            f"the inputs {found}, but num_microbatches={num_microbatches} splits them: {shapes}; put the "
            "batch, or length 1, on dim 0 of each tensor"
        )
    (length,) = lengths
    if length % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} does not divide the batch of {length}; use a batch of "
            f"{-(-length // num_microbatches) * num_microbatches}, or a number of microbatches that divides {length}"
        )
    size = length // num_microbatches

    def part(value: Any, index: int) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == length:
            return value.narrow(0, index * size, size)
        return value

    return [
        {name: tree_map(lambda leaf, index=index: part(leaf, index), value) for name, value in batch.items()}
        for index in range(num_microbatches)
    ]
