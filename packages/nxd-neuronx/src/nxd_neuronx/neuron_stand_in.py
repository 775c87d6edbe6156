"""The names of torch-neuronx and neuronx-cc that inference scripts import, for machines without these libraries.

`nxd_neuronx.xla_stand_in` installs them next to those of torch-xla. Scripts import kernels at the top and launch them
for long prompts only, so a kernel can be imported here, and the launch raises an error.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nxd_trace import BucketModelConfig
from torch import Tensor

from nxd_neuronx.process import get_platform_target
from nxd_neuronx.traced_model import NxDModel, NxDModelExecutor
from nxd_neuronx.unsupported import explains


class RmsNorm:
    """The RMS norm of torch-neuronx."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, eps: float, dim: int) -> Tensor:
        """Normalize `hidden` along `dim` in float32 or wider, and scale it by `weight`; keeps shape and dtype."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)
        return (normed * weight.view(-1, *[1] * (hidden.dim() - 1 - dim % hidden.dim()))).to(hidden.dtype)


def nki_jit(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that leaves a kernel unchanged."""
    return lambda kernel: kernel


class _LoadedModel(NxDModelExecutor):
    @property  # type: ignore[misc]  # object's can be set
    def __class__(self) -> type:
        """Scripts recognize a compiled model by `isinstance(model, torch.jit.ScriptModule)`."""
        return torch.jit.ScriptModule


_torch_jit_load = torch.jit.load


def load_compiled(f: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.load` that also loads the folder that `torch.jit.save` writes for a compiled model.

    Raises:
        ModelFolderError: the folder has no such model, or the model is damaged.
    """
    if isinstance(f, str | os.PathLike) and Path(f).is_dir():
        return _LoadedModel(NxDModel.load(Path(f)))
    return _torch_jit_load(f, *args, **kwargs)


_ATTENTION, _VALIDATION = "neuronxcc.nki.kernels.attention", "torch_neuronx.testing.validation"

NEURON_MODULES: dict[str, dict[str, Any]] = {
    "torch_neuronx": {"__version__": "0", "BucketModelConfig": BucketModelConfig},
    "torch_neuronx.testing": {"assert_close": torch.testing.assert_close},
    _VALIDATION: {"logit_validation": explains(_VALIDATION)("logit_validation")},
    "torch_neuronx.utils": {"get_platform_target": get_platform_target},
    "torch_neuronx.xla_impl": {},
    "torch_neuronx.xla_impl.ops": {"RmsNorm": RmsNorm, "nki_jit": nki_jit},
    "neuronxcc": {},
    "neuronxcc.nki": {},
    "neuronxcc.nki.kernels": {},
    _ATTENTION: {"attention_isa_kernel": explains(_ATTENTION)("attention_isa_kernel")},
}
