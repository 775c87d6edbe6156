"""Buckets: one program per input length, one of which is selected at each call.

A bucket kernel pads the inputs of a call and selects their bucket. Scripted kernels are saved with the model. Plain
Python kernels are not; pass the configuration again when loading.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nxd_trace.errors import ModelFolderError
from nxd_trace.programs import Signature, TensorSpec

BucketKernel = Callable[[list[Tensor]], tuple[list[Tensor], Tensor | int]]
StatePreprocessor = Callable[[list[list[int]], list[Tensor], Tensor], list[Tensor]]

_KERNEL_FILE, _PREPROCESSOR_FILE = "bucket_kernel.pt", "state_preprocessor.pt"


@dataclass(frozen=True)
class BucketModelConfig:
    """How a call selects its bucket; like `torch_neuronx.BucketModelConfig`.

    Attributes:
        bucket_kernel: function without arguments that returns the kernel: a scripted or plain function from the list of
            a call's inputs to the padded inputs and their bucket's index. None for the built-in kernel, which appends
            zeros up to the shapes of the first bucket that fits.
        shared_state_buffer: initial state, one tensor per alias in order, if it is larger than a bucket's state.
        shared_state_buffer_preprocessor: function without arguments that returns a function from the shapes of a
            bucket's state, the state, and the bucket's index to the bucket's state. The result must be views: writes to
            copies are lost.
        func_kwargs: arguments of `func`: one dict for all buckets, or a list with one per bucket.
    """

    bucket_kernel: Callable[[], BucketKernel] | None
    shared_state_buffer: Sequence[Tensor] | None = None
    shared_state_buffer_preprocessor: Callable[[], StatePreprocessor] | None = None
    func_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_kernel", "shared_state_buffer_preprocessor"):
            value = getattr(self, name)
            if value is not None and (not callable(value) or isinstance(value, torch.jit.ScriptFunction)):
                raise TypeError(
                    f"{name} must be a function without arguments that returns the (scripted) function; "
                    f"got a {type(value).__name__}"
                )
        if self.shared_state_buffer_preprocessor is not None and self.shared_state_buffer is None:
            raise ValueError("shared_state_buffer_preprocessor needs shared_state_buffer, the state that it slices")

    def kwargs_of(self, bucket: int, num_buckets: int) -> Mapping[str, Any]:
        """Return the arguments of `func` for one bucket."""
        if self.func_kwargs is None:
            return {}
        if isinstance(self.func_kwargs, Mapping):
            return self.func_kwargs
        if len(self.func_kwargs) != num_buckets:
            raise ValueError(
                f"func_kwargs has {len(self.func_kwargs)} entries for {num_buckets} buckets; pass one dict per bucket, "
                "or a single dict for all"
            )
        return self.func_kwargs[bucket]


def save_functions(config: BucketModelConfig, folder: Path) -> dict[str, Any]:
    """Write the scripted functions of a configuration; returns its entry of the manifest."""
    kinds = {}
    for name, make, file in (
        ("kernel", config.bucket_kernel, _KERNEL_FILE),
        ("preprocessor", config.shared_state_buffer_preprocessor, _PREPROCESSOR_FILE),
    ):
        function = None if make is None else make()
        if isinstance(function, torch.jit.ScriptFunction | torch.jit.ScriptModule):
            torch.jit.save(function, str(folder / file))
            kinds[name] = "scripted"
        else:
            kinds[name] = "built-in" if function is None else "python"
    return kinds


def load_kernel(
    stored: Mapping[str, Any], folder: Path, config: BucketModelConfig | None, signatures: Sequence[Signature]
) -> BucketKernel:
    """Return the bucket kernel of a model."""
    if config is not None:
        return fitting_kernel(signatures) if config.bucket_kernel is None else config.bucket_kernel()
    if stored["kernel"] == "scripted":
        kernel: BucketKernel = torch.jit.load(str(folder / _KERNEL_FILE))
        return kernel
    if "python" in stored.values():
        raise ModelFolderError(
            f"the bucket functions of {folder} are plain Python, which is not saved; pass the BucketModelConfig to "
            "parallel_model_load, or script the functions with torch.jit.script"
        )
    return fitting_kernel(signatures)


def load_preprocessor(stored: Mapping[str, Any], folder: Path) -> StatePreprocessor | None:
    """Return the scripted state preprocessor of a model, if it has one."""
    if stored["preprocessor"] != "scripted":
        return None
    preprocessor: StatePreprocessor = torch.jit.load(str(folder / _PREPROCESSOR_FILE))
    return preprocessor


def fitting_kernel(signatures: Sequence[Signature]) -> BucketKernel:
    """Return the built-in kernel, which pads with zeros along every dim to the first bucket that all inputs fit."""

    def kernel(inputs: list[Tensor]) -> tuple[list[Tensor], int]:
        for index, signature in enumerate(signatures):
            if len(inputs) == len(signature.inputs) and all(map(_fits_into, inputs, signature.inputs)):
                return [_padded(tensor, spec) for tensor, spec in zip(inputs, signature.inputs, strict=True)], index
        return inputs, len(signatures) - 1

    return kernel


def choose_bucket(
    kernel: BucketKernel, signatures: Sequence[Signature], inputs: list[Tensor]
) -> tuple[int, list[Tensor]]:
    """Select the bucket of these inputs; returns its index and the padded inputs."""
    _check_not_too_long(signatures, inputs)
    padded, chosen = kernel(inputs)
    bucket = int(chosen)
    if not 0 <= bucket < len(signatures):
        raise ValueError(f"the bucket kernel chose bucket {bucket}; use 0 to {len(signatures) - 1}")
    padded = list(padded)
    expected = signatures[bucket].inputs
    if len(padded) != len(expected) or not all(
        spec.fits(tensor) for spec, tensor in zip(expected, padded, strict=True)
    ):
        raise ValueError(
            f"the inputs fit no bucket: {_listed(TensorSpec.of(tensor) for tensor in padded)}, but bucket {bucket} "
            f"takes {_listed(expected)}; let the bucket kernel pad to these shapes"
        )
    return bucket, padded


def _check_not_too_long(signatures: Sequence[Signature], inputs: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(inputs):
        specs = [signature.inputs[index] for signature in signatures if index < len(signature.inputs)]
        if not specs or any(len(spec.shape) != tensor.dim() for spec in specs):
            continue  # the kernel may be able to use it
        for dim, length in enumerate(tensor.shape):
            longest = max(spec.shape[dim] for spec in specs)
            if length > longest:
                raise ValueError(
                    f"input {index} has length {length} along dim {dim}, more than the largest bucket's {longest}; "
                    "shorten the input, or trace a larger bucket"
                )


def _fits_into(tensor: Tensor, spec: TensorSpec) -> bool:
    return (
        tensor.dtype == spec.torch_dtype
        and tensor.dim() == len(spec.shape)
        and all(length <= size for length, size in zip(tensor.shape, spec.shape, strict=True))
    )


def _padded(tensor: Tensor, spec: TensorSpec) -> Tensor:
    missing = [size - length for length, size in zip(tensor.shape, spec.shape, strict=True)]
    return F.pad(tensor, [side for amount in reversed(missing) for side in (0, amount)]) if any(missing) else tensor


def _listed(specs: Any) -> str:
    return ", ".join(map(str, specs))
