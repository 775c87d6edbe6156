"""`LoraModel`: a model with adapters on some of its layers; only the adapters train.

Adapters are merged in float32 (or float64) and rounded once to the weight's dtype. Rounding cannot be undone by
subtracting, so the layer's own weights are kept in host memory while merged: unmerging restores every bit.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from nxd_layers.sharded_linear import ShardedLinear
from nxd_state import (
    active_group,
    all_gather_object,
    at_least_float32,
    get_shard_spec,
    model_parallel_is_initialized,
    ranks_run,
    seed_of_module,
    whole_parameters,
)
from torch import Tensor, nn

from nxd_lora.adapter import adapted_layers, attach, detach, require_adapter, reset_branch
from nxd_lora.config import LoraConfig
from nxd_lora.dora import MAGNITUDE, add_magnitudes, gains_of, reset_magnitudes, scale_rows, with_magnitudes
from nxd_lora.targets import TargetLayers, find_target_layers, is_saved_module, kind_of_target


class LoraModel(nn.Module):
    """Adds adapters to the target layers of a model, in place, and freezes everything else.

    Fused expert weights have adapters of their own, see `LoraConfig.target_parameters`: `lora_A_gate_up_proj`
    `[experts, r, in]` and `lora_B_gate_up_proj` `[experts, out, r]`. Each rank has those of its experts.

    Plain linear layers, embeddings and `Conv2d`, Hugging Face's `Conv1D` and the parallel layers of nxd-layers can be
    adapted. Layers keep their class and place, so names of their parameters do not change. The factors are parameters
    beside `weight`: `lora_A` `[r, in]` and `lora_B` `[out, r]`, or `lora_embedding_A` and `lora_embedding_B`. On
    several ranks each is split like its layer's weight, or whole. A `GQAQKVColumnParallelLinear` counts as the three
    layers `q_proj`, `k_proj` and `v_proj` beside it, each with its own adapter (`lora_A_q`, ...), for targets and for
    checkpoints; its own name selects all three.

    After backward all gradients are complete, except those of whole factors at the border of a sequence-parallel
    region: like norm weights, these are marked `sequence_parallel_enabled` for the optimizer to sum.

    With `use_dora` a layer also has magnitudes. Modules of `modules_to_save` are trained in full.

    Initial values depend on torch's seed and the names of the layers in the unsharded model, not on the layout. If
    ranks hold parts of the model, all of them wrap it, and the first rank's seed is used.

    Build the model, load or pad its weights and move it first, then wrap it. Attributes that this class does not have
    are those of the wrapped model (`config`, `dtype`, `generate`).

    Args:
        module: the model, or a pipeline rank's part of it, under the names of the whole.
        config: the settings; `enable_lora=False` leaves the model unchanged.
        layers: the result of `find_target_layers` on the whole model, if `module` is a part of it; found here if None.

    Attributes:
        module: the same model, with adapters.
        lora_config: the config.

    Raises:
        ValueError: a target names nothing that can be adapted; the model has adapters already.
    """

    def __init__(self, module: nn.Module, config: LoraConfig, *, layers: TargetLayers | None = None) -> None:
        super().__init__()
        self.module = module
        self.lora_config = config
        self._trained_before = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        if config.enable_lora:
            self._add_adapters(find_target_layers(module, config) if layers is None else layers)
        if config.lora_verbose and (not model_parallel_is_initialized() or _world_rank() == 0):
            print(self.summary())

    def _add_adapters(self, targets: TargetLayers) -> None:
        seed = self._seed_of_stage()
        self.module.requires_grad_(False)
        for name, layer in list(self.module.named_modules()):
            kind = kind_of_target(layer)
            if name in targets and kind is not None:  # stages have placeholders for the layers of other stages
                seeds = {part: seed_of_module(seed, kind.name_of_part(name, part)) for part in targets[name]}
                attach(layer, kind, seeds, self.lora_config)
                if self.lora_config.use_dora:
                    adapter = require_adapter(layer)
                    with whole_parameters(layer.parameters()):
                        add_magnitudes(layer)
                    adapter.further_names, adapter.output_of = (MAGNITUDE,), with_magnitudes
        for parameter in (self._trained_biases() | self._saved_modules()).values():
            parameter.requires_grad_(True)

    def _seed_of_stage(self) -> int:
        """Draw a seed from torch's generator; if several ranks hold parts of the model, the first one's."""
        seed = int(torch.randint(2**62, (), device="cpu"))
        if ranks_run() and any(get_shard_spec(parameter) is not None for parameter in self.module.parameters()):
            for axes in (("tp",), ("dp", "cp")):
                seed = all_gather_object(seed, active_group(*axes))[0]
        return seed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)

    @property
    def is_merged(self) -> bool:
        """Whether the adapters are currently merged into the weights."""
        return any(require_adapter(layer).is_merged for layer in adapted_layers(self.module).values())

    def merge(self) -> None:
        """Add the adapters to the weights, so that they cost nothing at inference. All ranks call it; not for training.

        The layers' own weights are kept in host memory meanwhile.

        Raises:
            ValueError: an adapted weight is tied to another layer's.
        """
        merge_adapters(self.module)

    def unmerge(self) -> None:
        """Undo `merge`: every weight is restored bit for bit."""
        unmerge_adapters(self.module)

    def reset(self) -> None:
        """Unmerge and reinitialize the adapters, so that they add nothing, as in a newly wrapped model."""
        self.unmerge()
        for layer in adapted_layers(self.module).values():
            with whole_parameters(layer.parameters(), changed=True):
                reset_branch(layer)
        self.reset_magnitudes()

    def merge_and_unload(self) -> nn.Module:
        """Return the plain model with the adapters in its weights; what trained before wrapping trains again."""
        self.merge()
        return self._detach_all()

    def unload(self) -> nn.Module:
        """Return the plain model as before wrapping, except for trained biases."""
        self.unmerge()
        return self._detach_all()

    def _detach_all(self) -> nn.Module:
        for layer in adapted_layers(self.module).values():
            detach(layer)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in self._trained_before)
        return self.module

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters, by name in the wrapped model: the factors, and all others that train."""
        return self.factors() | self._trained_biases() | self._saved_modules()

    def factors(self) -> dict[str, nn.Parameter]:
        """A, B and the magnitudes of every adapted layer, by their names in the wrapped model."""
        return {
            f"{name}.{factor}" if name else factor: layer.get_parameter(factor)
            for name, layer in adapted_layers(self.module).items()
            for factor in require_adapter(layer).factor_names
        }

    def _trained_biases(self) -> dict[str, nn.Parameter]:
        mode = self.lora_config.bias
        if mode == "none":
            return {}
        if mode == "all":
            named = dict(self.module.named_parameters(remove_duplicate=False))
            return {name: p for name, p in named.items() if re.match(r"bias(_|$)", name.rpartition(".")[2])}
        return {
            f"{owner}.{name}" if owner else name: layer.get_parameter(name)
            for owner, layer in adapted_layers(self.module).items()
            for name in require_adapter(layer).kind.bias_names(layer, require_adapter(layer).parts)
        }

    def _saved_modules(self) -> dict[str, nn.Parameter]:
        """The parameters of `modules_to_save`."""
        named = self.module.named_parameters()
        return {name: parameter for name, parameter in named if is_saved_module(name, self.lora_config)}

    def reset_magnitudes(self) -> None:
        """With DoRA, set the magnitudes from the weights, for example after loading them. Called on all ranks."""
        if self.lora_config.use_dora:
            for layer in adapted_layers(self.module).values():
                with whole_parameters(layer.parameters(), changed=True):
                    reset_magnitudes(layer)

    def summary(self) -> str:
        """One line: how many layers are adapted, and how many of this rank's parameters train."""
        layers = adapted_layers(self.module)
        last_parts = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers)) or "none"
        total = sum(parameter.numel() for parameter in self.module.parameters())
        trained = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        return f"LoRA: {len(layers)} layers adapted ({last_parts}); {trained:,} of {total:,} parameters train"


def _world_rank() -> int:
    return active_group("pp", "dp", "cp", "tp").rank


@torch.no_grad()
def merge_adapters(module: nn.Module) -> None:
    """Add each adapter's product to its layer's weights. Merged layers are skipped."""
    layers = [layer for layer in adapted_layers(module).values() if not require_adapter(layer).is_merged]
    _check_not_tied(module, layers)
    for layer in layers:
        with whole_parameters(layer.parameters(), changed=True):
            _merge(layer)


def _merge(layer: nn.Module) -> None:
    adapter = require_adapter(layer)
    gains = gains_of(layer) if adapter.further_names else {}
    unmerged = {}
    for name, delta in adapter.kind.weight_deltas(layer).items():
        weight = layer.get_parameter(name)
        unmerged[name] = weight.to("cpu", copy=True)
        whole = at_least_float32(weight) + delta
        scale_rows(layer, name, whole, gains)
        weight.copy_(whole)
    adapter.unmerged_weights = unmerged


@torch.no_grad()
def unmerge_adapters(module: nn.Module) -> None:
    """Restore the weights of all merged layers, bit for bit."""
    for name, layer in adapted_layers(module).items():
        is_quantized = isinstance(layer, ShardedLinear) and layer.scale is not None
        if require_adapter(layer).is_merged and is_quantized:
            raise ValueError(
                f"{name} was quantized with its adapter merged, which cannot be undone; keep the float model"
            )
    for layer in adapted_layers(module).values():
        adapter = require_adapter(layer)
        if not adapter.unmerged_weights:
            continue
        with whole_parameters(layer.parameters(), changed=True):
            for name, weight in adapter.unmerged_weights.items():
                layer.get_parameter(name).copy_(weight)
        adapter.unmerged_weights = {}


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Run the block with the base model; modules that train besides the factors keep their values."""
    adapters = [require_adapter(layer) for layer in adapted_layers(module).values()]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _check_not_tied(module: nn.Module, layers: list[nn.Module]) -> None:
    names_of: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    own = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
    tied = dict.fromkeys(" and ".join(names_of[weight]) for weight in own if len(names_of[weight]) > 1)
    if tied:
        raise ValueError(
            f"{'; '.join(tied)} are one tied weight: merging an adapter into it would also change the other layer. "
            "Untie them first (give each its own copy), or keep the adapter unmerged"
        )
