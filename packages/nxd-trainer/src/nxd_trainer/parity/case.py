"""The input of a comparison: a model, its layout, and the batches of a few steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nxd_engine import NxDModel
from nxd_engine.config import complete_config
from torch import Tensor, nn
from torch.utils._pytree import tree_map

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return a model's trained parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A user's model and layout.

    Attributes:
        model_fn: function that makes the model, as for `initialize_parallel_model`. Its weights must not depend on the
            layout.
        batches: the inputs of each step by name, for all replicas: tensors of `[global batch, ...]`.
        nxd_config: the result of `neuronx_distributed_config`, or its arguments.
        reference_fn: function that makes the one-process model, if `model_fn` does not do so without parallelism.
            Modules are compared by name; parameters have their names in a checkpoint.
        optimizer_class: the optimizer's class, as for `initialize_parallel_optimizer`.
        optimizer_arguments: keyword arguments for `optimizer_class`.
        parameter_groups: function from the model, or this rank's part of it, to the optimizer's groups of trained
            parameters; by default one group.
        seed: the torch seed set before a model is made.
        prepare: function called with the layout's model when it is made, for what one process is to be compared with,
            such as compiling its layers.
    """

    model_fn: Callable[[], nn.Module]
    batches: Sequence[Mapping[str, Any]]
    nxd_config: Mapping[str, Any]
    reference_fn: Callable[[], nn.Module] | None = None
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_arguments: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    parameter_groups: Callable[[nn.Module], Any] = trained_parameters
    seed: int = 0
    prepare: Callable[[NxDModel], object] | None = None


def checked_config(case: ParityCase) -> dict[str, Any]:
    """Return the complete config of the layout; adapters are newly initialized and have no dropout."""
    config = complete_config(case.nxd_config)
    if not case.batches:
        raise ValueError("batches is empty; pass the inputs of at least one step")
    if config["lora_config"] is not None:
        config["lora_config"] = replace(config["lora_config"], lora_dropout=0.0, load_lora_from_ckpt=False)
    return config


def check_batches(case: ParityCase, replicas: int) -> None:
    """Check that every batch can be divided among this number of replicas."""
    for step, batch in enumerate(case.batches, start=1):
        for name, value in batch.items():
            if has_batch(value) and value.shape[0] % replicas:
                raise ValueError(
                    f"batches: {name} of step {step} has {value.shape[0]} samples, which cannot be divided among "
                    f"{replicas} replicas; use a multiple of {replicas}"
                )


def has_batch(value: Any) -> bool:
    """Whether an input is a tensor of `[batch, ...]`; every replica gets all other inputs whole."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] > 1


def make_model(model_fn: Callable[[], nn.Module], seed: int, dtype: torch.dtype) -> nn.Module:
    """Make a model in `dtype` from the seed, without dropout, whose random numbers would differ between layouts."""
    torch.manual_seed(seed)
    model = model_fn().to(dtype)
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
    return model


def inputs_in(dtype: torch.dtype, batch: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return a batch with its floating-point tensors in `dtype`, on a device if one is given."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return {name: tree_map(convert, value) for name, value in batch.items()}
