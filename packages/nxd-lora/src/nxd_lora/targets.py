"""Finds the layers that get adapters: those of adaptable classes that `target_modules` names."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.hf.head_linears import CopiedHeadsLinear
from nxd_layers.hf.transformers_models import is_conv1d, output_embeddings
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_state import find_towers
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nxd_lora.adapter import LayerKind, adapted_layers
from nxd_lora.config import LoraConfig
from nxd_lora.embedding import PARALLEL_EMBEDDING, PLAIN_EMBEDDING
from nxd_lora.expert_weights import EXPERT_WEIGHTS, expert_weights
from nxd_lora.linear import COLUMN_PARALLEL_LINEAR, PLAIN_CONV2D, PLAIN_LINEAR, ROW_PARALLEL_LINEAR, TRANSPOSED_LINEAR
from nxd_lora.qkv import COPIED_HEADS_LINEAR, QKV_LINEAR
from nxd_lora.subclasses import check_forward, kind_for_forward

_KINDS: tuple[tuple[type[nn.Module], LayerKind], ...] = (
    (ColumnParallelLinear, COLUMN_PARALLEL_LINEAR),
    (RowParallelLinear, ROW_PARALLEL_LINEAR),
    (GQAQKVColumnParallelLinear, QKV_LINEAR),
    (CopiedHeadsLinear, COPIED_HEADS_LINEAR),
    (ParallelEmbedding, PARALLEL_EMBEDDING),
    (nn.Linear, PLAIN_LINEAR),
    (nn.Embedding, PLAIN_EMBEDDING),
    (nn.Conv2d, PLAIN_CONV2D),
)


def layer_kind_of(layer: nn.Module) -> LayerKind | None:
    """Return how a layer is adapted; None if it cannot be."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return None  # the output layer of nn.MultiheadAttention, which reads its weight and never calls it
    if is_conv1d(layer):
        return kind_for_forward(layer, TRANSPOSED_LINEAR)
    kind = next((kind for layer_class, kind in _KINDS if isinstance(layer, layer_class)), None)
    return None if kind is None else kind_for_forward(layer, kind)


def kind_of_target(layer: nn.Module) -> LayerKind | None:
    """Return the same, or how the expert weights of a module are adapted."""
    return layer_kind_of(layer) or (EXPERT_WEIGHTS if expert_weights(layer) else None)


def adaptable_layers(module: nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the layers that can have adapters, including layers of the unsharded model inside fused ones.

    Returns:
        For each layer name, in the model's order: the layer that holds it, and the parts of that layer.
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, layer in module.named_modules():
        kind = layer_kind_of(layer)
        if kind is None:
            continue
        found[name] = (name, tuple(kind.parts))
        parent = name.rpartition(".")[0]
        for part, beside in kind.parts.items():
            if part:
                found[f"{parent}.{beside}" if parent else beside] = (name, (part,))
    return found


def match_targets(
    targets: Sequence[str] | str | None,
    adaptable: Mapping[str, str],
    others: Mapping[str, str],
    weights: Mapping[str, str],
) -> list[str]:
    """Return the adaptable layers that the targets name.

    Args:
        targets: `LoraConfig.target_modules`.
        adaptable: the layers that can have adapters, by name, in the model's order: the layer that holds it, which is
            itself or a fused one. A target that names some parts of a fused layer does not name the fused layer:
            `.*v_proj` matches `qkv_proj` by chance.
        others: class of every other module, by name.
        weights: names that `target_parameters` accepts, by names that a user may mistake for modules.

    Returns:
        Names, in the model's order.

    Raises:
        ValueError: no targets are given, or one of them names no adaptable layer; lists the layers.
    """
    names = list(adaptable)
    last_parts = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or "none"
    if targets is None:
        raise ValueError(f"target_modules is not set; this model has these layers that can be adapted: {last_parts}")
    patterns = [targets] if isinstance(targets, str) else sorted(targets)
    problems = []
    found: set[str] = set()
    for target in patterns:
        is_regex = isinstance(targets, str)
        matched = {name for name in names if _matches(target, name, is_regex)}
        matched -= {adaptable[name] for name in matched if adaptable[name] != name}
        if not matched:
            problems.append(_why_nothing_matches(target, names, others, weights, is_regex))
        found.update(matched)
    if problems:
        raise ValueError("target_modules: " + "; ".join(problems) + f". Layers that can be adapted: {last_parts}")
    return [name for name in names if name in found]


def _matches(target: str, name: str, is_regex: bool) -> bool:
    if is_regex:
        return re.fullmatch(target, name) is not None
    # Exact, the end of the name, or whole parts of it: all three are a run of whole parts.
    return f".{target}." in f".{name}."


def _why_nothing_matches(
    target: str, names: Sequence[str], others: Mapping[str, str], weights: Mapping[str, str], is_regex: bool
) -> str:
    fused = sorted({end for name, ends in weights.items() if _matches(target, name, is_regex) for end in ends.split()})
    if fused:
        return f"{target!r} names fused expert weights, not layers; pass target_parameters={fused}"
    kinds = sorted({kind for name, kind in others.items() if name and _matches(target, name, is_regex)})
    if kinds:
        return f"{target!r} names only {', '.join(kinds)}, which LoRA cannot adapt"
    if is_regex:
        return f"the regular expression {target!r} matches no whole name, such as {names[0] if names else 'none'!r}"
    parts = sorted({part for name in [*names, *others] for part in [name, *name.split(".")] if part})
    near = difflib.get_close_matches(target, parts, n=3)
    return f"{target!r} matches nothing" + (f" (did you mean {' or '.join(map(repr, near))}?)" if near else "")


def _weights_by_name(module: nn.Module) -> dict[str, str]:
    """Return modules with expert weights, and these weights: the ends of the names that `target_parameters` takes."""
    found = {}
    for layer, parts in expert_weights_by_module(module).items():
        ends = {part: f"{layer.rpartition('.')[2]}.{part}".lstrip(".") for part in parts}
        found[layer] = " ".join(ends.values())
        found |= {f"{layer}.{part}".lstrip("."): end for part, end in ends.items()}
    return found


ALL_LINEAR = "all-linear"
_HEADS = ("lm_head", "embed_out")  # of models that do not declare theirs


def _all_linear(module: nn.Module, names: Sequence[str], config: LoraConfig) -> list[str]:
    """Match as PEFT's "all-linear": every linear layer except the output head and modules that train themselves.

    Unlike there, the towers of a multimodal model are left as they are.
    """
    head = output_embeddings(module)
    towers = tuple(f"{path}." for path in find_towers(module))
    chosen = []
    for name in names:
        if f"{name}.".startswith(towers):
            continue
        try:
            layer = module.get_submodule(name)
        except AttributeError:  # a part of the layer that holds it
            chosen.append(name)
            continue
        is_head = layer is head or (head is None and name.rpartition(".")[2] in _HEADS)
        kind = layer_kind_of(layer)
        if kind is not None and kind.is_linear and not is_head:
            chosen.append(name)
    chosen = [name for name in chosen if not is_saved_module(name, config)]
    if not chosen:
        raise ValueError("target_modules='all-linear', but this model has no linear layer that can be adapted")
    return chosen


def is_saved_module(name: str, config: LoraConfig) -> bool:
    """Whether a module or parameter is one of `modules_to_save` or inside one."""
    return any(_is_in(saved, name) for saved in config.modules_to_save or ())


def _is_in(saved: str, name: str) -> bool:
    """Whether a name is, or is inside, one that ends in `saved`: "norm" includes "input_layernorm", as in PEFT."""
    return re.search(rf"{re.escape(saved)}(\.|$)", name) is not None


def check_saved_modules(module: nn.Module, config: LoraConfig) -> None:
    """Check that each of `modules_to_save` names parameters of a whole model that no other module uses."""
    named = dict(module.named_parameters(remove_duplicate=False))
    for saved in config.modules_to_save or ():
        if not any(_is_in(saved, name) for name in named):
            last_parts = ", ".join(dict.fromkeys(name.split(".")[-2] for name in named if "." in name))
            raise ValueError(f"modules_to_save names {saved!r}, which this model does not have; it has {last_parts}")
    trained = {id(parameter) for name, parameter in named.items() if is_saved_module(name, config)}
    for name, parameter in named.items():
        if id(parameter) in trained and not is_saved_module(name, config):
            raise ValueError(
                f"modules_to_save would also train {name}, whose weight is tied; name its module as well, or remove "
                "the one it is tied to"
            )


TargetLayers = Mapping[str, tuple[str, ...]]


def find_target_layers(module: nn.Module, config: LoraConfig) -> TargetLayers:
    """Return the targets of a config in a whole model, which may be on the meta device. Changes nothing.

    Returns:
        The adapted parts of each layer, by its name: `("",)` except for fused layers; for experts the names of their
        parameters.

    Raises:
        ValueError: a target names nothing that can be adapted, the model has adapters already, or selected biases
            cannot train separately.
    """
    if adapted_layers(module):
        raise ValueError("this model already has adapters; unload() them first")
    check_saved_modules(module, config)
    layers = _target_layers(module, config) if config.target_modules or not config.target_parameters else {}
    return layers | _layers_of_target_parameters(module, config)


def _target_layers(module: nn.Module, config: LoraConfig) -> dict[str, tuple[str, ...]]:
    """Return the layers that `target_modules` selects."""
    adaptable = adaptable_layers(module)
    others = {name: type(layer).__name__ for name, layer in module.named_modules() if name not in adaptable}
    holders = {name: holder for name, (holder, _) in adaptable.items()}
    targeted: dict[str, set[str]] = {}
    wanted = config.target_modules
    if wanted == ALL_LINEAR or (wanted is not None and not isinstance(wanted, str) and list(wanted) == [ALL_LINEAR]):
        found_names = _all_linear(module, list(adaptable), config)
    else:
        found_names = match_targets(wanted, holders, others, _weights_by_name(module))
        _check_others(module, wanted, adaptable)
    for target in found_names:
        if is_saved_module(target, config):
            raise ValueError(f"target_modules and modules_to_save both name {target}; leave it out of one of them")
        holder, parts = adaptable[target]
        targeted.setdefault(holder, set()).update(parts)
    chosen: dict[str, tuple[str, ...]] = {}
    for name, found in targeted.items():
        layer = module.get_submodule(name)
        kind = layer_kind_of(layer)
        assert kind is not None, f"{name} was found among the layers that can be adapted"
        check_forward(name, layer, config)
        chosen[name] = tuple(part for part in kind.parts if part in found)
        if config.bias == "lora_only":
            kind.bias_names(layer, chosen[name])
    return chosen


def _check_others(module: nn.Module, targets: Sequence[str] | str | None, adaptable: Mapping[str, Any]) -> None:
    """Check that no target also selects modules that cannot be adapted, besides layers that can.

    A target may also match a module that contains adapted layers, and a regular expression may match activations.
    """
    refused = []
    for name, layer in module.named_modules():
        if not name or name in adaptable or any(it.startswith(f"{name}.") for it in adaptable):
            continue
        if isinstance(targets, str):
            has_own = any(True for _ in layer.parameters(recurse=False))
            is_meant = has_own and re.fullmatch(targets, name) is not None
        else:
            is_meant = any(f".{name}".endswith(f".{target}") for target in targets or ())
        if is_meant:
            refused.append(f"{name} ({type(layer).__name__})")
    if refused:
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise ValueError(
            f"target_modules={targets!r} also names {', '.join(refused[:3])}{more}, which LoRA cannot adapt; name the "
            "layers to adapt by longer parts of their names, or by a regular expression"
        )


def _layers_of_target_parameters(module: nn.Module, config: LoraConfig) -> dict[str, tuple[str, ...]]:
    """Return the layers that `target_parameters` selects; PEFT matches names or their ends."""
    weights = expert_weights_by_module(module)
    full_names = {(layer, part): f"{layer}.{part}".lstrip(".") for layer, parts in weights.items() for part in parts}
    found: dict[str, list[str]] = {}
    used = set()
    for (layer, part), name in full_names.items():
        matching = {it for it in config.target_parameters or () if f".{name}".endswith(f".{it}")}
        if matching:
            found.setdefault(layer, []).append(part)
            used |= matching
        if matching and is_saved_module(name, config):
            raise ValueError(f"target_parameters and modules_to_save both name {name}; leave it out of one of them")
    unused = [it for it in config.target_parameters or () if it not in used]
    if unused:
        known = ", ".join(_ends(full_names.values())) or "none"
        raise ValueError(
            f"target_parameters: {', '.join(map(repr, unused))} names no expert weights [experts, ., .]; this "
            f"model has {known}. Name linear layers in target_modules"
        )
    return {layer: tuple(parts) for layer, parts in found.items()}


def expert_weights_by_module(module: nn.Module) -> dict[str, list[str]]:
    """Return the modules with weights that `target_parameters` can name, and these weights."""
    return {
        name: weights
        for name, layer in module.named_modules()
        if kind_of_target(layer) is EXPERT_WEIGHTS and (weights := expert_weights(layer))
    }


def _ends(names: Iterable[str]) -> list[str]:
    """Return the last two parts of the names, without duplicates."""
    return list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))
