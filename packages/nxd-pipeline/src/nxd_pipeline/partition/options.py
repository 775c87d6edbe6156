"""Options of `NxDPPModel`: how a model is cut, by hand, as a list of layers, by its structure, or by a trace."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from nxd_state import is_transformers_model, transformers_model_in
from torch import fx, nn

from nxd_pipeline.partition.cuts import MEASURES, LayerClasses, balanced_cuts, check_cuts, even_cuts, layer_names
from nxd_pipeline.partition.hugging_face import (
    hugging_face_inputs,
    hugging_face_structure,
    passes_router_logits,
)
from nxd_pipeline.partition.manual import (
    LABELS,
    LayerChain,
    LossFunction,
    StageChain,
    StageOfLayers,
    manual_partition,
    sequence_partition,
)
from nxd_pipeline.partition.stage import Stage
from nxd_pipeline.partition.structure import optional_inputs, structural_partition
from nxd_pipeline.partition.trace import trace_model
from nxd_pipeline.partition.traced import traced_costs, traced_partition

# Arguments by which scripts tuned the old runtime, with their defaults there.
OLD_RUNTIME_FLAGS: Mapping[str, bool | int] = {
    "_delay_tracing": False,
    "_turn_off_odd_even_scheduler": False,
    "_all_reduce_send_recv": False,
    "_fused_send_recv": False,
    "_fused_fwd_bwd": False,
    "_mark_step_before_pp_runtime": True,
    "_mark_step_after_pp_runtime": True,
    "_deallocate_send_tensors": True,
    "_use_gloo_for_metadata_comm": False,
    "_debug_mode": False,
    "_debug_pp_size": 8,
    "_debug_pp_rank": 0,
}

logger = logging.getLogger(__name__)

Balance = Literal["layers", "parameters", "flops"] | Sequence[float]
Tracer = Literal["hf", "torch"] | type[fx.Tracer]


def check_old_flags(flags: Mapping[str, Any]) -> None:
    """Log which of `OLD_RUNTIME_FLAGS` have other values than by default, and so no effect.

    Raises:
        TypeError: an argument is not one of these flags.
    """
    unknown = sorted(flags.keys() - OLD_RUNTIME_FLAGS.keys())
    if unknown:
        raise TypeError(f"NxDPPModel has no argument {', '.join(map(repr, unknown))}; see help(NxDPPModel)")
    changed = sorted(name for name, value in flags.items() if value != OLD_RUNTIME_FLAGS[name])
    if changed:
        logger.info("%s tuned the old runtime and have no effect here; remove them", ", ".join(changed))


@dataclass(frozen=True)
class PartitionOptions:
    """Where and how a model is to be cut; the fields are arguments of `NxDPPModel`, and described there."""

    transformer_layer_cls: LayerClasses | None = None
    pipeline_cuts: Sequence[str] | None = None
    auto_partition: bool = False
    balance: Balance = "layers"
    input_names: Sequence[str] | None = None
    leaf_module_cls: Sequence[type[nn.Module] | str] | None = None
    autowrap_functions: Sequence[Callable[..., Any] | ModuleType] | None = None
    autowrap_modules: Sequence[ModuleType | Callable[..., Any]] | None = None
    autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None
    tracer_cls: Tracer | None = None
    stages: Sequence[nn.Module | Stage] | None = None
    manual_pp_partition: bool = False
    manual_pp_stage_partition_fn: StageOfLayers | None = None
    manual_pp_loss_fn: LossFunction | None = None


@dataclass(frozen=True)
class PartitionedModel:
    """All stages of a model, and the inputs that calls may omit, with their defaults."""

    stages: tuple[Stage, ...]
    optional_inputs: Mapping[str, Any] = field(default_factory=dict)


def whole_model(module: nn.Module | Sequence[nn.Module] | None, options: PartitionOptions) -> nn.Module:
    """Return the model before it is cut, also if it is given as a list of layers or only as stages.

    Raises:
        ValueError: `manual_pp_partition` does not match the type of `module`, or there is neither a model nor stages.
    """
    if options.stages is not None and options.manual_pp_partition:
        raise ValueError("stages= already defines the stages; remove manual_pp_partition, which cuts a list of layers")
    if module is None:
        if options.stages is None:
            raise ValueError("module is None; pass the model, or stages=[...] with the modules of all stages")
        return StageChain(options.stages, options.input_names)
    if options.manual_pp_partition == isinstance(module, nn.Module):
        raise ValueError(
            f"manual_pp_partition={options.manual_pp_partition} but module is a {type(module).__name__}; pass a list "
            "of layers with manual_pp_partition=True, or a module without it"
        )
    return module if isinstance(module, nn.Module) else LayerChain(dict(enumerate(module)), options.manual_pp_loss_fn)


def partition_model(
    model: nn.Module | Sequence[nn.Module], num_stages: int, options: PartitionOptions
) -> PartitionedModel:
    """Cut a model into stages.

    Raises:
        ValueError: options cannot be combined, or the model cannot be cut this way.
    """
    _check_options(options)
    if not isinstance(model, nn.Module):
        loss_fn = options.manual_pp_loss_fn
        stages = sequence_partition(
            model, num_stages, stage_of_layers=options.manual_pp_stage_partition_fn, loss_fn=loss_fn
        )
        return PartitionedModel(stages, {LABELS: None} if loss_fn is not None else {})
    if options.stages is not None:
        return PartitionedModel(_by_hand(model, num_stages, options.stages, options))
    inner = transformers_model_in(model)
    has_structure = is_transformers_model(inner) and not passes_router_logits(inner)
    if options.tracer_cls == "hf" or (options.tracer_cls is None and has_structure):
        return _by_structure(model, num_stages, options)
    return PartitionedModel(_by_trace(model, num_stages, options))


def _check_options(options: PartitionOptions) -> None:
    _check_types(options)
    if options.pipeline_cuts is not None and options.auto_partition:
        raise ValueError("pipeline_cuts and auto_partition cannot be combined; pass only one")
    if options.stages is not None and (options.pipeline_cuts is not None or options.auto_partition):
        raise ValueError("stages= already defines the stages; remove pipeline_cuts and auto_partition")
    if isinstance(options.balance, str) and options.balance not in ("layers", *MEASURES):
        raise ValueError(
            f"unknown balance={options.balance!r}; use 'layers', {', '.join(map(repr, MEASURES))}, or a sequence "
            "of costs, one for each layer"
        )
    if options.balance != "layers" and not options.auto_partition:
        raise ValueError("balance only applies to auto_partition; pass auto_partition=True, or remove it")


def _check_types(options: PartitionOptions) -> None:
    """Raise for wrong types that Python would misread, such as a name as its letters, or reject later."""
    for name in ("pipeline_cuts", "input_names"):
        value = getattr(options, name)
        if isinstance(value, str):
            raise ValueError(f"{name}={value!r} is a single name; pass a list of names, [{value!r}]")
        if not all(isinstance(it, str) for it in value or ()):
            raise ValueError(f"{name}={list(value)} must be names of modules in the model, such as ['layers.1']")
    layers = options.transformer_layer_cls
    classes = (layers,) if isinstance(layers, type) else tuple(layers or ())
    if not all(isinstance(it, type) and issubclass(it, nn.Module) for it in classes):
        raise ValueError(
            f"transformer_layer_cls={layers!r} is neither a module class nor a list of them; pass the class"
        )


def _by_hand(
    model: nn.Module, num_stages: int, stages: Sequence[nn.Module | Stage], options: PartitionOptions
) -> tuple[Stage, ...]:
    if len(stages) != num_stages:
        raise ValueError(
            f"{len(stages)} stages are given, but this pipeline needs {num_stages}, one for each rank and each of its "
            "virtual_pipeline_size"
        )
    if isinstance(model, StageChain):
        names: Sequence[str] = model.input_names
    elif options.input_names is None:
        names = list(inspect.signature(model.forward).parameters)
    else:
        names = options.input_names
    return manual_partition(stages, input_names=names, model=model)


def _by_structure(model: nn.Module, num_stages: int, options: PartitionOptions) -> PartitionedModel:
    inner = transformers_model_in(model)
    if not is_transformers_model(inner):
        raise ValueError(
            f"tracer_cls='hf' is for transformers models, but {type(model).__name__} is not one; remove it"
        )
    structure = hugging_face_structure(inner, options.transformer_layer_cls)
    if inner is not model:
        structure = structure.below(next(name for name, module in model.named_modules() if module is inner))

    def costs(measure: Callable[[nn.Module], float]) -> list[float]:
        parts = (structure.first, *([name] for name in structure.layers), structure.last)
        return [sum(measure(model.get_submodule(name)) for name in part) for part in parts]

    cuts = _cuts(model, num_stages, options, structure.layers, costs)
    names = hugging_face_inputs(inner) if options.input_names is None else options.input_names
    stages = structural_partition(model, structure, cuts, names)
    return PartitionedModel(stages, optional_inputs(inner, names))


def _by_trace(model: nn.Module, num_stages: int, options: PartitionOptions) -> tuple[Stage, ...]:
    classes = options.transformer_layer_cls or ()
    classes = (classes,) if isinstance(classes, type) else tuple(classes)
    if options.auto_partition and not classes:
        raise ValueError("auto_partition needs transformer_layer_cls, the class of the layers to spread")
    layers = layer_names(model, classes) if options.auto_partition else list(options.pipeline_cuts or ())
    if not options.auto_partition:  # checks the names before anything is traced
        layers = _cuts(model, num_stages, options, layers, lambda _: [])
    autowrap = (*(options.autowrap_functions or ()), *(options.autowrap_modules or ()))
    graph = trace_model(
        model,
        input_names=options.input_names,
        leaf_classes=(*classes, *(options.leaf_module_cls or ())),
        leaf_names=layers,
        autowrap_functions=[it for it in autowrap if not isinstance(it, ModuleType)],
        autowrap_modules=[it for it in autowrap if isinstance(it, ModuleType)],
        autowrap_obj_methods=options.autowrap_obj_methods,
        tracer_cls=_tracer_class(options.tracer_cls),
    )
    cuts = _cuts(model, num_stages, options, layers, lambda measure: traced_costs(model, graph, layers, measure))
    return traced_partition(model, graph, cuts)


def _cuts(
    model: nn.Module,
    num_stages: int,
    options: PartitionOptions,
    layers: Sequence[str],
    costs: Callable[[Callable[[nn.Module], float]], Sequence[float]],
) -> list[str]:
    """Return the last layer of each stage but the last; `costs` computes the layers' costs by a measure of modules."""
    if not options.auto_partition:
        if options.pipeline_cuts is None:
            raise ValueError(
                f"no cuts are given for {num_stages} stages; pass pipeline_cuts, or "
                "auto_partition=True with transformer_layer_cls, or stages"
            )
        check_cuts(model, options.pipeline_cuts, num_stages)
        return list(options.pipeline_cuts)
    if options.balance == "layers":
        return even_cuts(layers, num_stages)
    if isinstance(options.balance, str):
        return balanced_cuts(layers, costs(MEASURES[options.balance]), num_stages)
    return balanced_cuts(layers, options.balance, num_stages)


def _tracer_class(tracer: Any) -> type[fx.Tracer]:
    if tracer is None or tracer == "torch":
        return fx.Tracer
    if isinstance(tracer, type) and issubclass(tracer, fx.Tracer):
        return tracer
    raise ValueError(f"unknown tracer_cls={tracer!r}; use 'hf', 'torch', a subclass of torch.fx.Tracer, or stages")
