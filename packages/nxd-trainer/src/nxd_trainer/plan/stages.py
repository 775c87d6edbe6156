"""Which parts of the model each pipeline stage has, from the real model on the meta device, really cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from nxd_pipeline.partition import PartitionOptions, partition_model
from torch import nn

from nxd_trainer.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYERS = "model.layers."
FIRST_LAYER = f"{LAYERS}0."


@dataclass(frozen=True)
class StageParts:
    """One pipeline stage on one rank of its tensor-parallel group.

    Attributes:
        num_layers: decoder layers.
        has_embedding: it begins with the embedding.
        has_head: it ends with norm, head and loss.
        elements: of all its parameters on this rank.
        layer_elements: of one decoder layer.
        head_elements: of norm and head; 0 without.
        largest: elements of its largest parameter.
        replicated: elements of the norms, of which every tensor-parallel rank has a copy.
    """

    num_layers: int
    has_embedding: bool
    has_head: bool
    elements: int
    layer_elements: int
    head_elements: int
    largest: int
    replicated: int


class _LayerStandIn(LlamaDecoderLayer):
    """In the place of a layer: where a model is cut does not depend on what is in its layers."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(0, device="meta"))


class StagePlanner:
    """Stages of one model at any degrees; where it is cut does not depend on the tensor-parallel one."""

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config
        self._stage_of: dict[int, dict[str, set[int]]] = {}

    @cached_property
    def _model(self) -> LlamaForCausalLM:
        model = LlamaForCausalLM(replace(self._config, num_hidden_layers=1), device="meta")
        model.model.layers = nn.ModuleList([_LayerStandIn() for _ in range(self._config.num_hidden_layers)])
        return model

    def shapes(self, dtype: torch.dtype) -> dict[str, torch.Size]:
        """Shapes of all parameters on one rank, by name; inside `planned_ranks`.

        Raises:
            ValueError: the model does not fit the tensor-parallel degree.
        """
        model = LlamaForCausalLM(replace(self._config, num_hidden_layers=1), dtype=dtype, device="meta")
        shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        of_layer = {name.removeprefix(FIRST_LAYER): shapes.pop(name) for name in [*shapes] if FIRST_LAYER in name}
        for layer in range(self._config.num_hidden_layers):
            shapes |= {f"{LAYERS}{layer}.{name}": shape for name, shape in of_layer.items()}
        return shapes

    def stages(self, num_stages: int, shapes: dict[str, torch.Size]) -> list[StageParts]:
        """All stages.

        Args:
            num_stages: of the whole pipeline.
            shapes: see there.

        Raises:
            ValueError: the model cannot be cut into so many.
        """
        if num_stages not in self._stage_of:
            self._stage_of[num_stages] = self._cut(num_stages)
        stage_of = self._stage_of[num_stages]
        names: list[list[str]] = [[] for _ in range(num_stages)]
        for name in shapes:
            for stage in stage_of[_part_of(name)]:
                names[stage].append(name)
        return [self._parts(own, shapes) for own in names]

    def _cut(self, num_stages: int) -> dict[str, set[int]]:
        """The stages that each part of the model is on."""
        model = self._model
        if num_stages == 1:
            return {_part_of(name): {0} for name, _ in model.named_parameters(remove_duplicate=False)}
        options = PartitionOptions(
            transformer_layer_cls=LlamaDecoderLayer, auto_partition=True, input_names=["input_ids", "labels"]
        )
        stage_of: dict[str, set[int]] = {}
        for index, stage in enumerate(partition_model(model, num_stages, options).stages):
            for path, _ in stage.module.named_parameters(remove_duplicate=False):
                stage_of.setdefault(_part_of(stage.logical_name(path)), set()).add(index)
        return stage_of

    def _parts(self, names: Sequence[str], shapes: dict[str, torch.Size]) -> StageParts:
        ties = self._config.tie_word_embeddings
        counted = [name for name in names if not (ties and name == HEAD and EMBEDDING in names)]
        layers = sorted({_part_of(name) for name in names if name.startswith(LAYERS)})
        return StageParts(
            num_layers=len(layers),
            has_embedding=EMBEDDING in names,
            has_head=NORM in names,
            elements=_elements(counted, shapes),
            layer_elements=_elements([name for name in names if _part_of(name) in layers[:1]], shapes),
            head_elements=_elements([name for name in names if name in (NORM, HEAD)], shapes),
            largest=max(shapes[name].numel() for name in counted),
            replicated=_elements([name for name in names if len(shapes[name]) == 1], shapes),
        )


def _part_of(name: str) -> str:
    """Of a parameter's name that of its decoder layer, or itself outside of the layers."""
    if not name.startswith(LAYERS):
        return name
    return LAYERS + name.removeprefix(LAYERS).partition(".")[0]


def _elements(names: Sequence[str], shapes: dict[str, torch.Size]) -> int:
    return sum(shapes[name].numel() for name in names)
