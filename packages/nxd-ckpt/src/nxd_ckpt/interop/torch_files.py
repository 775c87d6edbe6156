"""Tensors in files of `torch.save`, which are read with restrictions and stay mapped files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.safe_pickle import load_torch_file
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE

OPTIMIZER_PREFIX = "optimizer/"  # followed by <parameter>/<key>, as nxd-engine and nxd-trainer name states


@dataclass(frozen=True)
class FilesOfTensors:
    """Tensors by name, each a plain tensor in memory or in a mapped file.

    Attributes:
        values: the tensors by name.
        objects: JSON-serializable values beside them.
    """

    values: Mapping[str, torch.Tensor]
    objects: Any = None

    is_mapped = True

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor."""
        return {name: TensorInfo(value.dtype, tuple(value.shape)) for name, value in self.values.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """Return the whole tensor."""
        value = self.values[name]
        return [Shard(value, (0,) * value.ndim)]


def load_mapping(path: str) -> Mapping[str, Any]:
    """Load a file of `torch.save` that holds a dict, with restrictions.

    Raises:
        CheckpointError: it is missing or damaged, holds something else, or asks for something that is not allowed.
    """
    content = load_torch_file(path)
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dict of names")
    return content


def plain_tensor(value: Any, what: str) -> torch.Tensor:
    """Return the value if it is a dense tensor that this package stores.

    Raises:
        CheckpointError: it is something else.
    """
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
    if not is_dense or value.dtype not in CODE_OF_DTYPE:
        kind = value.dtype if is_dense else type(value).__name__
        raise CheckpointError(f"{what} is a {kind}, expected a dense tensor")
    return value.detach()


def tensors_of_states(states: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer states `{parameter: {key: value}}` by `optimizer/<parameter>/<key>`; numbers as tensors.

    Raises:
        CheckpointError: they have another form, such as numbers for the parameters.
    """
    if not isinstance(states, Mapping):
        raise CheckpointError(f"{path} holds a {type(states).__name__} as states, expected a dict of parameters' names")
    for name, of_parameter in states.items():
        if not isinstance(name, str) or not isinstance(of_parameter, Mapping):
            raise CheckpointError(f"{path} has the states of {name!r}; expected a parameter's name with a dict")
        for key, value in of_parameter.items():
            is_number = isinstance(value, int | float)
            tensor = torch.tensor(float(value)) if is_number else plain_tensor(value, f"{name}/{key} in {path}")
            yield f"{OPTIMIZER_PREFIX}{name}/{key}", tensor
