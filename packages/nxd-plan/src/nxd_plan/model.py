"""The interface of models for a plan, and its implementation for our own Llama; for others see `transformers_model`.

A model is made of what comes before its decoder layers, the layers, and what comes after them. Layers of one kind have
the same class and parameters of the same shapes, so that one of each is enough to know them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from nxd_engine.model_spec import ModelSpec, llama_spec
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from torch import nn


class PlannedModel(Protocol):
    """A causal language model to be planned. Everything that it makes is on the meta device."""

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The kind of each decoder layer: kinds are numbered as they come."""

    @property
    def layers_path(self) -> str:
        """Of the list of decoder layers, such as "model.layers"."""

    @property
    def layer_class(self) -> type[nn.Module] | None:
        """Of the layers between which a pipeline is cut; None where the model tells."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """What its forward takes; each is tokens, `[batch, seq]`."""

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model is made for; None if it does not say."""

    @property
    def activation_modes(self) -> tuple[str, ...]:
        """Names of `profile.CHECKPOINTING` that the model knows."""

    @property
    def num_experts(self) -> int:
        """Experts of a layer that can be distributed over ranks; 0 if there are none."""

    def outline(self) -> nn.Module:
        """The model with all its layers, to be cut into stages."""

    def on_rank(self, dtype: torch.dtype, *, sequence_parallel: bool) -> nn.Module:
        """This tensor-parallel rank's part of the model, with one layer of each kind, in their order.

        Raises:
            ValueError: the model cannot be split so.
        """

    def check_context(self) -> None:
        """Refuse what cannot be trained with its sequences cut.

        Raises:
            ValueError: the model is such a one.
        """

    def recipe_section(self) -> dict[str, Any]:
        """`[model]` of a recipe that trains it.

        Raises:
            ValueError: a recipe cannot say it.
        """

    def spec(self, dtype: torch.dtype, *, sequence_parallel: bool) -> ModelSpec:
        """The model as it is trained."""

    def config_lines(self, dtype_name: str) -> list[str]:
        """Python that makes its config, and what else the other lines of Python name."""

    def model_arguments(self, dtype_name: str, *, sequence_parallel: bool) -> list[str]:
        """In Python, what follows the first argument of `initialize_parallel_model(nxd_config, ...)`."""


def first_of_kinds(kinds: Sequence[int]) -> list[int]:
    """The first layer of each kind."""
    return [kinds.index(kind) for kind in range(max(kinds) + 1)]


def numbered(kinds: Sequence[Any]) -> tuple[int, ...]:
    """Numbers in place of what tells kinds apart."""
    order = list(dict.fromkeys(kinds))
    return tuple(map(order.index, kinds))


def keyword_lines(values: Mapping[str, Any]) -> str:
    """Arguments as Python writes them, one to a line."""
    return "".join(f"\n    {name}={value!r}," for name, value in values.items()) + "\n"


class _LayerStandIn(LlamaDecoderLayer):
    """In the place of a layer: where a model is cut does not depend on what is in its layers."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(0, device="meta"))


@dataclass(frozen=True)
class OwnLlama:
    """The Llama of this package; see `PlannedModel`.

    Attributes:
        config: its sizes.
    """

    config: LlamaConfig

    layers_path = "model.layers"
    layer_class = LlamaDecoderLayer
    input_names = ("input_ids", "labels")
    activation_modes = ("none", "CoreAttention", "full")
    num_experts = 0

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """All are alike."""
        return (0,) * self.config.num_hidden_layers

    @property
    def max_positions(self) -> int:
        """See `PlannedModel`."""
        return self.config.max_position_embeddings

    def outline(self) -> LlamaForCausalLM:
        """See `PlannedModel`; in place of its layers are others without parts."""
        model = LlamaForCausalLM(replace(self.config, num_hidden_layers=1), device="meta")
        model.model.layers = nn.ModuleList([_LayerStandIn() for _ in self.layer_kinds])
        return model

    def on_rank(self, dtype: torch.dtype, *, sequence_parallel: bool) -> LlamaForCausalLM:
        """See `PlannedModel`."""
        config = replace(self.config, num_hidden_layers=1)
        return LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=dtype, device="meta")

    def check_context(self) -> None:
        """See `PlannedModel`; all of these can."""

    def recipe_section(self) -> dict[str, Any]:
        """Its sizes."""
        return asdict(self.config)

    def spec(self, dtype: torch.dtype, *, sequence_parallel: bool) -> ModelSpec:
        """See `PlannedModel`."""
        return llama_spec(self.config, sequence_parallel=sequence_parallel, dtype=dtype)

    def config_lines(self, dtype_name: str) -> list[str]:
        """Sizes that are not as by default."""
        default = asdict(LlamaConfig())
        sizes = {name: value for name, value in asdict(self.config).items() if value != default[name]}
        return [f"config = LlamaConfig({keyword_lines(sizes)})"]

    def model_arguments(self, dtype_name: str, *, sequence_parallel: bool) -> list[str]:
        """See `PlannedModel`."""
        options = [f"sequence_parallel={sequence_parallel}", f"dtype=torch.{dtype_name}"]
        return ["LlamaForCausalLM", "config", *options]
