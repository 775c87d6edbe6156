"""What may stand in a training config: its keys, their defaults, and every mistake in one given."""

import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from nxd_layers.lora import LoraConfig
from nxd_optim import resolve_mixed_precision
from nxd_pipeline import NxDPPModel
from torch import nn

DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(DEGREES, 1),
    "pipeline_config": None,
    "optimizer_config": None,
    "activation_checkpoint_config": None,
    "pad_model": False,
    "sequence_parallel": False,
    "model_init_config": None,
    "lora_config": None,
    "mixed_precision_config": None,
}
OPTIMIZER_DEFAULTS: dict[str, Any] = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
MODEL_INIT_DEFAULTS: dict[str, Any] = {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None}
LARGEST_MOVE_FACTOR = 32

_LISTS_IN_PIPELINE = ("pipeline_cuts", "input_names", "leaf_module_cls", "autowrap_functions", "autowrap_modules")


def complete_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """A new config with all keys, checked; what is complete already comes out equal.

    Args:
        given: any of the keys; also a config that a script has changed since it was made. It is left as it is. For a
            bool, 0 and 1 will do, which many scripts have from their command line.

    Raises:
        ValueError: every mistake, in one error.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"nxd_config={given!r} is no config; give what neuronx_distributed_config returned")
    mistakes = _unknown_keys("", given, DEFAULTS)
    config = DEFAULTS | _with_bools({key: value for key, value in given.items() if key in DEFAULTS}, DEFAULTS)
    for name, defaults in (("optimizer_config", OPTIMIZER_DEFAULTS), ("model_init_config", MODEL_INIT_DEFAULTS)):
        config[name] = _section(name, config[name], defaults, mistakes)
    if config["pipeline_config"] is not None:
        config["pipeline_config"] = _section("pipeline_config", config["pipeline_config"], {}, mistakes)
    mistakes += _mistakes_at_the_top(config)
    mistakes += _mistakes_in_optimizer(config["optimizer_config"])
    mistakes += _mistakes_in_model_init(config)
    mistakes += _mistakes_in_pipeline(config)
    config["mixed_precision_config"] = _mixed_precision(config, mistakes)
    if mistakes:
        raise ValueError("neuronx_distributed_config: " + "; ".join(mistakes))
    return config


@cache
def pipeline_arguments() -> dict[str, Any]:
    """The keys of `pipeline_config` with their defaults: the arguments of `NxDPPModel`."""
    parameters = inspect.signature(NxDPPModel).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "module"}


def param_init_fn_of(config: Mapping[str, Any]) -> Any:
    """The function that fills parameters, which may stand in either of two sections; None if it is in neither."""
    return (config["pipeline_config"] or {}).get("param_init_fn") or config["model_init_config"]["param_init_fn"]


def _section(name: str, value: Any, defaults: Mapping[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """A copy of a section with its defaults; what it may not hold goes to `mistakes`."""
    if value is not None and not isinstance(value, Mapping):
        mistakes.append(f"{name}={value!r} must be a dict")
        value = None
    given = dict(value or {})
    known = defaults or pipeline_arguments()
    mistakes += _unknown_keys(f"{name}: ", given, known)
    return dict(defaults) | _with_bools(given, known)


def _with_bools(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The same with 0 and 1 as bools where a bool is the default."""

    def as_bool(key: str, value: Any) -> Any:
        is_bool = isinstance(defaults.get(key), bool) and type(value) is int and value in (0, 1)
        return bool(value) if is_bool else value

    return {key: as_bool(key, value) for key, value in given.items()}


def _unknown_keys(where: str, given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    mistakes = []
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            mistakes.append(f"{where}unknown key {key!r}; {hint}")
    return mistakes


def _mistakes_at_the_top(config: Mapping[str, Any]) -> list[str]:
    mistakes = [m for name in DEGREES for m in _not_positive(name, config[name])]
    mistakes += [m for name in ("pad_model", "sequence_parallel") for m in _not_bool(name, config[name])]
    lora = config["lora_config"]
    if lora is not None and not isinstance(lora, LoraConfig):
        mistakes.append(f"lora_config={lora!r} must be a LoraConfig of neuronx_distributed.modules.lora, or None")
    return mistakes + _mistakes_in_checkpointing(config["activation_checkpoint_config"])


def _mistakes_in_checkpointing(chosen: Any) -> list[str]:
    mistakes = []
    for part in chosen if isinstance(chosen, list | tuple) else [chosen]:
        if isinstance(part, str):
            if part != "full" and difflib.get_close_matches(part.lower(), ["full"], cutoff=0.7):
                mistakes.append(f"activation_checkpoint_config={part!r} is not known; did you mean 'full'?")
        elif chosen is not None and not (isinstance(part, type) and issubclass(part, nn.Module)):
            mistakes.append(
                f"activation_checkpoint_config={part!r} must be 'full', None, or a module class (no object of it)"
            )
    return mistakes


def _mistakes_in_optimizer(section: Mapping[str, Any]) -> list[str]:
    where = "optimizer_config: "
    mistakes = [m for key in ("zero_one_enabled", "grad_clipping") for m in _not_bool(where + key, section[key])]
    norm = section["max_grad_norm"]
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0:
        mistakes.append(f"{where}max_grad_norm={norm!r} must be a positive number; grad_clipping=False ends clipping")
    return mistakes


def _mistakes_in_model_init(config: Mapping[str, Any]) -> list[str]:
    section: Mapping[str, Any] = config["model_init_config"]
    where = "model_init_config: "
    mistakes = _not_bool(f"{where}meta_device_init", section["meta_device_init"])
    factor = section["sequential_move_factor"]
    if isinstance(factor, bool) or not isinstance(factor, int) or not 1 <= factor <= LARGEST_MOVE_FACTOR:
        mistakes.append(f"{where}sequential_move_factor={factor!r} must be an integer from 1 to {LARGEST_MOVE_FACTOR}")
    fill = param_init_fn_of(config)
    if fill is not None and not callable(fill):
        mistakes.append(f"param_init_fn={fill!r} must be a function that fills the parameters of a module")
    if section["meta_device_init"] is True and fill is None:
        mistakes.append(f"{where}meta_device_init=True needs param_init_fn, which fills a module's own parameters")
    return mistakes


def _mistakes_in_pipeline(config: Mapping[str, Any]) -> list[str]:
    section, stages = config["pipeline_config"], config["pipeline_parallel_size"]
    if section is None:
        if stages == 1 or _not_positive("", stages):
            return []
        return [
            f"pipeline_parallel_size={stages} needs pipeline_config, such as {{'num_microbatches': 4, "
            "'transformer_layer_cls': ..., 'auto_partition': True}"
        ]
    where = "pipeline_config: "
    mistakes = []
    for key, default in pipeline_arguments().items():
        if key in section and isinstance(default, bool):
            mistakes += _not_bool(where + key, section[key])
        elif key in section and isinstance(default, int):
            mistakes += _not_positive(where + key, section[key])
    mistakes += [m for key in _LISTS_IN_PIPELINE for m in _not_list(where + key, section.get(key))]
    for pair in (("pipeline_cuts", "auto_partition"), ("return_mb_loss", "broadcast_and_average_loss")):
        if all(section.get(key) for key in pair):
            mistakes.append(f"{where}{pair[0]} and {pair[1]} exclude each other; choose one")
    if not mistakes:
        mistakes += _wrong_number_of_cuts(section, stages)
    return mistakes


def _wrong_number_of_cuts(section: Mapping[str, Any], stages: Any) -> list[str]:
    cuts, virtual = section.get("pipeline_cuts"), section.get("virtual_pipeline_size", 1)
    if not cuts or _not_positive("", stages) or len(cuts) == stages * virtual - 1 or stages * virtual == 1:
        return []
    return [
        f"pipeline_config: {len(cuts)} pipeline_cuts make {len(cuts) + 1} stages; pipeline_parallel_size={stages} "
        f"times virtual_pipeline_size={virtual} needs {stages * virtual - 1} cuts"
    ]


def _mixed_precision(config: Mapping[str, Any], mistakes: list[str]) -> dict[str, Any]:
    given = config["mixed_precision_config"]
    if given is not None and not isinstance(given, Mapping):
        mistakes.append(f"mixed_precision_config={given!r} must be a dict")
        return {}
    chosen = _with_bools(given or {}, dict.fromkeys(given or {}, False))
    try:
        zero_one_enabled = config["optimizer_config"]["zero_one_enabled"] is True
        return asdict(resolve_mixed_precision(chosen, zero_one_enabled=zero_one_enabled))
    except ValueError as error:
        mistakes.append(str(error))
        return {}


def _not_bool(name: str, value: Any) -> list[str]:
    return [] if isinstance(value, bool) else [f"{name}={value!r} must be True or False"]


def _not_list(name: str, value: Any) -> list[str]:
    is_list = value is None or (isinstance(value, Collection) and not isinstance(value, str))
    return [] if is_list else [f"{name}={value!r} must be a list"]


def _not_positive(name: str, value: Any) -> list[str]:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return [] if is_count else [f"{name}={value!r} must be an integer, 1 or more"]
