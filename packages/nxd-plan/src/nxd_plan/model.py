"""The interface of models to plan, and its implementation for our own Llama; for others see `transformers_model`.

A model consists of its decoder layers and the modules before and after them. Layers of one kind have the same class and
parameters of the same shapes, so one layer of each kind represents them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_engine.training_config import ModelSpec, llama_spec
from torch import nn


class PlannedModel(Protocol):
    """A causal language model to plan. All tensors that it creates are on the meta device."""

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The kind of each decoder layer; kinds are numbered in order of first appearance."""

    @property
    def layers_path(self) -> str:
        """The path of the list of decoder layers, such as "model.layers"."""

    @property
    def layer_class(self) -> type[nn.Module] | None:
        """The class of the layers between which pipeline stages are cut; None if the model's structure tells."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arguments of its forward; each is a tensor of tokens, `[batch, seq]`."""

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model supports; None if unknown."""

    @property
    def activation_modes(self) -> tuple[str, ...]:
        """The names in `profile.CHECKPOINTING` that the model supports."""

    @property
    def num_experts(self) -> int:
        """Experts per layer that can be distributed over ranks; 0 if there are none."""

    def outline(self) -> nn.Module:
        """Return the model with all its layers, to be cut into stages."""

    def on_rank(self, dtype: torch.dtype, *, sequence_parallel: bool) -> nn.Module:
        """Return this tensor-parallel rank's part of the model, with one layer of each kind, in order.

        Raises:
            ValueError: the model cannot be split this way.
        """

    def check_context(self) -> None:
        """Reject a model that cannot be trained with context parallelism.

        Raises:
            ValueError: the model does not support it.
        """

    def recipe_section(self) -> dict[str, Any]:
        """Return the `[model]` section of a recipe that trains it.

        Raises:
            ValueError: a recipe cannot describe the model.
        """

    def spec(self, dtype: torch.dtype, *, sequence_parallel: bool) -> ModelSpec:
        """Return the spec of the model as it is trained."""

    def config_lines(self, dtype_name: str) -> list[str]:
        """Return Python lines that create its config and the other objects that the generated code refers to."""

    def model_arguments(self, dtype_name: str, *, sequence_parallel: bool) -> list[str]:
        """Return, as Python, the further arguments of `initialize_parallel_model(nxd_config, ...)`."""


def first_of_kinds(kinds: Sequence[int]) -> list[int]:
    """Return the index of the first layer of each kind."""
    return [kinds.index(kind) for kind in range(max(kinds) + 1)]


def numbered(kinds: Sequence[Any]) -> tuple[int, ...]:
    """Replace each kind by a number, in order of first appearance."""
    order = list(dict.fromkeys(kinds))
    return tuple(map(order.index, kinds))


def keyword_lines(values: Mapping[str, Any]) -> str:
    """Format keyword arguments as Python, one per line."""
    return "".join(f"\n    {name}={value!r}," for name, value in values.items()) + "\n"


class _LayerStandIn(LlamaDecoderLayer):
    """An empty stand-in for a layer: where a model is cut does not depend on the contents of its layers."""

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
        """See `PlannedModel`; all layers are of one kind."""
        return (0,) * self.config.num_hidden_layers

    @property
    def max_positions(self) -> int:
        """See `PlannedModel`."""
        return self.config.max_position_embeddings

    def outline(self) -> LlamaForCausalLM:
        """See `PlannedModel`; empty stand-ins take the place of the layers."""
        model = LlamaForCausalLM(replace(self.config, num_hidden_layers=1), device="meta")
        model.model.layers = nn.ModuleList([_LayerStandIn() for _ in self.layer_kinds])
        return model

    def on_rank(self, dtype: torch.dtype, *, sequence_parallel: bool) -> LlamaForCausalLM:
        """See `PlannedModel`."""
        config = replace(self.config, num_hidden_layers=1)
        return LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=dtype, device="meta")

    def check_context(self) -> None:
        """See `PlannedModel`; every Llama supports it."""

    def recipe_section(self) -> dict[str, Any]:
        """See `PlannedModel`."""
        return asdict(self.config)

    def spec(self, dtype: torch.dtype, *, sequence_parallel: bool) -> ModelSpec:
        """See `PlannedModel`."""
        return llama_spec(self.config, sequence_parallel=sequence_parallel, dtype=dtype)

    def config_lines(self, dtype_name: str) -> list[str]:
        """See `PlannedModel`; lists the sizes that differ from the defaults."""
        default = asdict(LlamaConfig())
        sizes = {name: value for name, value in asdict(self.config).items() if value != default[name]}
        return [f"config = LlamaConfig({keyword_lines(sizes)})"]

    def model_arguments(self, dtype_name: str, *, sequence_parallel: bool) -> list[str]:
        """See `PlannedModel`."""
        options = [f"sequence_parallel={sequence_parallel}", f"dtype=torch.{dtype_name}"]
        return ["LlamaForCausalLM", "config", *options]
