"""Records a model as a graph whose inputs are weights, state, and the user's inputs, in this order.

So weights can be replaced, several programs can share weights and state, and ranks with equal graphs share one compiled
program. The ranks in the tensor-parallel, data-parallel and expert-parallel groups, which layers get from
`Group.rank_tensor`, are three of the weights. State is named by aliases: tensors that stay in the workers and that each
call updates in place.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import active_group, get_device
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from nxd_trace.programs import Signature, Structure, TensorSpec, flatten, unflatten, without


@dataclass(frozen=True)
class Alias:
    """One state tensor.

    Attributes:
        name: name of the parameter or buffer.
        output: index of the model's (flattened) output with the new value, which callers do not get; None if `forward`
            writes into the tensor or assigns a new tensor to the buffer.
    """

    name: str
    output: int | None


def read_aliases(model: nn.Module, aliases: Any) -> list[Alias]:
    """Normalize the aliases that `func` returned with the model.

    Args:
        model: the model.
        aliases: a mapping from state to output index or None, or a list of state that `forward` updates in place. State
            is a parameter or buffer of the model, or its name.

    Raises:
        TypeError: `aliases` is neither.
        ValueError: the model has no such tensor, or a state or output appears twice.
    """
    if aliases is None:
        return []
    if not isinstance(aliases, Mapping | Iterable) or isinstance(aliases, str | Tensor):
        raise TypeError(
            f"func returned aliases of type {type(aliases).__name__}; expected a dict of state to output index, "
            "or a list of the state that forward updates in place"
        )
    pairs = aliases.items() if isinstance(aliases, Mapping) else [(state, None) for state in aliases]
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    known = {name for name, _ in named_tensors(model)}
    found = [Alias(_name_of(state, names, known), _check_output(output)) for state, output in pairs]
    outputs = [f"output {alias.output}" for alias in found if alias.output is not None]
    named = [*(f"state {alias.name!r}" for alias in found), *outputs]
    twice = {what for what in named if named.count(what) > 1}
    if twice:
        raise ValueError(f"the aliases list {', '.join(sorted(twice))} twice; name each once")
    return found


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers; each tensor once, under its first name."""
    return [*model.named_parameters(), *model.named_buffers()]


def _name_of(state: Any, names: dict[int, str], known: set[str]) -> str:
    if isinstance(state, str) and state in known:
        return state
    if isinstance(state, Tensor) and id(state) in names:
        return names[id(state)]
    what = repr(state) if isinstance(state, str) else f"a {type(state).__name__}"
    raise ValueError(
        f"the aliases name {what}, which is not a parameter or buffer of the model; register it with "
        "register_buffer, and alias it by name or as the tensor itself"
    )


def _check_output(output: Any) -> int | None:
    if output is not None and (not isinstance(output, int) or isinstance(output, bool) or output < 0):
        raise TypeError(f"the aliases map to {output!r}; expected an output's index, or None for in-place updates")
    return output


RANK_AXES = ("tp", "dp", "ep")  # mesh axes of the workers: model shards, replicas, and expert shards


RANK_WEIGHTS = {f"nxd_trace.{axis}_rank": axis for axis in RANK_AXES}  # extra weights of every model, by name


def rank_tensors() -> dict[str, Tensor]:
    """Return this process's rank in each of its groups of several ranks, as extra weights of every model."""
    groups = {name: active_group(axis) for name, axis in RANK_WEIGHTS.items()}
    return {name: torch.tensor([group.rank], device=get_device()) for name, group in groups.items() if group.size > 1}


@dataclass(frozen=True)
class ExportedModel:
    """A recorded program of a model on this rank.

    Attributes:
        exported: the graph.
        tensors: example inputs of the graph: weights, states, inputs.
        weights: names of the weights.
        states: names of the states.
        state_shapes: shapes of the states.
        signature: signature of the user's inputs and the outputs.
        digest: hash of the graph, its shapes and its constants; equal for programs that compute the same.
        groups: names of the process groups of its collectives.
    """

    exported: ExportedProgram
    tensors: list[Tensor]
    weights: tuple[str, ...]
    states: tuple[str, ...]
    state_shapes: tuple[tuple[int, ...], ...]
    signature: Signature
    digest: str
    groups: frozenset[str]


class _OutputStructure:
    """The nesting of a model's outputs; a separate object, because torch.export restores a module's attributes."""

    value: Structure = None


class _Functional(nn.Module):
    """A model as a function of its tensors, with a flat list of outputs."""

    def __init__(self, model: nn.Module, weights: Sequence[str], aliases: Sequence[Alias]) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that its tensors do not become this module's
        self._weights = weights
        self._aliases = aliases
        self.output_structure = _OutputStructure()

    def forward(
        self, weights: list[Tensor], states: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        tensors = dict(zip(self._weights, weights, strict=True))
        tensors.update(zip([alias.name for alias in self._aliases], states, strict=True))
        ranks = {axis: tensors.pop(name) for name, axis in RANK_WEIGHTS.items() if name in tensors}
        with ExitStack() as given:
            for axis, rank in ranks.items():
                given.enter_context(active_group(axis).rank_given_by(rank))
            result = torch.func.functional_call(self._model[0], tensors, args, kwargs)
        outputs, structure = flatten(result, "outputs")
        new_states = {}
        for alias, state in zip(self._aliases, states, strict=True):
            if alias.output is not None:
                state.copy_(_new_value(alias, state, outputs))
                new_states[alias.output] = alias
            elif tensors[alias.name] is not state:  # forward has assigned a new tensor
                state.copy_(tensors[alias.name])
        kept = [output for index, output in enumerate(outputs) if index not in new_states]
        if not kept:
            raise ValueError("the model returns only new state; also return a tensor for the caller")
        structure = without(structure, set(new_states))
        # Callers of a model that returns (output, new state) get just the output.
        alone = bool(new_states) and structure in ({"tuple": [0]}, {"list": [0]})
        self.output_structure.value = 0 if alone else structure
        return kept


def export_model(
    model: nn.Module, aliases: Sequence[Alias], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ExportedModel:
    """Record `model(*args, **kwargs)`; the model is in evaluation mode and on its device."""
    states = [alias.name for alias in aliases]
    tensors = {**dict(named_tensors(model)), **rank_tensors()}
    weights = [name for name in tensors if name not in states]
    inputs, input_structure = flatten([args, dict(kwargs)], "example_inputs")
    held = [tensors[key].detach().contiguous() for key in (*weights, *states)]  # as in files and shared memory
    args, kwargs = (unflatten(part, [tensor.contiguous() for tensor in inputs]) for part in input_structure["list"])
    functional = _Functional(model, weights, aliases)
    with torch.no_grad():
        exported = torch.export.export(
            functional, (held[: len(weights)], held[len(weights) :], args, kwargs), strict=False
        )
    graph = exported.graph_module
    _drop_metadata_checks(graph)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    lifted = [
        spec for spec in exported.graph_signature.input_specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    ]
    assert not lifted, f"{lifted} are not inputs of the graph"
    roles = [f"weight {key!r}" for key in weights] + [None] * len(states)
    roles += [f"input {index}" for index in range(len(inputs))]
    num_constants = len(placeholders) - len(roles)
    _check_updates(graph, dict(zip(placeholders[num_constants:], roles, strict=True)))
    outputs = [node.meta["val"] for node in graph.graph.output_node().args[0]]
    return ExportedModel(
        exported=exported,
        tensors=[*held, *inputs],
        state_shapes=tuple(tuple(tensor.shape) for tensor in held[len(weights) :]),
        weights=tuple(weights),
        states=tuple(states),
        signature=Signature(
            name=name,
            inputs=tuple(TensorSpec.of(tensor) for tensor in inputs),
            input_structure=input_structure,
            outputs=tuple(TensorSpec.of(tensor) for tensor in outputs),
            output_structure=functional.output_structure.value,
        ),
        digest=_digest(exported, placeholders),
        groups=_process_groups(graph),
    )


def _new_value(alias: Alias, state: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    assert alias.output is not None
    if alias.output >= len(outputs):
        raise ValueError(
            f"the aliases map {alias.name!r} to output {alias.output}, but the model returns {len(outputs)} tensors"
        )
    new = outputs[alias.output]
    if new.shape != state.shape or new.dtype != state.dtype:
        raise ValueError(
            f"output {alias.output} is {TensorSpec.of(new)}, but the state {alias.name!r} that it updates is "
            f"{TensorSpec.of(state)}; they must match"
        )
    return new


def _drop_metadata_checks(graph: fx.GraphModule) -> None:
    """Remove checks of dtypes, which cannot fail with fixed shapes and dtypes, but cost time at every call."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
    graph.recompile()


def _check_updates(graph: fx.GraphModule, roles: Mapping[fx.Node, str | None]) -> None:
    """Check that only state is updated in place: weights are shared, and so is the memory of inputs."""
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(value, fx.Node):
                continue
            role = roles.get(_viewed(value))
            if role is not None:
                raise ValueError(
                    f"the model's forward updates {role} in place ({node.target}). If it is state, name it in the "
                    "aliases that func returns with the model; otherwise work on a copy"
                )


def _viewed(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one is a view of, or the node itself."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.returns or schema.returns[0].alias_info is None:
            break
        if not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def _digest(exported: ExportedProgram, placeholders: Sequence[fx.Node]) -> str:
    digest = hashlib.sha256()
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            digest.update(str(module.graph).encode())
    for node in placeholders:
        value = node.meta["val"]
        digest.update(f"{node.name} {value.dtype} {tuple(value.shape)} {value.stride()} {value.device.type}".encode())
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.CONSTANT_TENSOR:
            constant = exported.constants[str(spec.target)].detach().cpu().contiguous()
            digest.update(bytes(constant.reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def _process_groups(graph: fx.GraphModule) -> frozenset[str]:
    names = set()
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else []:
            if getattr(node.target, "namespace", "") == "_c10d_functional":
                arguments = zip(node.target._schema.arguments, node.args, strict=False)
                names |= {str(value) for argument, value in arguments if argument.name == "group_name"}
    return frozenset(names)
