"""Finds the parts of the model on each pipeline stage by cutting the real model on the meta device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nxd_pipeline.partition import PartitionOptions, partition_model
from nxd_state import get_shard_spec
from nxd_state.parameter_marks import is_expert
from torch import nn

from nxd_plan.model import PlannedModel, first_of_kinds


@dataclass(frozen=True)
class StageParameter:
    """A parameter of a stage.

    Attributes:
        elements: elements of this rank's part.
        place: 0 before the decoder layers, then 1 for the first of the stage's layers and so on, then after the layers.
        is_matrix: whether it has several dims.
        is_expert: whether it is an expert's and sharded differently from the other layers.
        is_tied: whether another stage has it, too.
        is_trained: whether it has a gradient and optimizer states.
    """

    elements: int
    place: int
    is_matrix: bool
    is_expert: bool
    is_tied: bool
    is_trained: bool = True


@dataclass(frozen=True)
class StageParts:
    """One pipeline stage on one rank of its tensor-parallel group.

    Attributes:
        layers: the kind of each of its decoder layers.
        has_embedding: whether it begins with the embedding.
        has_head: whether it ends with norm, head and loss.
        elements: elements of all its parameters on this rank.
        layer_elements: elements of each decoder layer.
        head_elements: elements of norm and head; 0 if it has none.
        largest: elements of its largest trained parameter.
        replicated: elements of the trained parameters that every tensor-parallel rank has a copy of, such as norms.
        tied: elements of the parameters that another stage also has.
        experts: elements of the expert parameters that are sharded differently from the other layers.
        frozen: elements of the parameters that are not trained, such as a multimodal model's towers.
        parameters: all its parameters, in the model's order.
    """

    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    elements: int
    layer_elements: tuple[int, ...]
    head_elements: int
    largest: int
    replicated: int
    tied: int
    experts: int = 0
    frozen: int = 0
    parameters: tuple[StageParameter, ...] = ()


@dataclass(frozen=True)
class RankParameter:
    """A parameter on one rank of its tensor-parallel group.

    Attributes:
        elements: elements of this rank's part.
        is_whole: whether every rank has all of it.
        first_name: the first name of a tied parameter; otherwise its own name.
        is_expert: whether it is an expert's and sharded differently from the other layers.
        is_matrix: whether it has several dims.
        is_trained: whether it has a gradient and optimizer states.
    """

    elements: int
    is_whole: bool
    first_name: str
    is_expert: bool = False
    is_matrix: bool = True
    is_trained: bool = True


Parameters = Mapping[str, RankParameter]


class StagePlanner:
    """Finds the stages of one model at any degrees; the cuts do not depend on the tensor-parallel degree."""

    def __init__(self, model: PlannedModel) -> None:
        self._model = model
        self._prefix = f"{model.layers_path}."
        self._stage_of: dict[int, dict[str, set[int]]] = {}

    @cached_property
    def _outline(self) -> nn.Module:
        return self._model.outline()

    def parameters(self, on_rank: nn.Module) -> Parameters:
        """Return all parameters of the model on one rank, by name, in order.

        Args:
            on_rank: the rank's part of the model, with one layer of each kind; see `PlannedModel.on_rank`.
        """
        named: dict[str, RankParameter] = {}
        names: dict[nn.Parameter, str] = {}
        for name, parameter in on_rank.named_parameters(remove_duplicate=False):
            first_name = names.setdefault(parameter, name)
            is_whole = get_shard_spec(parameter) is None
            named[name] = RankParameter(
                parameter.numel(),
                is_whole,
                first_name,
                is_expert(parameter),
                is_matrix=parameter.dim() > 1,
                is_trained=parameter.requires_grad,
            )
        of_kinds = [
            [name.removeprefix(f"{self._prefix}{kind}.") for name in named if name.startswith(f"{self._prefix}{kind}.")]
            for kind in range(len(first_of_kinds(self._model.layer_kinds)))
        ]
        whole: dict[str, RankParameter] = {}
        for name, on_this in named.items():
            if not name.startswith(self._prefix):
                whole[name] = on_this
            elif not any(it.startswith(self._prefix) for it in whole):
                whole |= self._of_layers(named, of_kinds)
        return whole

    def _of_layers(self, named: Parameters, of_kinds: Sequence[Sequence[str]]) -> dict[str, RankParameter]:
        made = {}
        for layer, kind in enumerate(self._model.layer_kinds):
            for name in of_kinds[kind]:
                of_kind, full_name = named[f"{self._prefix}{kind}.{name}"], f"{self._prefix}{layer}.{name}"
                made[full_name] = replace(of_kind, first_name=full_name)
        return made

    def stages(self, num_stages: int, parameters: Parameters) -> list[StageParts]:
        """Return all stages of a pipeline; `parameters` is the result of the method of that name."""
        if num_stages not in self._stage_of:
            self._stage_of[num_stages] = self._cut(num_stages)
        stage_of = self._stage_of[num_stages]
        names: list[list[str]] = [[] for _ in range(num_stages)]
        for name in parameters:
            for stage in stage_of[self._part_of(name)]:
                names[stage].append(name)
        return [self._parts(stage, names, parameters) for stage in range(num_stages)]

    def _cut(self, num_stages: int) -> dict[str, set[int]]:
        """Return the stages that each part of the model is on."""
        model = self._outline
        if num_stages == 1:
            return {self._part_of(name): {0} for name, _ in model.named_parameters(remove_duplicate=False)}
        options = PartitionOptions(
            transformer_layer_cls=self._model.layer_class, auto_partition=True, input_names=self._model.input_names
        )
        stage_of: dict[str, set[int]] = {}
        for index, stage in enumerate(partition_model(model, num_stages, options).stages):
            for name, _ in stage.named_parameters(remove_duplicate=False):
                stage_of.setdefault(self._part_of(name), set()).add(index)
        return stage_of

    def _parts(self, stage: int, names: Sequence[Sequence[str]], parameters: Parameters) -> StageParts:
        own = names[stage]
        firsts = {parameters[name].first_name for name in own}
        elsewhere = {parameters[name].first_name for it, others in enumerate(names) if it != stage for name in others}
        layers: dict[str, list[str]] = {}
        for name in own:
            if name.startswith(self._prefix):
                layers.setdefault(self._part_of(name), []).append(name)
        has_head = stage == len(names) - 1
        place_of = dict.fromkeys(own, 0) | dict.fromkeys(self._after_layers(own) if layers else [], len(layers) + 1)
        place_of |= {name: place for place, of_layer in enumerate(layers.values(), 1) for name in of_layer}
        once = {parameters[name].first_name: name for name in reversed(own)}
        return StageParts(
            layers=tuple(self._model.layer_kinds[int(layer.removeprefix(self._prefix))] for layer in layers),
            has_embedding=stage == 0,
            has_head=has_head,
            elements=_elements(firsts, parameters),
            layer_elements=tuple(_elements(of_layer, parameters) for of_layer in layers.values()),
            head_elements=_elements(self._after_layers(own), parameters) if has_head else 0,
            largest=max(parameters[name].elements for name in own if parameters[name].is_trained),
            replicated=_elements(
                [name for name in firsts if parameters[name].is_whole and parameters[name].is_trained], parameters
            ),
            tied=_elements(firsts & elsewhere, parameters),
            experts=_elements([name for name in firsts if parameters[name].is_expert], parameters),
            frozen=_elements([name for name in firsts if not parameters[name].is_trained], parameters),
            parameters=tuple(
                StageParameter(
                    it.elements,
                    place_of[name],
                    is_matrix=it.is_matrix,
                    is_expert=it.is_expert,
                    is_tied=it.first_name in elsewhere,
                    is_trained=it.is_trained,
                )
                for name, it in ((name, parameters[name]) for name in own)
                if once[it.first_name] == name
            ),
        )

    def _after_layers(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of norm and head, from names in the model's order."""
        last = max(place for place, name in enumerate(names) if name.startswith(self._prefix))
        return names[last + 1 :]

    def _part_of(self, name: str) -> str:
        """Return the name of a parameter's decoder layer, or its own name outside of the layers."""
        if not name.startswith(self._prefix):
            return name
        return self._prefix + name.removeprefix(self._prefix).partition(".")[0]


def _elements(names: Iterable[str], parameters: Parameters) -> int:
    return sum(parameters[name].elements for name in names)
