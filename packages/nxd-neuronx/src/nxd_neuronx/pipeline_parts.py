"""Parts of a pipeline that scripts use directly: cuts, stages of a list of layers, traces.

`NxDPPModel` does all of this itself.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from types import ModuleType
from typing import Any, Self

from nxd_pipeline.partition import even_cuts
from nxd_pipeline.partition import trace_model as graph_of
from nxd_state import get_pipeline_model_parallel_size
from torch import fx, nn

WEIGHT_SHARING_ATTR_NAME = "weight_sharing"

StageOfLayers = Callable[[Sequence[nn.Module], int], Mapping[nn.Module, int]]


def create_partitions(pipeline_parallel_size: int, model_layer_names: Sequence[str]) -> list[str]:
    """Return the last layer of each stage but the last: an equal number per stage, the remainder to later stages.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    return even_cuts(model_layer_names, pipeline_parallel_size)


def stage_to_pipeline_parallel_rank(stage: int, pp_size: int | None = None) -> int:
    """Return the pipeline rank of a stage, with stages assigned round-robin; `pp_size` is the mesh's if None."""
    return stage % (get_pipeline_model_parallel_size() if pp_size is None else pp_size)


class PipelineStageModule(nn.Module):
    """One stage of a model that is a list of layers, each of which takes the previous layer's output.

    `NxDPPModel(layers, manual_pp_partition=True)` builds and runs all stages.

    Args:
        layers: layers of the whole model.
        num_stages: number of stages.
        stage_index: index of this stage.
        partition_fn: function that returns the stage of each layer; if None, an equal number per stage, the remainder
            to the last.

    Attributes:
        stage_modules: this stage's layers.
        shared_weights_on_pp_stages: for each group of `mark_weight_sharing` with a layer here, the stages that share
            the weight, and this stage's layer with the weight's name.

    Raises:
        ValueError: there are fewer layers than stages, or a layer has no stage.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        num_stages: int,
        stage_index: int,
        partition_fn: StageOfLayers | None = None,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.num_stages = num_stages
        self.stage_index = stage_index
        self.partition_fn = partition_fn
        stage_of = (partition_fn or _evenly)(layers, num_stages)
        if len(stage_of) != len(layers):
            raise ValueError(f"partition_fn assigns only {len(stage_of)} of {len(layers)} layers; assign all")
        self.stage_modules = [layer for layer in layers if stage_of[layer] == stage_index]
        self.shared_weights_on_pp_stages = _shared_weights(stage_of, stage_index)

    def forward(self, x: Any) -> Any:
        """Apply this stage's layers in order."""
        for layer in self.stage_modules:
            x = layer(x)
        return x

    @staticmethod
    def mark_weight_sharing(
        layer_and_weight_path: Sequence[tuple[nn.Module, str]], sharing_group_name: str = "default"
    ) -> None:
        """Make weights of several layers one parameter, the first one; `NxDPPModel` then keeps its copies equal.

        Args:
            layer_and_weight_path: layers, each with the name of its weight.
            sharing_group_name: name of the group.

        Raises:
            RuntimeError: a layer is already in a group with this name.
            ValueError: a name is not that of a parameter, or the shapes differ.
        """
        weights = [operator.attrgetter(path)(layer) for layer, path in layer_and_weight_path]
        shapes = {tuple(it.shape) if isinstance(it, nn.Parameter) else type(it).__name__ for it in weights}
        if len(shapes) != 1 or not isinstance(weights[0], nn.Parameter):
            raise ValueError(f"the weights of group {sharing_group_name!r} are {shapes}; pass parameters of one shape")
        if any(sharing_group_name in vars(it).get(WEIGHT_SHARING_ATTR_NAME, {}) for it, _ in layer_and_weight_path):
            raise RuntimeError(f"a layer is already in group {sharing_group_name!r}; choose another name")
        for layer, path in layer_and_weight_path:
            owner, _, name = path.rpartition(".")
            layer.get_submodule(owner).register_parameter(name, weights[0])
            vars(layer).setdefault(WEIGHT_SHARING_ATTR_NAME, {})[sharing_group_name] = path

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move this stage's layers to a device or dtype."""
        for layer in self.stage_modules:
            layer.to(*args, **kwargs)
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this stage's layers by name."""
        for index, layer in enumerate(self.stage_modules):
            name = f"pipeline_stage_modules.{index}.{type(layer).__name__}"
            yield f"{prefix}.{name}" if prefix else name, layer

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters by name."""
        for name, layer in self.named_modules(prefix=prefix):
            yield from layer.named_parameters(name, recurse, remove_duplicate)


def _evenly(layers: Sequence[nn.Module], num_stages: int) -> dict[nn.Module, int]:
    per_stage = len(layers) // num_stages
    if not per_stage:
        raise ValueError(f"{len(layers)} layers cannot fill {num_stages} stages; use at most {len(layers)} stages")
    return {layer: min(place // per_stage, num_stages - 1) for place, layer in enumerate(layers)}


def _shared_weights(stage_of: Mapping[nn.Module, int], stage_index: int) -> dict[str, list[Any]]:
    stages: dict[str, set[int]] = {}
    here: dict[str, list[Any]] = {}
    for layer, stage in stage_of.items():
        for group, path in layer.__dict__.get(WEIGHT_SHARING_ATTR_NAME, {}).items():
            stages.setdefault(group, set()).add(stage)
            if stage == stage_index:
                here[group] = [layer, path]
    return {group: [sorted(stages[group]), weight] for group, weight in here.items()}


class NxDTracer(fx.Tracer):
    """A torch.fx tracer that does not trace into modules whose class name or own name is in `leaf_modules`.

    Args:
        **config: `autowrap_functions` and `autowrap_modules`, see `torch.fx.Tracer`, and `leaf_modules`.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__(
            autowrap_modules=tuple(config.get("autowrap_modules") or ()),
            autowrap_functions=tuple(config.get("autowrap_functions") or ()),
        )
        self.leaf_modules = tuple(config.get("leaf_modules") or ())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the module stays one node of the graph."""
        is_named = any(leaf in type(m).__name__ or leaf == module_qualified_name for leaf in self.leaf_modules)
        return is_named or super().is_leaf_module(m, module_qualified_name)


def get_concrete_args(
    model: nn.Module,
    input_names: Sequence[str] | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a model's forward that are not passed, with their defaults.

    Args:
        model: the model.
        input_names: names of the passed arguments; those of `args` and `kwargs` if None.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        ValueError: nothing is passed, or forward has no argument with such a name.
    """
    parameters = signature(model.forward).parameters
    if input_names is None:
        if args is None and kwargs is None:
            raise ValueError("the model's inputs are unknown; pass input_names, args or kwargs")
        input_names = [*list(parameters)[: len(args or ())], *(kwargs or ())]
    unknown = [name for name in input_names if name not in parameters]
    if unknown:
        raise ValueError(
            f"The model does not have input(s) named: {', '.join(unknown)}, expected a subset of the following: "
            f"{', '.join(parameters)}"
        )
    return {name: it.default for name, it in parameters.items() if name not in input_names}


def trace_model(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    tracer_cls: str | type[fx.Tracer] | None = None,
    leaf_modules: Sequence[str] | None = None,
    autowrap_functions: Sequence[Callable[..., Any]] | None = None,
    autowrap_modules: Sequence[ModuleType] | None = None,
    autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
) -> fx.GraphModule:
    """Trace a model to a graph of its operations; a parallel layer stays one node.

    Args:
        model: the model.
        args: inputs by position; only their number matters.
        kwargs: inputs by name; only the names matter.
        input_names: names of the inputs, instead of `args` and `kwargs`.
        tracer_cls: tracer class to build on; "hf" and "torch" mean torch's.
        leaf_modules: names of module classes that stay one node.
        autowrap_functions: functions that stay one node.
        autowrap_modules: Python modules whose functions stay one node.
        autowrap_obj_methods: names of methods that stay one node, by object.

    Raises:
        ValueError: the model cannot be traced.
    """
    left_out = get_concrete_args(model, input_names, args, kwargs)
    graph = graph_of(
        model,
        input_names=[name for name in signature(model.forward).parameters if name not in left_out],
        leaf_classes=tuple(leaf_modules or ()),
        autowrap_functions=tuple(autowrap_functions or ()),
        autowrap_modules=tuple(autowrap_modules or ()),
        autowrap_obj_methods=autowrap_obj_methods,
        tracer_cls=tracer_cls if isinstance(tracer_cls, type) else fx.Tracer,
    )
    traced = fx.GraphModule(model, graph)
    traced.graph.eliminate_dead_code()
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced
