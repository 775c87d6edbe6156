"""The model of a checkpoint, and its weights with adapters merged, as `generate`, `serve` and `export` read them.

An adapter stored with its base model is merged box by box as boxes are read, so each reader gets its part at any
layout, and no whole tensor is ever in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from nxd_ckpt import Checkpoint, Shard, TensorInfo
from nxd_ckpt.boxes import Box
from nxd_ckpt.coordinator import coordinator_for, on_every_rank
from nxd_ckpt.interop import TensorSource, from_checkpoint
from nxd_ckpt.interop.source import fill
from nxd_layers.hf import parallelize
from nxd_layers.hf.towers import leave_out
from nxd_lora import check_tensors, config_from_adapter_config
from nxd_state import active_group, find_towers, get_device, move_model_to_device, splits_experts
from torch import Tensor, nn

from nxd_engine.checkpoints.fill import check_names, check_ties, fill_state
from nxd_engine.checkpoints.model_description import ModelDescription, adapter_in, holds_adapter_alone
from nxd_engine.checkpoints.state import OPTIMIZER_PREFIX, kind_of, model_state, weights_kept_as_masters
from nxd_engine.hugging_face.conversion import model_on_meta, reference_model
from nxd_engine.hugging_face.loading import make_room
from nxd_engine.models import LlamaForCausalLM
from nxd_engine.unwrap import tied_names

_AVERAGES = f"{OPTIMIZER_PREFIX}averages/"  # followed by the weight's name and the key
_AVERAGE_KEY = "/weight_average"
_MAGNITUDE = "lora_magnitude_vector"
_OF_EXPERTS = "lora_A_"  # followed by the name of a weight [experts, ., .]
_FACTORS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}  # as PEFT calls them


def average_name(weight: str) -> str:
    """Return the name in a checkpoint of the moving average of a weight."""
    return f"{_AVERAGES}{weight}{_AVERAGE_KEY}"


def holds_average(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a moving average of the weights."""
    return any(name.startswith(_AVERAGES) for name in checkpoint.tensors)


@dataclass(frozen=True)
class ModelTensors:
    """A checkpoint's model tensors as a `TensorSource`; weights that it omits are read from master weights.

    Args:
        source: all tensors of the checkpoint.
        averaged: whether to read the moving averages of the weights that have one, in the weights' dtypes.
    """

    source: TensorSource
    averaged: bool = False

    objects = None
    is_mapped = False

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type and shape of every tensor."""
        return {name: self.source.tensors[stored] for name, stored in self._weights.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """Boxes that cover `box`, see `TensorSource`; of the average if it is to be read."""
        average = average_name(name)
        if not self.averaged or average not in self.source.tensors:
            return self.source.shards(self._weights[name], box)
        dtype = self.tensors[name].dtype
        return [Shard(it.tensor.to(dtype), it.box.offsets) for it in self.source.shards(average, box)]

    @cached_property
    def _weights(self) -> Mapping[str, str]:
        weights = {name: name for name in self.source.tensors if kind_of(name) == "model"}
        return weights | weights_kept_as_masters(self.source.tensors)


@dataclass(frozen=True)
class ModelWeights:
    """A `TensorSource`, and a `WeightSource` of nxd_trace, that can be sent to workers.

    Args:
        source: the model's tensors as they are stored, with those of an adapter.
        branches: the adapter's branches, by the weight that each is merged into.
    """

    source: TensorSource
    branches: Mapping[str, "_Branch"]

    objects = None
    is_mapped = False

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type and shape of every tensor."""
        factors = {name for branch in self.branches.values() for name in (branch.a, branch.b, branch.magnitude)}
        return {name: info for name, info in self.source.tensors.items() if name not in factors}

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of this shape that begins at `offsets`, on the CPU."""
        box = Box(tuple(offsets), tuple(shape))
        values = torch.empty(box.shape, dtype=self.source.tensors[name].dtype)
        fill(self.source, name, box, values)
        if name in self.branches:
            values.copy_(self.branches[name].merged(name, box, values, self.source))
        return values

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """The box itself, see `TensorSource`."""
        return [Shard(self.read_box(name, box.offsets, box.shape), box.offsets)]


@dataclass(frozen=True)
class _Branch:
    """The adapter of one layer: A `[r, in]` and B `[out, r]` by name, for a weight `[out, in]`, or transposed.

    For experts all three have a leading expert dim. DoRA adds magnitudes `[out]`, for a weight that is not transposed.
    """

    a: str
    b: str
    scale: float
    is_transposed: bool
    magnitude: str | None = None

    def merged(self, weight: str, box: Box, values: Tensor, source: TensorSource) -> Tensor:
        """Return a box of the weight, given its values, with the adapter merged in."""
        merged = _widened(values) + self.delta(box, source)
        if self.magnitude is None:
            return merged
        rows = Box((box.offsets[0], 0), (box.shape[0], source.tensors[weight].global_shape[1]))
        whole = torch.empty(rows.shape, dtype=source.tensors[weight].dtype)
        fill(source, weight, rows, whole)
        norms = (_widened(whole) + self.delta(rows, source)).norm(dim=1)
        magnitude = torch.empty(box.shape[0], dtype=source.tensors[self.magnitude].dtype)
        fill(source, self.magnitude, Box(box.offsets[:1], box.shape[:1]), magnitude)
        return merged * (_widened(magnitude) / norms.where(norms > 0, 1.0)).unsqueeze(1)

    def delta(self, box: Box, source: TensorSource) -> Tensor:
        """Return the adapter's update of a box of the weight, in float32 or wider, computed as in `LoraModel.merge`."""
        out_dim, in_dim = (-1, -2) if self.is_transposed else (-2, -1)
        experts, first = box.shape[:-2], box.offsets[:-2]
        rank, b_dtype = source.tensors[self.a].global_shape[-2], source.tensors[self.b].dtype
        a = torch.empty(*experts, rank, box.shape[in_dim], dtype=source.tensors[self.a].dtype)
        b = torch.empty(*experts, box.shape[out_dim], rank, dtype=b_dtype)
        fill(source, self.a, Box((*first, 0, box.offsets[in_dim]), tuple(a.shape)), a)
        fill(source, self.b, Box((*first, box.offsets[out_dim], 0), tuple(b.shape)), b)
        product = self.scale * (_widened(b) @ _widened(a))
        return product.transpose(-2, -1) if self.is_transposed else product


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize < 4 else tensor


def _shape(source: TensorSource, name: str) -> tuple[int, ...] | None:
    return tuple(source.tensors[name].global_shape) if name in source.tensors else None


def load_model(weights: ModelWeights, description: ModelDescription, dtype: torch.dtype, where: str) -> nn.Module:
    """Return the model on this rank's device, with its part of the weights. Called by all ranks.

    Our own Llama is used if it supports the model, otherwise transformers.

    Raises:
        ValueError: transformers is missing or lacks the model, or it cannot be split over this many ranks.
        CheckpointError: the weights are damaged, or belong to another model; on all ranks.
    """
    model = _model_without_weights(description, dtype)
    state = model_state(model)
    coordinator = coordinator_for(None)
    tied = tied_names(model)
    check_names(weights.tensors, state, tied, where, coordinator, can_be_lax=False)
    on_every_rank(coordinator, f"reading {where}", lambda: check_ties(weights, tied, where))
    on_every_rank(coordinator, f"reading {where}", lambda: fill_state(weights, state))
    return model


def _model_without_weights(description: ModelDescription, dtype: torch.dtype) -> nn.Module:
    degree = active_group("tp").size
    config = description.own_llama_at(degree)
    if config is None:
        try:
            return transformers_model(description, dtype)
        except ValueError:
            description.check_own_llama(degree)
            raise
    with torch.device("meta"):
        model = LlamaForCausalLM(config, dtype=dtype)
    move_model_to_device(model, get_device())
    return model


def transformers_model(description: ModelDescription, dtype: torch.dtype, *, text_only: bool = False) -> nn.Module:
    """Return this rank's part of the transformers model, with memory, but without values for its parameters.

    With `text_only`, a multimodal model has no encoders and projectors of images and sounds, and only takes text.
    """
    model = model_on_meta_of(description)
    if text_only:
        leave_out(model, find_towers(model))
    model = parallelize(model, expert_parallel=splits_experts())
    make_room(model, dtype)
    return model


def model_on_meta_of(description: ModelDescription, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the whole transformers model, without memory; in its config's dtype if `dtype` is None."""
    model: nn.Module | None = model_on_meta(description.config, dtype)
    if model is None:
        if "auto_map" in description.config:
            raise ValueError(
                f"{description.architecture} is Python code shipped with the weights (auto_map in its config.json), "
                "which is never run; pass a model that transformers itself provides"
            )
        raise ValueError(
            f"{description.architecture} needs transformers, which is not installed or too old to have it; install "
            "transformers, or a newer version"
        )
    return model


def model_weights(checkpoint: Checkpoint, description: ModelDescription, *, averaged: bool = False) -> ModelWeights:
    """Return the weights of the model in a checkpoint, with its adapter, if any, merged into them.

    Raises:
        ValueError: the adapter is stored without its base model, is not LoRA, or does not fit the model; or a weight
            that it is merged into is tied to another.
    """
    if holds_adapter_alone(checkpoint):
        raise ValueError(
            f"checkpoint {checkpoint.tag!r} holds a LoRA adapter without its base model; load it with load_checkpoint "
            "into that model, or pass the base model, and this one as --adapter"
        )
    tensors = ModelTensors(from_checkpoint(checkpoint), averaged)
    return merged_weights(tensors, adapter_in(checkpoint), description)


def merged_weights(
    source: TensorSource, adapter: Mapping[str, Any] | None, description: ModelDescription
) -> ModelWeights:
    """Return weights with an adapter merged into them."""
    return ModelWeights(source, {} if adapter is None else _branches(source, adapter, description))


def _branches(source: TensorSource, adapter: Mapping[str, Any], description: ModelDescription) -> Mapping[str, _Branch]:
    config = config_from_adapter_config(adapter)
    tied = _tied_weights(description)
    outline: nn.Module | None = None
    found = {}
    for a in source.tensors:
        layer, _, factor = a.rpartition(".")
        if factor.startswith(_OF_EXPERTS):
            outline = model_on_meta_of(description) if outline is None else outline
            weight, branch = _branch_of_experts(source, a, outline, config.scale)
            found[weight] = branch
        if factor not in _FACTORS:
            continue
        weight, b = f"{layer}.weight", f"{layer}.{_FACTORS[factor]}"
        if weight in tied:
            raise ValueError(
                f"{weight} is tied to another weight, so merging an adapter into it would change both. Untie them "
                "(give each its own copy) before training"
            )
        shapes = {name: source.tensors[name].global_shape for name in (weight, a, b) if name in source.tensors}
        inner, inputs = shapes[a] if len(shapes[a]) == 2 else (None, None)
        outputs = (*shapes.get(b, ()), None)[0]
        if shapes.get(b) != (outputs, inner) or shapes.get(weight) not in ((outputs, inputs), (inputs, outputs)):
            listed = ", ".join(f"{name} is {list(shape)}" for name, shape in shapes.items())
            raise ValueError(f"the adapter does not fit the model: {listed}; pass an adapter of this model")
        # An embedding is [vocab, hidden], that is [in, out]; so is Conv1D, which the adapter's description mentions.
        may_be_transposed = factor == "lora_embedding_A" or bool(adapter.get("fan_in_fan_out"))
        is_transposed = may_be_transposed and shapes[weight] == (inputs, outputs)
        if is_transposed and factor != "lora_embedding_A" and inputs == outputs:  # if it is square, the class decides
            outline = model_on_meta_of(description) if outline is None else outline
            is_transposed = type(outline.get_submodule(layer)).__name__ == "Conv1D"
        magnitude = f"{layer}.{_MAGNITUDE}" if config.use_dora else None
        if magnitude is not None and _shape(source, magnitude) != (outputs,):
            raise ValueError(f"the adapter does not fit the model: {magnitude} is not [{outputs}]; save both again")
        found[weight] = _Branch(a, b, config.scale, is_transposed, magnitude)
    factors = {name: it.global_shape for name, it in source.tensors.items() if ".lora_" in name}
    check_tensors(config, factors, "of the adapter")
    return found


def _branch_of_experts(source: TensorSource, a: str, outline: nn.Module, scale: float) -> tuple[str, _Branch]:
    """Return the name of the expert weight that a factor A belongs to, and its branch."""
    layer, _, factor = a.rpartition(".")
    part = factor.removeprefix(_OF_EXPERTS)
    weight, b = f"{layer}.{part}".lstrip("."), f"{a.removesuffix(factor)}lora_B_{part}"
    shapes = {name: source.tensors[name].global_shape for name in (weight, a, b) if name in source.tensors}
    experts, rank, inputs = shapes[a] if len(shapes[a]) == 3 else (None, None, None)
    outputs = shapes[b][1] if len(shapes.get(b, ())) == 3 else None
    is_transposed = _stores_transposed(outline, layer)
    expected = (experts, inputs, outputs) if is_transposed else (experts, outputs, inputs)
    if shapes.get(weight) != expected or shapes.get(b) != (experts, outputs, rank):
        listed = ", ".join(f"{name} is {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"the adapter does not fit the model: {listed}; pass an adapter of this model")
    return weight, _Branch(a, b, scale, is_transposed)


def _stores_transposed(outline: nn.Module, layer: str) -> bool:
    try:
        return bool(getattr(outline.get_submodule(layer), "is_transposed", False))
    except AttributeError as error:
        raise ValueError(
            f"the adapter does not fit the model: it has no {layer}; pass an adapter of this model"
        ) from error


def _tied_weights(description: ModelDescription) -> set[str]:
    reference = reference_model(description.config)
    if reference is not None:
        return {*reference.tied, *reference.tied.values()}
    return {"model.embed_tokens.weight"} if description.config.get("tie_word_embeddings") else set()
