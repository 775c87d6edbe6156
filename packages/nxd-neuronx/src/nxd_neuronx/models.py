"""Models as scripts handle them before training: tied weights, parallel attributes, values, the move to a device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from nxd_engine.build import parameters_on_meta
from nxd_engine.rank_sync import in_turns
from nxd_layers import hf
from nxd_pipeline import NxDPPModel
from nxd_pipeline.partition import materialize
from nxd_state import copy_parameter_attributes, model_parallel_is_initialized, move_model_to_device
from torch import Tensor, nn

_ATTRIBUTES = ("tensor_model_parallel", "expert_model_parallel", "sequence_parallel_enabled", "shared")


def analyze_shared_parameters(
    module: nn.Module, shared_parameters: dict[nn.Parameter, list[str]] | None = None, prefix: str = ""
) -> list[list[str]]:
    """Names of the parameters that lie in several places of a model: a list of all names for each such parameter.

    Args:
        module: the model.
        shared_parameters: names found before, by parameter; those of `module` are added.
        prefix: of the names.
    """
    names = {} if shared_parameters is None else shared_parameters
    for name, parameter in module.named_parameters(prefix=prefix, remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def retie_shared_weights(module: nn.Module, shared_weight_names: list[list[str]]) -> None:
    """Put the parameter of each list's first name in the place of the others.

    Args:
        module: changed in place.
        shared_weight_names: of `analyze_shared_parameters`.
    """
    for first, *others in shared_weight_names:
        tied = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, tied)


@contextmanager
def preserve_shared_weights(model: nn.Module, ignore_hf: bool = False) -> Iterator[None]:
    """Weights that are tied on entry are tied again on exit.

    Args:
        model: may have its parameters replaced inside.
        ignore_hf: tie models of transformers by what was found, too, and not by their own `tie_weights`.
    """
    shared = analyze_shared_parameters(model)
    try:
        yield
    finally:
        if is_hf_pretrained_model(model) and not ignore_hf:
            model.tie_weights()  # type: ignore[operator]
        else:
            retie_shared_weights(model, shared)


@contextmanager
def preserve_parallel_attributes(model: nn.Module) -> Iterator[None]:
    """Parameters that are replaced inside get the parallel attributes and the shard metadata of those before."""
    before = dict(model.named_parameters())
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            old = before.get(name)
            if old is None or old is parameter:
                continue
            if old.shape == parameter.shape:
                copy_parameter_attributes(old, parameter)
            for attribute in _ATTRIBUTES:
                if hasattr(old, attribute) and not hasattr(parameter, attribute):
                    setattr(parameter, attribute, getattr(old, attribute))


def reinit_model(
    model: nn.Module, device: torch.device, param_init_fn: Callable[[nn.Module, torch.device], Any]
) -> None:
    """Give all parameters new memory on a device and have a function fill them, module by module.

    Args:
        model: changed in place; ties and attributes stay.
        device: of the new parameters.
        param_init_fn: called with each module and the device; fills that module's own parameters.
    """
    with preserve_parallel_attributes(model), preserve_shared_weights(model), torch.no_grad():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
            param_init_fn(module, device)


def get_model_sequential(
    model: nn.Module,
    device: torch.device,
    sequential_move_factor: int = 11,
    param_init_fn: Callable[[nn.Module, torch.device], Any] | None = None,
) -> nn.Module:
    """Give a model's meta parameters values and move it to a device, some ranks of a host at a time. By all ranks.

    Args:
        model: changed in place; a `NxDPPModel` has its values already.
        device: where to.
        sequential_move_factor: ranks of a host that do so at once, which bounds the host's memory.
        param_init_fn: called with a module, or a module and a device, to fill its own meta parameters.

    Returns:
        The model itself.

    Raises:
        ValueError: parameters are on the meta device, and there is no `param_init_fn`.
    """

    def move() -> nn.Module:
        if not isinstance(model, NxDPPModel):
            materialize(model, param_init_fn)
        return move_model_to_device(model, device)

    if not model_parallel_is_initialized():
        return move()
    return in_turns("move its model to the device", move, sequential_move_factor)


def maybe_materalize_model(model: nn.Module) -> None:  # the documented spelling
    """Does nothing: models of torchdistx's deferred initialisation, which it was for, end with torch 2.0."""


def has_fake_tensors(model: nn.Module, ignored_params: set[nn.Parameter] | None = None) -> bool:
    """Whether parameters, other than those ignored, have no values yet: they are on the meta device."""
    return any(it.is_meta and it not in (ignored_params or ()) for it in model.parameters())


def is_hf_transformers_available() -> bool:
    """Whether transformers is installed."""
    return find_spec("transformers") is not None


def is_hf_accelerate_available() -> bool:
    """Whether accelerate is installed."""
    return find_spec("accelerate") is not None


def is_nxdt_available() -> bool:
    """Whether neuronx-distributed-training is installed."""
    return find_spec("neuronx_distributed_training") is not None


def is_hf_pretrained_model(model: nn.Module) -> bool:
    """Whether it is a model of transformers."""
    return hf.is_transformers_model(model)


def is_nxdt_pretrained_model(model: nn.Module) -> bool:
    """Whether it is a Megatron module of neuronx-distributed-training."""
    return any(cls.__module__.startswith("neuronx_distributed_training.") for cls in type(model).__mro__)


def recursive_filter(item: Any, predicate: Callable[[Tensor], bool]) -> Any:
    """Nested containers without the tensors that a predicate refuses.

    Args:
        item: dicts, lists, tuples and sets of them; any other value is kept.
        predicate: whether to keep a tensor.

    Returns:
        The same structure; a refused tensor by itself is None.
    """
    if isinstance(item, Mapping):
        return {key: recursive_filter(value, predicate) for key, value in item.items() if _keeps(value, predicate)}
    if isinstance(item, list | tuple | set):
        return type(item)(recursive_filter(value, predicate) for value in item if _keeps(value, predicate))
    return item if _keeps(item, predicate) else None


def _keeps(value: Any, predicate: Callable[[Tensor], bool]) -> bool:
    return not isinstance(value, Tensor) or predicate(value)


def check_delay_tracing(nxd_config: Mapping[str, Any]) -> bool:
    """Whether tracing waits for the first batch: never, models are cut when they are made."""
    return False


def get_delay_tracing(arg: Any) -> bool:
    """As `check_delay_tracing`."""
    return False


@contextmanager
def init_on_device(
    device: torch.device | str, include_buffers: bool = False, force_custom_init_on_device: bool = False
) -> Iterator[None]:
    """Modules made inside have their parameters on `device`; on "meta" they take no memory.

    Args:
        device: on others than "meta" buffers, and tensors that name no device, are made there as well.
        include_buffers: with "meta", put buffers there, too; otherwise they have their values.
        force_custom_init_on_device: taken for scripts that give it; there is one way to do it here.
    """
    device = torch.device(device)
    with parameters_on_meta(include_buffers=include_buffers) if device.type == "meta" else device:
        yield
