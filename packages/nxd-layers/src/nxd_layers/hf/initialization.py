"""Initial values for a parallelized model on the meta device: those of the unsharded model, at any degree.

A model of transformers initialises a plain module's own parameters in its `_init_weights(module)`. For a parallel
layer a plain module is made temporarily and filled, and this rank keeps its shard: only one layer is full at a time.
A function that supports parallel layers, and has them draw their own initial values, is called with them. What
`_init_weights` leaves to the constructors, such as routers of zeros, is taken from a module that is made anew.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import ShardSpec, allocate_meta_tensor, get_shard_spec, seed_of_module
from torch import nn

from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.experts.linear import ExpertLinear
from nxd_layers.hf.head_linears import CopiedHeadsLinear
from nxd_layers.hf.layers import plain_class_of, shard_of
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_DRAWING_LAYERS = (ColumnParallelLinear, RowParallelLinear, ParallelEmbedding, GQAQKVColumnParallelLinear)


def param_init_fn_of(model: Any, fill_plain: Callable[[nn.Module], Any] | None = None) -> Callable[[nn.Module], None]:
    """Return the `param_init_fn` of `NxDPPModel` for a parallelized model.

    Args:
        model: a model of transformers.
        fill_plain: a function that fills the parameters and buffers of a plain module, without its submodules, as in
            the unsharded model; `model._init_weights` or None: as transformers does. It may instead call
            `reset_parameters` of parallel layers. Experts that it leaves unset draw their own initial values.

    Returns:
        A function that fills the parameters and buffers of a module, without its submodules. With the same seed, these
        are shards of the same full tensors at any tensor-parallel degree.
    """

    given = None if fill_plain == model._init_weights else fill_plain
    places = dict(_places(model, model))
    tensors = [*model.parameters(), *model.buffers()]

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        place = places.get(module, _Place(module, model))
        if given is None:
            full = _unsharded(module)
            with _only(_own_tensors(full), tensors):
                _fill_as_transformers(full, place)
            if not isinstance(module, ExpertLinear):
                _fill_as_constructed(full, place.owner.config)
        elif _drawn_by_its_own_method(module, given):
            return
        else:
            full = _unsharded(module)
            given(full)
            unset = [it for it in full._buffers.values() if it is not None and _has_unset_values(it)]
            if unset:
                with _only(unset, tensors):
                    _fill_as_transformers(full, place)
        if full is not module:
            _keep_parts(module, full)
        if isinstance(module, ExpertLinear) and _has_unset_values(module.weight):
            module.reset_parameters()
        if given is None and _is_tied_head(model, module):  # transformers gives it the values of the embedding
            fill(model.get_input_embeddings())

    return fill


def initialize(model: Any) -> None:
    """Allocate and initialise all parameters and buffers of the model that are on the meta device.

    Random values depend on torch's seed and a module's name only.

    Raises:
        ValueError: the model leaves a parameter or buffer unset.
    """
    fill = param_init_fn_of(model)
    seed = torch.initial_seed()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            own = {**module._parameters, **module._buffers}
            on_meta = {key: tensor for key, tensor in own.items() if tensor is not None and tensor.is_meta}
            for tensor in on_meta.values():
                allocate_meta_tensor(tensor)
            if on_meta:
                torch.manual_seed(seed_of_module(seed, name))
                fill(module)
            for key, tensor in on_meta.items():
                if _has_unset_values(tensor):
                    raise ValueError(
                        f"{type(model).__name__}._init_weights does not set {name}.{key}; build the model in memory, "
                        "not from a config, and parallelize that"
                    )


def _drawn_by_its_own_method(module: nn.Module, fill: Callable[[nn.Module], Any]) -> bool:
    """Let a function fill a parallel layer, and return whether it called the layer's `reset_parameters`.

    That method draws full tensors and keeps this rank's shards. If the function fills the shards in another way, the
    result does not count, and torch's random state is restored.
    """
    if not isinstance(module, _DRAWING_LAYERS):
        return False
    own_method = module.reset_parameters
    calls: list[None] = []

    def reset_parameters() -> None:
        calls.append(None)
        own_method()

    state = torch.get_rng_state()
    module.__dict__["reset_parameters"] = reset_parameters  # also for methods of the layer that end in it
    try:
        fill(module)
    finally:
        del module.__dict__["reset_parameters"]
    if not calls:
        torch.set_rng_state(state)
    return bool(calls)


def _has_unset_values(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any())


def _is_tied_head(model: Any, module: nn.Module) -> bool:
    if module is not model.get_output_embeddings():
        return False
    embedding = model.get_input_embeddings()
    return embedding is not module and embedding.weight is getattr(module, "weight", None)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [it for it in (*module._parameters.values(), *module._buffers.values()) if it is not None]


@dataclass(frozen=True)
class _Place:
    """Where a module is: the model of transformers whose `_init_weights` knows it, and the module around it."""

    module: nn.Module
    owner: Any
    outer: "_Place | None" = None


def _places(module: nn.Module, owner: Any, outer: _Place | None = None) -> Iterator[tuple[nn.Module, _Place]]:
    place = _Place(module, module if hasattr(module, "_init_weights") else owner, outer)
    yield module, place
    for child in module.children():
        yield from _places(child, place.owner, place)


@contextmanager
def _only(chosen: list[torch.Tensor], tensors: list[torch.Tensor]) -> Iterator[None]:
    """Let the functions by which transformers sets initial values pass over all tensors but the chosen ones."""
    for tensor in tensors:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for tensor in chosen:
        tensor._is_hf_initialized = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor in tensors:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


def _fill_as_transformers(full: nn.Module, place: _Place) -> None:
    """Fill a module in its place: by itself, then by each module around it, such as a block that scales its output."""
    place.owner._init_weights(full)
    parent = place.outer
    if parent is None:
        return
    name = next(name for name, child in parent.module.named_children() if child is place.module)
    parent.module._modules[name] = full
    try:
        outer: _Place | None = parent
        while outer is not None:
            outer.owner._init_weights(outer.module)
            outer = outer.outer
    finally:
        parent.module._modules[name] = place.module


def _fill_as_constructed(module: nn.Module, config: Any) -> None:
    """Give what is unset the values of a module that is made anew, if its constructor's arguments are known.

    These are the config, the dtype, and attributes of the same name, such as `layer_idx`.
    """
    tensors = {**module._parameters, **module._buffers}
    unset = {name: it for name, it in tensors.items() if it is not None and _has_unset_values(it)}
    if not unset:
        return
    known = vars(module) | {"config": config, "dtype": next(iter(unset.values())).dtype}
    parameters = [it for it in inspect.signature(type(module)).parameters.values() if it.kind not in _VARIADIC]
    wanted = [it.name for it in parameters if it.default is it.empty or it.name == "dtype"]
    if all(name in known for name in wanted):
        made = type(module)(**{name: known[name] for name in wanted})
        for name, tensor in unset.items():
            tensor.copy_(getattr(made, name))


def _unsharded(module: nn.Module) -> nn.Module:
    """Return the module that this one has replaced, with full parameters; the module itself if it has no shards."""
    specs = {name: get_shard_spec(it) for name, it in module._parameters.items() if it is not None}
    shapes = {name: _full_shape(module, name, spec) for name, spec in specs.items() if spec is not None}
    if not shapes:
        return module
    cls = _plain_class(module)
    full = cls.__new__(cls)
    full.__dict__.update(vars(module))
    parameters = {
        name: nn.Parameter(it.new_full(shapes[name], torch.nan, device="cpu"))
        if name in shapes and it is not None
        else it
        for name, it in module._parameters.items()
    }
    full.__dict__["_parameters"] = parameters
    return full


def _full_shape(module: Any, name: str, spec: ShardSpec) -> tuple[int, ...]:
    if spec.pieces:
        return spec.pieces[0].logical_shape
    # All padding on this rank, which only linears and embeddings can be.
    if isinstance(module, ParallelEmbedding):
        return module.num_embeddings, module.embedding_dim
    return (module.out_features, module.in_features) if name == "weight" else (module.out_features,)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    if isinstance(module, ColumnParallelLinear | RowParallelLinear | CopiedHeadsLinear):
        return nn.Linear
    if isinstance(module, ParallelEmbedding):
        return plain_class_of(module)
    return type(module)


def _keep_parts(module: nn.Module, full: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        spec = None if parameter is None else get_shard_spec(parameter)
        if parameter is not None and spec is not None:
            parameter.copy_(shard_of(full.get_parameter(name), spec))
