"""The documented training config: one dict, checked as a whole and read by the other functions of this API."""

import difflib
import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from nxd_layers.activation_checkpoint import ModuleClass
from nxd_lora import LoraConfig
from nxd_optim import MixedPrecision, resolve_mixed_precision
from nxd_pipeline import OLD_RUNTIME_FLAGS, NxDPPModel
from nxd_state import ParallelDegrees, get_mesh, initialize_mesh, model_parallel_is_initialized
from nxd_state.degrees import SIZES, expert_tensor_parallel_mistake
from torch import nn

from nxd_engine.options import Key, OptionError, Schema

_logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

OPTIMIZER_DEFAULTS: dict[str, Any] = {
    "zero_one_enabled": False,
    "grad_clipping": True,
    "max_grad_norm": 1.0,
    "zero_stage": None,
    "shard_group_size": None,
    "reshard_after_forward": None,
    "zero_offload": None,
}
MODEL_INIT_DEFAULTS: dict[str, Any] = {
    "sequential_move_factor": 11,
    "meta_device_init": False,
    "param_init_fn": None,
    "weights_are_loaded": False,
}

_BOUNDS = {"sequential_move_factor": {"at_least": 1, "at_most": 32}, "_debug_pp_rank": {"at_least": 0}}
_LISTS_IN_PIPELINE = ("pipeline_cuts", "input_names", "leaf_module_cls", "autowrap_functions", "autowrap_modules")


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: ModuleClass | Sequence[ModuleClass] | None = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: LoraConfig | None = None,
    mixed_precision_config: Mapping[str, bool] | None = None,
    *,
    activation_offload: bool = False,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    sequential_move_factor: int | None = None,
    lnc_size: int = 1,
    **unknown: Any,
) -> dict[str, Any]:
    """Return the config of a training job, the same on every rank; initialize model parallelism if needed.

    A process that was not launched as a rank cannot initialize it for several ranks. A launcher that starts them
    later, such as the Trainer of nxd_lightning, does so then; `initialize_parallel_model` raises before that.

    Args:
        tensor_parallel_size: ranks that split each layer.
        pipeline_parallel_size: pipeline stages; more than one needs a `pipeline_config`.
        pipeline_config: arguments of `nxd_pipeline.NxDPPModel`, such as `num_microbatches`, `transformer_layer_cls`,
            `pipeline_cuts` or `auto_partition`, `output_loss_value_spec` and `input_names`. They also apply without
            a pipeline.
        optimizer_config: `zero_one_enabled` (False) shards optimizer states over the replicas, `grad_clipping`
            (True) and `max_grad_norm` (1.0) clip gradients. `zero_stage` (None) is 1 for the same, 2 to shard gradients
            as well, 3 also parameters; `shard_group_size` (None) shards over that many neighboring replicas, which the
            others mirror; `reshard_after_forward` (None) is that of `nxd_optim.fully_shard`. `zero_offload` (None)
            keeps this rank's part of mean gradients and states in host memory and updates there ("optimizer"), or also
            its part of the parameters ("parameters", with `zero_stage=3`).
        activation_checkpoint_config: modules to recompute in backward: "full" for every transformer layer,
            "selective" for the same without matrix products with weights and attention kernels, a module class
            (or its name, or several) for these modules, None for none.
        pad_model: pad attention heads to a multiple of `tensor_parallel_size`; their number is the model's
            `config.num_attention_heads`.
        sequence_parallel: whether the model's layers split activations along the sequence; it must be built that way.
        model_init_config: `meta_device_init` (False) makes the model without memory; `param_init_fn` (None) then
            fills this rank's part module by module. `weights_are_loaded` (False) says that all weights are loaded
            afterwards: those of a transformers model that `param_init_fn` does not set are zero until then, instead of
            an error. `sequential_move_factor` (11) is the number of ranks per host that make their model at the same
            time, 1 to 32.
        lora_config: adapters to train instead of the model.
        mixed_precision_config: `use_master_weights` and `use_fp32_grad_acc` (both default to `zero_one_enabled`), and
            `use_master_weights_in_ckpt` (False). `use_loss_scaling` (False) multiplies the loss by a scale that adapts,
            for float16; `use_stochastic_rounding` (False) rounds bfloat16 weights stochastically, in place of master
            weights.
        activation_offload: keep the saved inputs of recomputed modules in host memory until backward.
        context_parallel_size: ranks that split each sequence.
        expert_parallel_size: ranks that split the experts of a layer; for transformers models with an expert-parallel
            plan.
        expert_tensor_parallel_size: ranks that split each expert: `tensor_parallel_size` if None, or 1; with 1, expert
            parallelism also uses the tensor-parallel ranks.
        sequential_move_factor: default for `model_init_config`.
        lnc_size: physical cores per logical core, as in NeuronX Distributed; has no effect here.
        **unknown: unknown names, reported with the other mistakes.

    Returns:
        A new dict with all arguments under their names, sections completed with their defaults.

    Raises:
        ValueError: every mistake, in one error; or degrees that do not fit the launched ranks or the existing mesh.
    """
    if sequential_move_factor is not None and isinstance(model_init_config, Mapping | None):
        model_init_config = {"sequential_move_factor": sequential_move_factor, **(model_init_config or {})}
    if lnc_size != 1:
        _logger.info("lnc_size=%s has no effect: ranks are processes, whatever cores they have", lnc_size)
    config = complete_config(
        {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "context_parallel_size": context_parallel_size,
            "expert_parallel_size": expert_parallel_size,
            "expert_tensor_parallel_size": expert_tensor_parallel_size,
            "pipeline_config": pipeline_config,
            "optimizer_config": optimizer_config,
            "activation_checkpoint_config": activation_checkpoint_config,
            "activation_offload": activation_offload,
            "pad_model": pad_model,
            "sequence_parallel": sequence_parallel,
            "model_init_config": model_init_config,
            "lora_config": lora_config,
            "mixed_precision_config": mixed_precision_config,
            "lnc_size": lnc_size,
            **unknown,
        }
    )
    is_rank = model_parallel_is_initialized() or dist.is_initialized() or "WORLD_SIZE" in os.environ
    degrees = ParallelDegrees.of_config(config)
    if is_rank or degrees.least_ranks == 1:
        ensure_model_parallel(degrees)
    return config


def ensure_model_parallel(degrees: ParallelDegrees) -> None:
    """Initialize model parallelism at these degrees, or check that it has them already. Called by all ranks.

    Raises:
        ValueError: the degrees do not fit the launched ranks or the existing mesh.
    """
    if not model_parallel_is_initialized():
        initialize_mesh(degrees)
        return
    mesh = get_mesh()
    wanted = {name: (getattr(degrees, axis), getattr(mesh, axis)) for axis, name in SIZES.items()}
    if degrees.etp != degrees.tp:
        wanted["expert_tensor_parallel_size"] = (degrees.etp, mesh.etp)
    different = [f"{name}={size}, but it has {found}" for name, (size, found) in wanted.items() if size != found]
    if different:
        raise ValueError(
            f"model parallelism is already initialized with other degrees: {'; '.join(different)}. Pass the same "
            "degrees, or call destroy_model_parallel() first"
        )


def complete_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new, checked config with all keys; a complete config comes out equal.

    Args:
        given: any of the keys, or a config that a script has changed; it is not modified. A bool may be 0 or 1, as
            in many scripts' command lines.

    Raises:
        ValueError: every mistake, in one error.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"nxd_config={given!r} is not a config; pass the result of neuronx_distributed_config")
    mistakes: list[str] = []
    read = _schema().nest(_schema().read(_schema().flatten(given, mistakes), mistakes))
    config = _top_level_defaults() | read
    config["optimizer_config"] = OPTIMIZER_DEFAULTS | read["optimizer_config"]
    config["model_init_config"] = MODEL_INIT_DEFAULTS | read["model_init_config"]
    if given.get("pipeline_config") is None:
        config["pipeline_config"] = None
    mistakes += _mistakes_in_values(config) + _mistakes_in_pipeline(config, all_read=not mistakes)
    mistakes += _complete_sharding(config["optimizer_config"], read["optimizer_config"])
    try:
        zero_one_enabled = config["optimizer_config"]["zero_one_enabled"]
        precision = resolve_mixed_precision(read["mixed_precision_config"], zero_one_enabled=zero_one_enabled)
        config["mixed_precision_config"] = asdict(precision)
    except ValueError as error:
        mistakes.append(str(error))
    if mistakes:
        raise OptionError("neuronx_distributed_config", mistakes)
    return config


def _complete_sharding(options: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Set the keys about sharding over the replicas from each other; returns the mistakes in them."""
    stage = options["zero_stage"]
    if stage is None:
        stage = options["zero_stage"] = int(bool(options["zero_one_enabled"]))
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        return [f"optimizer_config.zero_stage={stage!r} is not allowed; expected 0, 1, 2 or 3"]
    if given.get("zero_one_enabled") and not stage:
        return ["optimizer_config: zero_one_enabled=True contradicts zero_stage=0; leave one of them out"]
    options["zero_one_enabled"] = stage > 0
    mistakes = []
    size, reshard = options["shard_group_size"], options["reshard_after_forward"]
    if size is not None and (type(size) is not int or size < 1):
        mistakes.append(
            f"optimizer_config.shard_group_size={size!r} is not allowed; expected a number of ranks, or None"
        )
    elif size is not None and not stage:
        mistakes.append("optimizer_config.shard_group_size needs zero_stage=1 or more, which shards over the replicas")
    if reshard is not None and (not isinstance(reshard, bool | int) or (reshard < 1 and reshard is not False)):
        mistakes.append(
            f"optimizer_config.reshard_after_forward={reshard!r} is not allowed; expected true, false, or a number of "
            "ranks"
        )
    elif reshard is not None and stage < 3:
        mistakes.append("optimizer_config.reshard_after_forward needs zero_stage=3, which shards the parameters")
    return mistakes + _mistakes_in_offload(options["zero_offload"], stage)


def _mistakes_in_offload(offload: Any, stage: int) -> list[str]:
    if offload not in (None, "optimizer", "parameters"):
        return [f"optimizer_config.zero_offload={offload!r} is not allowed; expected 'optimizer', 'parameters' or None"]
    if offload == "optimizer" and not stage:
        return ["optimizer_config.zero_offload='optimizer' needs zero_stage=1 or more; 1 is the same with one replica"]
    if offload == "parameters" and stage < 3:
        return ["optimizer_config.zero_offload='parameters' needs zero_stage=3, which shards the parameters"]
    return []


def given_param_init_fn(config: Mapping[str, Any]) -> Any:
    """Return the function that fills parameters, from either of two sections; None if neither has it."""
    return (config["pipeline_config"] or {}).get("param_init_fn") or config["model_init_config"]["param_init_fn"]


@cache
def _schema() -> Schema:
    """Return all keys. A key's type follows from its default: a bool is a switch, an integer is at least 1."""
    sections: dict[str, dict[str, Any]] = {
        "pipeline_config": {**_arguments(NxDPPModel), **OLD_RUNTIME_FLAGS},
        "optimizer_config": OPTIMIZER_DEFAULTS,
        "model_init_config": MODEL_INIT_DEFAULTS,
        "mixed_precision_config": dict.fromkeys(MixedPrecision.__dataclass_fields__, False),
    }
    top_level = {name: it for name, it in _top_level_defaults().items() if name not in sections}
    keys = [
        Key(
            section=section,
            field=name,
            value_type=type(default) if isinstance(default, int) else Any,
            bounds=_BOUNDS.get(name, {"at_least": 1}) if type(default) is int else {},
            default=default,
        )
        for section, defaults in {"": top_level, **sections}.items()
        for name, default in defaults.items()
    ]
    return Schema(keys, keys_listed_by="help(neuronx_distributed_config)", section_form="give a dict of its keys")


def _top_level_defaults() -> dict[str, Any]:
    """Return the config's keys with their defaults, without the argument that duplicates a section's key."""
    defaults = _arguments(neuronx_distributed_config)
    del defaults["sequential_move_factor"]
    return defaults


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that have a default, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {it.name: it.default for it in parameters if it.default is not it.empty}


def _mistakes_in_values(config: Mapping[str, Any]) -> list[str]:
    """Return the mistakes outside the pipeline section, apart from wrong keys and types."""
    mistakes = []
    lora, norm = config["lora_config"], config["optimizer_config"]["max_grad_norm"]
    if lora is not None and not isinstance(lora, LoraConfig):
        mistakes.append(f"lora_config={lora!r} must be a LoraConfig of neuronx_distributed.modules.lora, or None")
    mistakes += _mistakes_in_checkpointing(config["activation_checkpoint_config"])
    if config["activation_offload"] and config["activation_checkpoint_config"] is None:
        mistakes.append("activation_offload=True needs activation_checkpoint_config; set that to 'full'")
    etp, tp = config["expert_tensor_parallel_size"], config["tensor_parallel_size"]
    if mistake := expert_tensor_parallel_mistake(etp, tp):
        mistakes.append(mistake)
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0:
        mistakes.append(
            f"optimizer_config.max_grad_norm={norm!r} is not allowed; expected a number above 0; "
            "grad_clipping=False turns clipping off"
        )
    fill = given_param_init_fn(config)
    if fill is not None and not callable(fill):
        mistakes.append(f"param_init_fn={fill!r} must be a function that fills the parameters of a module")
    if config["model_init_config"]["meta_device_init"] and fill is None:
        mistakes.append(
            "model_init_config.meta_device_init=True needs param_init_fn, which fills a module's own parameters"
        )
    return mistakes


def _mistakes_in_checkpointing(chosen: Any) -> list[str]:
    mistakes = []
    for part in chosen if isinstance(chosen, list | tuple) else [chosen]:
        if isinstance(part, str):
            near = difflib.get_close_matches(part.lower(), ["full", "selective"], cutoff=0.7)
            if near and part not in near:
                mistakes.append(f"unknown activation_checkpoint_config={part!r}; did you mean {near[0]!r}?")
        elif chosen is not None and not (isinstance(part, type) and issubclass(part, nn.Module)):
            mistakes.append(
                f"activation_checkpoint_config={part!r} must be 'full', None, or a module class (not an instance)"
            )
    return mistakes


def _mistakes_in_pipeline(config: Mapping[str, Any], *, all_read: bool) -> list[str]:
    section, stages = config["pipeline_config"], config["pipeline_parallel_size"]
    if section is None:
        if stages == 1:
            return []
        return [
            f"pipeline_parallel_size={stages} needs pipeline_config, such as {{'num_microbatches': 4, "
            "'transformer_layer_cls': ..., 'auto_partition': True}"
        ]
    mistakes = [
        f"pipeline_config.{name}={section[name]!r} is not allowed; expected a list"
        for name in _LISTS_IN_PIPELINE
        if not isinstance(section.get(name), Collection | None) or isinstance(section.get(name), str)
    ]
    for pair in (("pipeline_cuts", "auto_partition"), ("return_mb_loss", "broadcast_and_average_loss")):
        if all(section.get(name) for name in pair):
            mistakes.append(f"pipeline_config: {pair[0]} and {pair[1]} are mutually exclusive; choose one")
    cuts, virtual = section.get("pipeline_cuts"), section.get("virtual_pipeline_size", 1)
    if all_read and not mistakes and cuts and stages * virtual not in (1, len(cuts) + 1):
        mistakes.append(
            f"pipeline_config: {len(cuts)} pipeline_cuts make {len(cuts) + 1} stages; pipeline_parallel_size={stages} "
            f"times virtual_pipeline_size={virtual} needs {stages * virtual - 1} cuts"
        )
    return mistakes
