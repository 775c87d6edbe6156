"""Nested values with tensors, taken apart: the tensors, and everything else with stubs in their places."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorMeta(NamedTuple):
    """What stands for a tensor: its place in the list of tensors, and all that is needed to allocate it."""

    tensor_index: int
    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    device: torch.device


class SerializationManager:
    """Takes tensors out of lists, tuples, sets and dicts, and puts them back."""

    def serialize(self, obj: Any, return_stub_list: bool = True) -> tuple[Any, ...]:
        """Take the tensors out.

        Args:
            obj: nested containers; other values are passed on as they are.
            return_stub_list: return the stubs as well.

        Returns:
            The value with a `TensorMeta` for each tensor, the tensors, and their stubs if requested. A tensor that
            occurs twice has one stub.
        """
        tensors: list[Tensor] = []
        stubs: dict[int, TensorMeta] = {}

        def stub(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in stubs:
                meta = TensorMeta(len(tensors), value.dtype, value.size(), value.requires_grad, value.device)
                stubs[id(value)] = meta
                tensors.append(value)
            return stubs[id(value)]

        stripped = _mapped(obj, stub)
        return (stripped, tensors, list(stubs.values())) if return_stub_list else (stripped, tensors)

    def deserialize(self, stubbed_obj: Any, tensors: Sequence[Tensor]) -> Any:
        """Put tensors in the places of their stubs."""
        return _mapped(stubbed_obj, lambda it: tensors[it.tensor_index] if isinstance(it, TensorMeta) else it)

    def extract_stubs(self, stubbed_obj: Any) -> list[TensorMeta]:
        """All stubs, in the order of the value."""
        found: list[TensorMeta] = []

        def note(value: Any) -> Any:
            if isinstance(value, TensorMeta):
                found.append(value)
            return value

        _mapped(stubbed_obj, note)
        return found


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same containers with `function` applied to what is in them; also to keys."""
    if isinstance(value, TensorMeta | torch.Size):
        return function(value)
    if is_instance_namedtuple(value):
        return type(value)(*(_mapped(item, function) for item in value))
    if isinstance(value, list | tuple | set):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, dict):
        factory = [value.default_factory] if isinstance(value, collections.defaultdict) else []
        made: dict[Any, Any] = type(value)(*factory)
        made.update({_mapped(key, function): _mapped(item, function) for key, item in value.items()})
        return made
    return function(value)


def is_instance_namedtuple(iterable: Any) -> bool:
    """Whether a value is a named tuple."""
    return isinstance(iterable, tuple) and hasattr(iterable, "_fields")


def check_for_duplicate_tensors(
    checkpoint: dict[str, Tensor], remove_duplicate_tensors: bool = False
) -> dict[str, Tensor]:
    """Tensors by name, each memory once if requested: a safetensors file holds no tensor under two names.

    Args:
        checkpoint: changed in place if requested.
        remove_duplicate_tensors: whether to keep only the first, by name, of tensors that share memory; it must cover
            all.

    Returns:
        The same dict.

    Raises:
        RuntimeError: none of them has all of it.
    """
    sharing: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in checkpoint.items():
        memory = tensor.untyped_storage()
        if not tensor.is_meta and memory.nbytes():
            sharing.setdefault((tensor.device, memory.data_ptr()), []).append(name)
    for names in sharing.values() if remove_duplicate_tensors else ():
        areas = {name: _area(checkpoint[name]) for name in names}
        overlapping = [it for it in names if any(it != other and _overlap(areas[it], areas[other]) for other in names)]
        if not overlapping:
            continue
        whole = [it for it in overlapping if checkpoint[it].nbytes == checkpoint[it].untyped_storage().nbytes()]
        if not whole:
            raise RuntimeError(f"{', '.join(sorted(overlapping))} share memory, and none covers all of it; clone them")
        for name in overlapping:
            if name != min(whole):
                del checkpoint[name]
    return checkpoint


def _area(tensor: Tensor) -> tuple[int, int]:
    """First byte in its memory, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + (int(last) + 1) * tensor.itemsize if tensor.numel() else begin


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[1] and second[0] < first[1]
