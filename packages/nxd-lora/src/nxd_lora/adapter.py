"""`LoraAdapter`: adds a low-rank branch to an ordinary layer, in place, and removes it again.

The layer stays the same object, with its class, its place and its parameters' names; it gets two more parameters, the
factors A `[r, in]` and B `[out, r]`, and a forward hook that adds their product to its output.

The factor that meets the split dim of the layer's weight is split in the same way, strides, padding and copies
included; the other one is whole on every rank. Values are drawn as the layers' own are: the whole tensor in float32
on the CPU, so that they do not depend on the layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nxd_layers.initialization import InitMethod, empty_parameter, empty_sharded_parameter, fill_from_logical
from nxd_layers.mappings import copy_to_tensor_model_parallel_region
from nxd_layers.padding import zero_padding_gradient
from nxd_state import Box, ShardSpec, at_least_float32, get_shard_spec, shard_along
from nxd_state.parameter_marks import get_partition, is_sequence_parallel, mark_sequence_parallel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nxd_lora.config import LoraConfig


def _as_it_is(layer: nn.Module, part: str, values: Tensor) -> Tensor:
    return values


def _own_bias(layer: nn.Module, parts: Sequence[str]) -> list[str]:
    return ["bias"] if isinstance(getattr(layer, "bias", None), nn.Parameter) else []


@dataclass(frozen=True, eq=False)
class LayerKind:
    """How one class of layers is adapted.

    Attributes:
        factor_names: names of A and B; PEFT's names, so that its files need only a prefix.
        add_factors: `(layer, config, part)`: registers the factors of a part with the layer and fills them.
        output_delta: `(layer, input)`: the branch's contribution to the layer's output; one per output, or None, if
            there are several. `column_parallel_linears` also passes `call=`. None if the branch is in the weights that
            the layer reads, see `read_weights`.
        weight_deltas: `(layer)`: the values that merging adds to the layer's weights, by parameter name,
            in float32 at least.
        zero_factor: index of the factor that starts at zero, so that the branch adds nothing at first.
        parts: for a layer that holds several layers of the unsharded model, which are adapted separately: their names,
            beside the layer in its parent, by the ending of their factors' names. Empty if parts are parameters of
            the layer under their own names.
        bias_names: `(layer, parts)`: the biases of these parts; a ValueError if they cannot train without others.
        rows: `(layer, part)`: the weight `[out, in]` of a part, as a parameter's name and a slice of its rows; None if
            outputs are not rows, so that DoRA is not supported.
        with_complete_gradient: `(layer, part, values)`: values for each row, whose gradient is summed over all ranks
            that hold copies of the row.
        read_weights: `(layer)`: the values of the layer's parameters in its forward, by name, with the branch added.
        is_linear: whether "all-linear" includes layers of this kind.
    """

    factor_names: tuple[str, str]
    add_factors: Callable[[Any, LoraConfig, str], None]
    output_delta: Callable[..., Tensor | tuple[Tensor | None, ...]] | None
    weight_deltas: Callable[[Any], dict[str, Tensor]]
    zero_factor: int = 1
    parts: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    bias_names: Callable[[Any, Sequence[str]], list[str]] = _own_bias
    rows: Callable[[Any, str], tuple[str, slice]] | None = None
    with_complete_gradient: Callable[[Any, str, Tensor], Tensor] = _as_it_is
    read_weights: Callable[[Any], dict[str, Tensor]] | None = None
    is_linear: bool = False

    def name_of_part(self, layer_name: str, part: str) -> str:
        """The name in the unsharded model of a part of the layer with this name."""
        if not part:
            return layer_name
        if part not in self.parts:
            return f"{layer_name}.{part}".lstrip(".")
        parent = layer_name.rpartition(".")[0]
        return f"{parent}.{self.parts[part]}".lstrip(".")


@dataclass(eq=False)
class LoraAdapter:
    """The state of one layer's adapter besides its factors; stored as `layer.lora`.

    Attributes:
        kind: how layers of this class are adapted.
        parts: the adapted parts of the layer, out of `kind.parts`.
        scale: factor of the branch.
        further_names: names of parameters beside the factors, for each part: the magnitudes of DoRA.
        output_of: `(layer, output, delta)`: combines the layer's output and its branch; their sum if None.
        dropout: probability of dropping an element of the branch's input.
        is_on: whether the branch is currently added.
        unmerged_weights: the layer's own weights in host memory, while merged.
    """

    kind: LayerKind
    parts: tuple[str, ...]
    scale: float
    dropout: float
    further_names: tuple[str, ...] = ()
    output_of: Callable[[Any, Any, Any], Any] | None = None
    is_on: bool = True
    unmerged_weights: dict[str, Tensor] = field(default_factory=dict)
    hooks: tuple[RemovableHandle, ...] = ()

    @property
    def is_merged(self) -> bool:
        """Whether the branch is merged into the layer's weights."""
        return bool(self.unmerged_weights)

    @property
    def is_added(self) -> bool:
        """Whether the branch is added to the layer's output: not while it is merged or off."""
        return self.is_on and not self.is_merged

    @property
    def factor_names(self) -> list[str]:
        """Names of all factors of the layer: A and B of each part, and its magnitudes."""
        names = (*self.kind.factor_names, *self.further_names)
        return [factor_name(name, part) for part in self.parts for name in names]


def factor_name(name: str, part: str) -> str:
    """The parameter name of the factor `name` (A or B) of a part of a layer."""
    return f"{name}_{part}" if part else name


def attach(layer: nn.Module, kind: LayerKind, parts: Mapping[str, int], config: LoraConfig) -> None:
    """Give parts of `layer` their factors, and the layer its branch."""
    adapter = LoraAdapter(kind, tuple(parts), config.scale, config.lora_dropout)
    layer.lora = adapter  # type: ignore[assignment]
    for part, seed in parts.items():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            kind.add_factors(layer, config, part)
    if kind.output_delta is not None:
        # Before existing hooks: a hook that splits a model, such as a sum over ranks, must include the branch.
        adapter.hooks = (layer.register_forward_hook(_add_branch, with_kwargs=True, prepend=True),)
    else:
        adapter.hooks = (
            layer.register_forward_pre_hook(_put_weights),
            layer.register_forward_hook(_take_weights, always_call=True),
        )


def detach(layer: nn.Module) -> None:
    """Remove factors and branch; merged weights stay merged."""
    adapter = require_adapter(layer)
    for hook in adapter.hooks:
        hook.remove()
    for name in adapter.factor_names:
        delattr(layer, name)
    del layer.lora


def adapter_of(layer: nn.Module) -> LoraAdapter | None:
    """The layer's adapter, if it has one."""
    adapter = getattr(layer, "lora", None)
    return adapter if isinstance(adapter, LoraAdapter) else None


def require_adapter(layer: nn.Module) -> LoraAdapter:
    """The adapter of a layer that has one."""
    adapter = adapter_of(layer)
    assert adapter is not None, f"{type(layer).__name__} has no adapter"
    return adapter


def scale_of(layer: nn.Module) -> float:
    """The scale of an adapted layer's branch."""
    return require_adapter(layer).scale


def adapted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Layers with an adapter, by name."""
    return {name: layer for name, layer in module.named_modules() if adapter_of(layer) is not None}


def make_factor(
    weight: nn.Parameter, weight_dim: int, *, lora_rank: int, rank_dim: int, sequence_parallel: bool
) -> nn.Parameter:
    """Make one factor, not yet filled, that meets `weight` along `weight_dim`.

    Args:
        weight: the layer's weight, which determines dtype, device and split.
        weight_dim: the dim of `weight` that the factor covers.
        lora_rank: length of the factor's other dim.
        rank_dim: index of that other dim: 0 for A, 1 for B.
        sequence_parallel: whether the layer is at the border of a sequence-parallel region: a whole factor then sees
            only part of the sequence, so its gradient is partial, and it is marked like norm weights.
    """
    weight_spec = get_shard_spec(weight)
    partition = get_partition(weight)
    if weight_spec is not None and partition is not None and partition.dim == weight_dim:
        spec = factor_spec(weight_spec, weight_dim, lora_rank=lora_rank, rank_dim=rank_dim)
        return empty_sharded_parameter(
            spec,
            partition_dim=1 - rank_dim,
            num_partitions=partition.num_partitions,
            stride=partition.stride,
            dtype=weight.dtype,
            device=weight.device,
        )
    shape = _shape(weight.shape[weight_dim], lora_rank, rank_dim)
    factor = empty_parameter(shape, weight.dtype, weight.device)
    mark_sequence_parallel(factor, sequence_parallel)
    return factor


def factor_spec(spec: ShardSpec, weight_dim: int, *, lora_rank: int, rank_dim: int, name: str = "") -> ShardSpec:
    """Return the split of a weight along `weight_dim`, for the factor named `name` (see `ShardPiece.name`)."""
    pieces = [
        replace(
            piece,
            local=_box(piece.local, weight_dim, lora_rank, rank_dim),
            logical=_box(piece.logical, weight_dim, lora_rank, rank_dim),
            logical_shape=_shape(piece.logical_shape[weight_dim], lora_rank, rank_dim),
            name=name,
        )
        for piece in spec.pieces
    ]
    return ShardSpec(_shape(spec.local_shape[weight_dim], lora_rank, rank_dim), tuple(pieces), spec.axis)


def fill_factor(factor: nn.Parameter, logical_length: int, *, rank_dim: int, init_method: InitMethod) -> None:
    """Draw the values of a factor whose covered dim has `logical_length` elements over all ranks."""
    shape = _shape(logical_length, factor.shape[rank_dim], rank_dim)
    spec = get_shard_spec(factor) or shard_along(shape, 0, rank=0, size=1)
    fill_from_logical(factor, spec, shape, init_method)


def _shape(length: int, lora_rank: int, rank_dim: int) -> tuple[int, int]:
    return (lora_rank, length) if rank_dim == 0 else (length, lora_rank)


def _box(box: Box, weight_dim: int, lora_rank: int, rank_dim: int) -> Box:
    offset, length = box.offset[weight_dim], box.shape[weight_dim]
    return Box((0, offset) if rank_dim == 0 else (offset, 0), _shape(length, lora_rank, rank_dim))


def factor(layer: nn.Module, index: int, part: str = "") -> Tensor:
    """A (index 0) or B (index 1) of a part of an adapted layer, as its branch reads it: padding gets no gradient."""
    name = factor_name(require_adapter(layer).kind.factor_names[index], part)
    parameter: nn.Parameter = getattr(layer, name)
    spec = get_shard_spec(parameter)
    return parameter if spec is None else zero_padding_gradient(parameter, spec)


def complete_factor(layer: nn.Module, index: int) -> Tensor:
    """`factor`, for a layer that computes with its own weight, whole or split, and does not communicate itself.

    If a factor is whole and the weight is split, each rank has a part of the factor's gradient; here they are summed.
    """
    parameter = layer.get_parameter(require_adapter(layer).kind.factor_names[index])
    is_partial = get_shard_spec(parameter) is None and get_shard_spec(layer.get_parameter("weight")) is not None
    if is_partial and not is_sequence_parallel(parameter):  # the optimizer sums these
        return copy_to_tensor_model_parallel_region(parameter)
    return factor(layer, index)


def reset_branch(layer: nn.Module) -> None:
    """Make the branch of an adapted layer add nothing, as it does initially."""
    adapter = require_adapter(layer)
    name = adapter.kind.factor_names[adapter.kind.zero_factor]
    for part in adapter.parts:
        nn.init.zeros_(layer.get_parameter(factor_name(name, part)))


def product(b: Tensor, a: Tensor) -> Tensor:
    """`B A`, in float32 at least."""
    return at_least_float32(b) @ at_least_float32(a)


def _add_branch(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    """The forward hook; the layer's input is its first argument, however it is passed."""
    adapter = adapter_of(layer)
    if adapter is None or not adapter.is_added:
        return output
    input_ = args[0] if args else next(iter(kwargs.values()))
    joint = {"call": kwargs["call"]} if "call" in kwargs else {}
    assert adapter.kind.output_delta is not None, "layers of other kinds have other hooks"
    delta = adapter.kind.output_delta(layer, input_, **joint)
    if adapter.output_of is not None:
        return adapter.output_of(layer, output, delta)
    if isinstance(delta, Tensor):
        return output + delta
    return tuple(whole if part is None else whole + part for whole, part in zip(output, delta, strict=True))


def _put_weights(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook for branches in the weights: sets attributes that shadow the parameters."""
    adapter = require_adapter(layer)
    if adapter.is_added and adapter.kind.read_weights is not None:
        vars(layer).update(adapter.kind.read_weights(layer))


def _take_weights(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Remove them again, also when the forward raises."""
    for part in require_adapter(layer).parts:
        vars(layer).pop(part or "weight", None)
