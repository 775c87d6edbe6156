"""Cutting a traced graph into stages: each a graph of its own that holds only the submodules it calls.

Values go directly to the stages that use them, across any number of stages. Weights, constants and values that depend
only on the model's inputs (masks, positions) are not sent: every stage that uses them has or computes them itself.
"""

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn

from nxd_pipeline.partition.stage import Stage

_PURE_MODULES = ("_operator", "builtins", "math")  # the module of the functions of Python's operators


def traced_partition(module: nn.Module, graph: fx.Graph, cuts: Sequence[str]) -> tuple[Stage, ...]:
    """Cut `graph` after the layers named `cuts`. The last stage also has parameters and buffers that no stage uses.

    Args:
        module: the model that `graph` was traced from.
        graph: see `trace_model`; the layers in `cuts` must be leaves of it.
        cuts: the last layer of each stage but the last, in the order in which the model calls them.

    Raises:
        ValueError: a layer in `cuts` is never called, or they are called in another order.
    """
    _use_changed_values(module, graph)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    stage_of = _assign_stages(graph, cuts, parameters)
    stages = tuple(_make_stage(module, graph, stage_of, stage, len(cuts) + 1) for stage in range(len(cuts) + 1))
    _keep_unused(module, stages)
    return stages


def traced_costs(
    module: nn.Module, graph: fx.Graph, layers: Sequence[str], measure: Callable[[nn.Module], float]
) -> list[float]:
    """Return the cost of each layer with the calls since the previous layer; the rest counts for the last layer.

    Raises:
        ValueError: the model never calls a layer.
    """
    costs: dict[str, float] = {}
    seen: set[str] = set()
    since_layer = 0.0
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr") or node.target in seen:
            continue
        seen.add(node.target)
        if node.op == "call_module":
            since_layer += measure(module.get_submodule(node.target))
        elif isinstance(value := operator.attrgetter(node.target)(module), nn.Parameter):
            since_layer += measure(nn.ParameterList([value]))
        if node.target in layers:
            costs[node.target], since_layer = since_layer, 0.0
    missing = [layer for layer in layers if layer not in costs]
    if missing:
        raise ValueError(
            f"the model never calls the layers {missing}; choose pipeline_cuts among the layers that it calls"
        )
    costs[next(reversed(costs))] += since_layer
    return [costs[layer] for layer in layers]


def _use_changed_values(module: nn.Module, graph: fx.Graph) -> None:
    """Let the nodes after an in-place operation use its result, so that stages get the changed value."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        changed = _changed_in_place(module, node)
        if isinstance(changed, fx.Node):
            here = position[node]
            changed.replace_all_uses_with(node, lambda user, here=here: position[user] > here)  # type: ignore[misc]


def _changed_in_place(module: nn.Module, node: fx.Node) -> Any:
    """Return the argument that the node changes in place and returns; None if there is none."""
    first = next(iter(node.args), node.kwargs.get("input"))
    if node.op == "call_module":
        return first if getattr(module.get_submodule(str(node.target)), "inplace", False) is True else None
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op not in ("call_method", "call_function") or str(name).endswith("__"):
        return None
    return first if str(name).endswith("_") or node.kwargs.get("inplace") is True else node.kwargs.get("out")


def _assign_stages(graph: fx.Graph, cuts: Sequence[str], parameters: Set[str]) -> dict[fx.Node, int]:
    """Return the stage that computes each node; nodes that every stage computes for itself have none."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    ends: list[int] = []
    for cut in cuts:
        calls = [position[node] for node in graph.nodes if node.op == "call_module" and node.target == cut]
        if not calls:
            raise ValueError(f"the model never calls the layer {cut!r} in pipeline_cuts; name a layer that it calls")
        if ends and calls[-1] < ends[-1]:
            before = cuts[len(ends) - 1]
            raise ValueError(f"pipeline_cuts names {cut!r} after {before!r}, but it is called earlier; swap them")
        ends.append(calls[-1])
    stage_of: dict[fx.Node, int] = {}
    everywhere: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_computed_everywhere(node, everywhere, parameters):
            everywhere.add(node)
        elif node.op == "output":
            stage_of[node] = len(cuts)
        elif node.target is operator.getitem and node.args[0] in stage_of:
            stage_of[node] = stage_of[node.args[0]]  # only the part in use is sent, not the whole tuple
        else:
            stage_of[node] = sum(position[node] > end for end in ends)
    return stage_of


def _is_computed_everywhere(node: fx.Node, everywhere: Set[fx.Node], parameters: Set[str]) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return True
    if any(it not in everywhere or it.target in parameters for it in node.all_input_nodes):
        return False
    if node.op == "call_method":
        return not _is_random(str(node.target)) and not str(node.target).endswith("_")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if getattr(node.target, "__module__", None) in _PURE_MODULES:
            return True
        return hasattr(torch.ops.aten, name) and not _is_random(name)
    return False


def _is_random(name: str) -> bool:
    """Whether torch's operator of that name draws random numbers, which would differ between stages."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads())


def _make_stage(module: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int], stage: int, num_stages: int) -> Stage:
    own = [node for node in graph.nodes if stage_of.get(node) == stage]
    needed = _needed_by(own, stage_of, stage)
    inputs = [node for node in graph.nodes if node in needed and (node.op == "placeholder" or node in stage_of)]
    outputs = [node for node in own if any(stage_of[user] > stage for user in node.users)]
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: made.placeholder(_value_name(node)) for node in inputs}
    for node in graph.nodes:
        if node.op != "output" and node not in copies and (node in needed or stage_of.get(node) == stage):
            copies[node] = made.node_copy(node, copies.__getitem__)
    if stage == num_stages - 1:
        output = next(node for node in own if node.op == "output")
        made.output(fx.map_arg(output.args[0], copies.__getitem__))
    else:
        results = tuple(copies[node] for node in outputs)
        made.output(results[0] if len(results) == 1 else results)
    made.lint()
    names = tuple(_value_name(node) for node in inputs)
    stage_module = fx.GraphModule(module, made, class_name=f"{type(module).__name__}Stage{stage}")
    _keep_out_of_state(stage_module, module.state_dict().keys())
    return Stage(stage_module, names, () if stage == num_stages - 1 else tuple(map(_value_name, outputs)))


def _keep_out_of_state(stage_module: fx.GraphModule, saved: Set[str]) -> None:
    """Make buffers persistent only where the model's are: torch.fx makes all persistent, constants of a trace too."""
    for path in {node.target for node in stage_module.graph.nodes if node.op == "get_attr"} - saved:
        owner, _, name = path.rpartition(".")
        buffers = stage_module.get_submodule(owner)
        if isinstance(value := getattr(buffers, name), Tensor):  # a module may be an argument of a function
            buffers.register_buffer(name, value, persistent=False)


def _keep_unused(module: nn.Module, stages: Sequence[Stage]) -> None:
    """Put unused tensors on the last stage, so that the stages together have the state of the model.

    Another name of a tensor that a stage uses goes to that stage.
    """
    held = {name for stage in stages for name in stage.module.state_dict()}
    stage_of = {tensor: it for it in reversed(stages) for tensor in (*it.module.parameters(), *it.module.buffers())}
    saved = module.state_dict().keys()
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    unused = {name: tensor for name, tensor in named if name in saved - held}
    whole: set[str] = set()  # modules of which no stage uses anything
    for name, tensor in unused.items():
        stage = stage_of.get(tensor, stages[-1])
        path, _, key = name.rpartition(".")
        if path and tensor not in stage_of and not _names_below(path, saved) & held:
            while (outer := path.rpartition(".")[0]) and not _names_below(outer, saved) & held:
                path = outer
            if path not in whole:
                whole.add(path)
                _container(stage.module, path.rpartition(".")[0]).add_module(
                    path.rpartition(".")[2], module.get_submodule(path)
                )
        elif isinstance(tensor, nn.Parameter):
            _container(stage.module, path).register_parameter(key, tensor)
        else:
            _container(stage.module, path).register_buffer(key, tensor)


def _names_below(path: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith(f"{path}.")}


def _container(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a path, adding empty modules where there are none."""
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


def _needed_by(own: Iterable[fx.Node], stage_of: dict[fx.Node, int], stage: int) -> set[fx.Node]:
    """Return the nodes of other stages that a stage uses, and all those it computes for itself."""
    needed: set[fx.Node] = set()
    to_visit = [source for node in own for source in node.all_input_nodes]
    while to_visit:
        node = to_visit.pop()
        if node in needed or stage_of.get(node) == stage:
            continue
        needed.add(node)
        if node not in stage_of:
            to_visit.extend(node.all_input_nodes)
    return needed


def _value_name(node: fx.Node) -> Any:
    """Return the argument's name for an input of the model, else the node's name."""
    return node.target if node.op == "placeholder" else node.name
