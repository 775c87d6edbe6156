"""Unwraps the objects that the checkpoint functions work on: the model and optimizer inside a script's wrappers."""

from collections.abc import Mapping
from dataclasses import dataclass

from nxd_lora import LoraModel
from nxd_pipeline import NxDPPModel
from torch import nn
from torch.optim import Optimizer

from nxd_engine.checkpoints.state import CheckpointState, model_state
from nxd_engine.checkpoints.stored_values import group_names
from nxd_engine.nxd_model import NxDModel
from nxd_engine.optimizer import NxDOptimizer

MAX_WORKERS = 32


@dataclass(frozen=True)
class UnwrappedObjects:
    """The objects to save or fill, without wrappers."""

    model: nn.Module | None
    optimizer: Optimizer | None
    lora: LoraModel | None

    @property
    def group_names(self) -> list[list[str]]:
        """The names of the parameters in each of the optimizer's groups."""
        return [] if self.model is None or self.optimizer is None else group_names(self.model, self.optimizer)

    def model_tensors(self) -> CheckpointState:
        """Return all tensors of the model, see `model_state`."""
        return {} if self.model is None else model_state(self.model)


def unwrap_objects(model: nn.Module | None, optimizer: object) -> UnwrappedObjects:
    """Unwrap the model and optimizer given to `save_checkpoint` or `load_checkpoint`."""
    return UnwrappedObjects(
        None if model is None else plain_model(model),
        plain_optimizer(optimizer) if isinstance(optimizer, Optimizer) else None,
        None if model is None else adapters_of(model),
    )


def describe_objects(model: object, optimizer: object, scheduler: object, num_workers: object) -> dict[str, object]:
    """Check the arguments, and describe which are given; this must be the same on all ranks."""
    if type(num_workers) is not int or not 1 <= num_workers <= MAX_WORKERS:
        raise ValueError(f"num_workers={num_workers!r} is not a number of workers; use 1 to {MAX_WORKERS}")
    if not isinstance(model, nn.Module | None):
        raise ValueError(
            f"model is a {type(model).__name__}; pass the module itself, whose tensors say how they are split"
        )
    if not isinstance(optimizer, Optimizer | Mapping | None):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; pass the optimizer, or its state_dict")
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise ValueError(f"scheduler is a {type(scheduler).__name__} without state_dict; pass a scheduler or None")
    kind = None if optimizer is None else "a state_dict" if isinstance(optimizer, Mapping) else "an optimizer"
    return {"model": None if model is None else "a model", "optimizer": kind}


def plain_model(model: nn.Module) -> nn.Module:
    """Return the pipeline (perhaps of one stage) in an `NxDModel`, the model in a `LoraModel`, or the module itself."""
    if isinstance(model, LoraModel):
        return plain_model(model.module)
    return model.pipeline if isinstance(model, NxDModel) else model


def adapters_of(model: nn.Module) -> LoraModel | None:
    """Return the `LoraModel` of a model's adapters; None if it has none."""
    lora = model.lora_model if isinstance(model, NxDModel) else model
    return lora if isinstance(lora, LoraModel) and lora.lora_config.enable_lora else None


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that an `NxDOptimizer` wraps, or the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer


def buffer_names(model: nn.Module) -> set[str]:
    """Return the names of this rank's buffers."""
    named = model.local_named_buffers() if isinstance(model, NxDPPModel) else model.named_buffers()
    return {name for name, _ in named}


def tied_names(model: nn.Module) -> Mapping[str, str]:
    """Map each further name of a tied parameter, which checkpoints do not use, to the name that they use."""
    if isinstance(model, NxDPPModel):
        return model.tied_names()
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(it), name)) for name, it in model.named_parameters(remove_duplicate=False)]
    return {name: known for name, known in names if name != known}
