"""The description of an adapter, as a JSON-able dict with the keys of PEFT's `adapter_config.json`."""

from collections.abc import Iterable, Mapping
from typing import Any

from nxd_state import active_group, all_gather_object

from nxd_lora.adapter import adapted_layers, require_adapter
from nxd_lora.config import DESCRIBED, LoraConfig
from nxd_lora.dora import MAGNITUDE
from nxd_lora.expert_weights import EXPERT_WEIGHTS, expert_weights
from nxd_lora.model import LoraModel
from nxd_lora.state import adapter_names
from nxd_lora.targets import ALL_LINEAR, adaptable_layers, expert_weights_by_module

# Entries of PEFT's file that do not affect the computation. Any other entry that is set must be supported.
_WITHOUT_EFFECT = {
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "fan_in_fan_out",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "qalora_group_size",
}
_UNDERSTOOD = {"peft_type", "r", *DESCRIBED} - {"lora_rank"}


def adapter_config(model: LoraModel, *, base_model_name_or_path: str | None = None) -> dict[str, Any]:
    """Return the description of `model`'s adapter, with the unsharded model's layer names. Called by all ranks."""
    config = model.lora_config
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model_name_or_path,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "bias": config.bias,
        "target_modules": _targets(model),
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "target_parameters": target_parameters(model) or None,
        "modules_to_save": list(config.modules_to_save) if config.modules_to_save else None,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "fan_in_fan_out": any(type(layer).__name__ == "Conv1D" for layer in adapted_layers(model.module).values()),
    }


def config_from_adapter_config(content: Mapping[str, Any]) -> LoraConfig:
    """Return the config for a description, which may be written by PEFT.

    Raises:
        ValueError: it does not describe a LoRA adapter, or uses unsupported features; lists all of them.
    """
    if content.get("peft_type") != "LORA" or "r" not in content:
        raise ValueError(
            f"not the config of a LoRA adapter: peft_type={content.get('peft_type')!r}, r={content.get('r')}"
        )
    initialization = content.get("init_lora_weights", True)
    problems = [
        f"{name}={value!r}" for name, value in content.items() if value and name not in _UNDERSTOOD | _WITHOUT_EFFECT
    ]
    if initialization not in (True, False, "gaussian"):
        problems.append(f"init_lora_weights={initialization!r}")  # it would change the base model
    if problems:
        raise ValueError(f"the adapter uses unsupported features: {', '.join(problems)}")
    return LoraConfig(
        lora_rank=content["r"],
        lora_alpha=content.get("lora_alpha", 8),
        lora_dropout=content.get("lora_dropout", 0.0),
        bias=content.get("bias", "none"),
        target_modules=content.get("target_modules") or None,
        target_parameters=content.get("target_parameters") or None,
        use_rslora=bool(content.get("use_rslora", False)),
        use_dora=bool(content.get("use_dora", False)),
        modules_to_save=content.get("modules_to_save"),
        init_lora_weights="gaussian" if initialization == "gaussian" else "default",
    )


def check_same_scale(model: LoraModel, saved: LoraConfig, source: str) -> None:
    """Check that factors from `source`, described by `saved`, have the same effect in `model`.

    Raises:
        ValueError: the rank or the scale differs; names both values.
    """
    own = model.lora_config
    differing = [
        f"{name}={getattr(saved, name)!r} in the adapter, {getattr(own, name)!r} in the model"
        for name in ("lora_rank", "lora_alpha", "use_rslora", "use_dora")
        if getattr(saved, name) != getattr(own, name)
    ]
    if differing:
        raise ValueError(
            f"the adapter in {source} has another rank or scale than this model: {'; '.join(differing)}; wrap the "
            "model with the adapter's values"
        )


def check_tensors(config: LoraConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Check that the tensors of an adapter match its config.

    Args:
        config: the adapter's config.
        shapes: shapes by logical name; experts as whole tensors, `[experts, ., .]`, or as PEFT stores them. May include
            tensors of the model.
        source: where both come from, for errors.

    Raises:
        ValueError: the rank or the trained tensors differ from the config, so the adapter would get another scale.
    """
    problems = [
        f"{name} has shape {list(shape)}, which does not match r={config.lora_rank}"
        for name, shape in shapes.items()
        if not _has_rank(name.rpartition(".")[2], shape, config.lora_rank)
    ]
    magnitudes = [name for name in shapes if name.rpartition(".")[2].startswith(MAGNITUDE)]
    if bool(magnitudes) != config.use_dora:
        has = f"has {magnitudes[0]}" if magnitudes else f"has no {MAGNITUDE}"
        problems.append(f"it {has}, but use_dora={config.use_dora}")
    layers = {name.rpartition(".")[0] for name in shapes if name.rpartition(".")[2] in FACTOR_RANK_DIMS}
    targets = () if isinstance(config.target_modules, str) else config.target_modules or ()
    if targets and list(targets) != [ALL_LINEAR] and not config.target_parameters:
        unnamed = sorted(layer for layer in layers if not any(f".{target}." in f".{layer}." for target in targets))
        problems += [f"it has factors for {layer}, which target_modules does not name" for layer in unnamed[:1]]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"the adapter's config does not fit its tensors ({source}): {'; '.join(problems[:3])}{more}; use the "
            "config that was saved with them"
        )


# The dim of each factor that has the adapter's rank, by the factor's name in the unsharded model.
FACTOR_RANK_DIMS = {"lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}
_EXPERT_RANK_DIMS = {"lora_A_": 1, "lora_B_": 2}


def _has_rank(factor: str, shape: tuple[int, ...], rank: int) -> bool:
    """Whether a tensor has this rank; True if it is not a factor. PEFT stores multiples of it for experts."""
    if factor in FACTOR_RANK_DIMS:
        return len(shape) >= 2 and shape[FACTOR_RANK_DIMS[factor]] == rank
    dim = next((dim for start, dim in _EXPERT_RANK_DIMS.items() if factor.startswith(start)), None)
    return dim is None or (len(shape) == 3 and shape[dim] == rank)


def adapted_logical_layers(model: LoraModel) -> set[str]:
    """Names of the adapted layers in the unsharded model, of all pipeline stages. Called by all ranks."""
    of_experts = adapted_weights(model)
    names = {name.rpartition(".")[0] for name in adapter_names(model, with_biases=False)} - set(of_experts)
    return set().union(*all_gather_object(names, active_group("pp")))


def adapted_weights(model: LoraModel) -> dict[str, list[str]]:
    """Return the modules with adapted expert weights, and these weights in their order, of all pipeline stages.

    Called by all ranks.
    """
    here = {
        name: [it for it in expert_weights(layer) if it in require_adapter(layer).parts]
        for name, layer in adapted_layers(model.module).items()
        if require_adapter(layer).kind is EXPERT_WEIGHTS
    }
    stages: list[dict[str, list[str]]] = all_gather_object(here, active_group("pp"))
    return {name: weights for stage in stages for name, weights in stage.items()}


def target_parameters(model: LoraModel) -> list[str]:
    """Return the last parts of the names of adapted weights where these are unique, whole names elsewhere."""
    adapted = {f"{layer}.{it}".lstrip(".") for layer, weights in adapted_weights(model).items() for it in weights}
    known = {
        f"{layer}.{it}".lstrip(".") for layer, them in expert_weights_by_module(model.module).items() for it in them
    }
    return _short_names(adapted, known, num_parts=2)


def _targets(model: LoraModel) -> list[str]:
    """Return the last parts of the adapted layers' names where these are unique, whole names elsewhere.

    PEFT and this package find the same layers from them, whatever the user wrote.
    """
    adapted = adapted_logical_layers(model)
    modules = {name for name, _ in model.module.named_modules()} | set(adaptable_layers(model.module))
    return _short_names(adapted, modules, num_parts=1)


def _short_names(adapted: set[str], known: set[str], *, num_parts: int) -> list[str]:
    """Return the last parts of names where no other known name on any stage ends in them, whole names elsewhere."""
    others = set().union(*all_gather_object(known, active_group("pp"))) - adapted
    targets: set[str] = set()
    for end in {".".join(name.split(".")[-num_parts:]) for name in adapted}:
        targets |= _ending_in(end, adapted) if _ending_in(end, others) else {end}
    return sorted(targets)


def _ending_in(end: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if f".{name}".endswith(f".{end}")}
