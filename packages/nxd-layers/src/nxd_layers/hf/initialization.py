"""Initial values for a parallelized model on the meta device: those of the unsharded model, at any degree.

A model of transformers initialises a plain module's own parameters in its `_init_weights(module)`. For a parallel
layer a plain module is made temporarily and filled, and this rank keeps its shard: only one layer is full at a time.
A function that supports parallel layers, and has them draw their own initial values, is called with them. What
`_init_weights` leaves to the constructors, such as routers of zeros, is taken from a module that is made anew.
"""

import inspect
from collections.abc import Callable, Iterator
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

    is_given = fill_plain is not None and fill_plain != model._init_weights
    owners = dict(_modules_and_owners(model, model))

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        owner = owners.get(module, model)
        fill_full = fill_plain if fill_plain is not None and is_given else owner._init_weights
        if _drawn_by_its_own_method(module, fill_full):
            return
        full = _unsharded(module)
        fill_full(full)
        if _is_unset(module):
            _fill_from_outside(model, module)
        if not is_given and not isinstance(module, ExpertLinear):
            _fill_as_constructed(full, owner.config)
        if full is not module:
            _keep_parts(module, full)
        if isinstance(module, ExpertLinear) and _has_unset_values(module.weight):
            module.reset_parameters()

    return fill


def _modules_and_owners(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Give each module with the innermost model of transformers that holds it, whose `_init_weights` knows it."""
    owner = module if hasattr(module, "_init_weights") else owner
    yield module, owner
    for child in module.children():
        yield from _modules_and_owners(child, owner)


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


def _is_unset(module: nn.Module) -> bool:
    return any(map(_has_unset_values, module._buffers.values()))


def _fill_from_outside(model: Any, module: nn.Module) -> None:
    """Let a model fill buffers that it sets from an outer module, such as the multipliers of Falcon-H1."""
    for outer in reversed([it for it in model.modules() if any(module is inner for inner in it.modules())]):
        if outer is not module and _is_unset(module):
            model._init_weights(outer)


def _fill_as_constructed(module: nn.Module, config: Any) -> None:
    """Give what is unset the values of a module that is made anew, if its constructor's arguments are known.

    These are the config, and attributes of the same name, such as `layer_idx`.
    """
    unset = [name for name, it in (*module._parameters.items(), *module._buffers.items()) if _has_unset_values(it)]
    known = vars(module) | {"config": config}
    parameters = inspect.signature(type(module)).parameters.values()
    required = [it.name for it in parameters if it.default is it.empty and it.kind not in _VARIADIC]
    if not unset or not all(name in known for name in required):
        return
    with torch.device("cpu"):
        made = type(module)(**{name: known[name] for name in required})
    for name in unset:
        getattr(module, name).copy_(getattr(made, name))


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
