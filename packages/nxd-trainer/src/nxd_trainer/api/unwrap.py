"""What the checkpoint functions work on: the model and the optimizer inside of the wrappers that scripts hold."""

from collections.abc import Iterator

from nxd_layers.lora import LoraModel
from nxd_pipeline import NxDPPModel
from torch import nn
from torch.optim import Optimizer

from nxd_trainer.api.model import NxDModel
from nxd_trainer.api.optimizer import NxDOptimizer


def plain_model(model: nn.Module) -> nn.Module:
    """The pipeline (of one stage perhaps) in an `NxDModel`, the model in a `LoraModel`; any other module itself."""
    if isinstance(model, LoraModel):
        return plain_model(model.module)
    return model.pipeline if isinstance(model, NxDModel) else model


def adapters_of(model: nn.Module) -> LoraModel | None:
    """What knows the adapters of a model; None if it has none."""
    lora = model.lora_model if isinstance(model, NxDModel) else model
    return lora if isinstance(lora, LoraModel) and lora.lora_config.enable_lora else None


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that an `NxDOptimizer` wraps; any other optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters, each once, by the names that checkpoints know them by."""
    if not isinstance(model, NxDPPModel):
        return model.named_parameters()
    first_names = model.tied_names()
    return ((first_names.get(name, name), parameter) for name, parameter in model.local_named_parameters())


def buffer_names(model: nn.Module) -> set[str]:
    """Of this rank's buffers."""
    named = model.local_named_buffers() if isinstance(model, NxDPPModel) else model.named_buffers()
    return {name for name, _ in named}


def further_names(model: nn.Module) -> set[str]:
    """The names of tied parameters under which checkpoints do not know them."""
    if isinstance(model, NxDPPModel):
        return set(model.tied_names())
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every_name - {name for name, _ in model.named_parameters()}
