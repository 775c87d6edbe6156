"""`LoraAdapter`: adds a low-rank branch to an ordinary layer, in place, and removes it again.

The layer stays the same object, with its class, its place and its parameters' names; it gets two more parameters, the
factors, and a forward hook that adds their product to its output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from nxd_layers.mappings import copy_to_tensor_model_parallel_region
from nxd_layers.padding.gradient import zero_padding_gradient
from nxd_state import get_shard_spec
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
        factor_names: what A and B are called; PEFT's names, so that its files need only a prefix.
        add_factors: `(layer, config, part)`: registers the factors of a part with the layer and fills them.
        output_delta: `(layer, input)`: what the branch adds to the layer's output; if that is several tensors, one for
            each, or None. `call=` comes with it from `column_parallel_linears`. None where the branch is in what the
            layer reads, see `read_weights`.
        weight_deltas: `(layer)`: what merging adds to the layer's weights, by parameter name; `widened`.
        zero_factor: which of the two starts at zero, so that the branch adds nothing at first.
        parts: where a layer holds several layers of the unsharded model, which are adapted one by one: their names,
            beside the layer in its parent, by the ending of their factors' names. Empty where parts are parameters of
            the layer, by their own names.
        bias_names: `(layer, parts)`: the biases of these parts; a ValueError if they cannot train without others.
        rows: `(layer, part)`: the weight `[out, in]` of a part: a parameter's name, and which of its rows; None where
            outputs are no rows, so that there is no DoRA.
        with_complete_gradient: `(layer, part, values)`: values for each row, whose gradient is that of all ranks that
            have copies of the row.
        read_weights: `(layer)`: what the layer's parameters read as in its forward, by name, with the branch in them.
        is_linear: "all-linear" means layers of this kind.
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
    """The state of one layer's adapter besides its factors; the layer has it as `layer.lora`.

    Attributes:
        kind: how layers of this class are adapted.
        parts: which parts of the layer are, out of `kind.parts`.
        scale: what the branch is multiplied by.
        further_names: of parameters beside the factors, for each part: the magnitudes of DoRA.
        output_of: `(layer, output, delta)`: puts the layer's output and its branch together; their sum if None.
        dropout: probability to drop an element of the branch's input.
        is_on: whether the branch is added at the moment.
        unmerged_weights: while merged, the layer's own weights, in host memory.
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
        """Whether the layer's weights contain the branch."""
        return bool(self.unmerged_weights)

    @property
    def is_added(self) -> bool:
        """Whether the layer's output gets the branch: not while it is merged, or off."""
        return self.is_on and not self.is_merged

    @property
    def factor_names(self) -> list[str]:
        """Of all factors that the layer has: A and B of each part, and its magnitudes."""
        names = (*self.kind.factor_names, *self.further_names)
        return [factor_name(name, part) for part in self.parts for name in names]


def factor_name(name: str, part: str) -> str:
    """The parameter that is A or B, called `name`, of a part of a layer."""
    return f"{name}_{part}" if part else name


def attach(layer: nn.Module, kind: LayerKind, parts: Mapping[str, int], config: LoraConfig) -> None:
    """Give parts of `layer` their factors, and the layer its branch.

    Args:
        layer: has no adapter.
        kind: how layers of its class are adapted.
        parts: those to adapt, with the seed of each one's random values.
        config: rank, scale and initialisation.
    """
    adapter = LoraAdapter(kind, tuple(parts), config.scale, config.lora_dropout)
    layer.lora = adapter  # type: ignore[assignment]
    for part, seed in parts.items():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            kind.add_factors(layer, config, part)
    if kind.output_delta is not None:
        # Before hooks that are there: what splits a model by hooks, such as a sum over ranks, means the branch, too.
        adapter.hooks = (layer.register_forward_hook(_add_branch, with_kwargs=True, prepend=True),)
    else:
        adapter.hooks = (
            layer.register_forward_pre_hook(_put_weights),
            layer.register_forward_hook(_take_weights, always_call=True),
        )


def detach(layer: nn.Module) -> None:
    """Take factors and branch away again; what is merged stays merged."""
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
    """The factor of an adapted layer's branch."""
    return require_adapter(layer).scale


def adapted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Layers with an adapter, by name."""
    return {name: layer for name, layer in module.named_modules() if adapter_of(layer) is not None}


def factor(layer: nn.Module, index: int, part: str = "") -> Tensor:
    """A (0) or B (1) of a part of an adapted layer, as its branch reads it: padding gets no gradient."""
    name = factor_name(require_adapter(layer).kind.factor_names[index], part)
    parameter: nn.Parameter = getattr(layer, name)
    spec = get_shard_spec(parameter)
    return parameter if spec is None else zero_padding_gradient(parameter, spec)


def complete_factor(layer: nn.Module, index: int) -> Tensor:
    """`factor`, for a layer that computes with the weight it has, whole or split, and does not communicate itself.

    A factor that is whole where the weight is split gets a part of its gradient on each rank; here they are summed.
    """
    parameter = layer.get_parameter(require_adapter(layer).kind.factor_names[index])
    is_partial = get_shard_spec(parameter) is None and get_shard_spec(layer.get_parameter("weight")) is not None
    if is_partial and not getattr(parameter, "sequence_parallel_enabled", False):  # which the optimizer sums
        return copy_to_tensor_model_parallel_region(parameter)
    return factor(layer, index)


def reset_branch(layer: nn.Module) -> None:
    """Make the branch of an adapted layer add nothing, as at first."""
    adapter = require_adapter(layer)
    name = adapter.kind.factor_names[adapter.kind.zero_factor]
    for part in adapter.parts:
        nn.init.zeros_(layer.get_parameter(factor_name(name, part)))


def widened(tensor: Tensor) -> Tensor:
    """In float32 if the dtype is shorter."""
    return tensor.float() if tensor.itemsize < 4 else tensor


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
    """The forward pre-hook where the branch is in what the layer reads: attributes that go before its parameters."""
    adapter = require_adapter(layer)
    if adapter.is_added and adapter.kind.read_weights is not None:
        vars(layer).update(adapter.kind.read_weights(layer))


def _take_weights(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Takes them away again, also where the forward raises."""
    for part in require_adapter(layer).parts:
        vars(layer).pop(part or "weight", None)
