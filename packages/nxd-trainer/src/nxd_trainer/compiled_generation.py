"""Compiled generators from checkpoints, for our Llama (a decoder of `nxd_trace.generation`) and transformers models."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from nxd_engine.checkpoints.merged_weights import ModelWeights, model_on_meta_of, transformers_model
from nxd_engine.checkpoints.model_description import ModelDescription
from nxd_engine.logs import get_logger
from nxd_engine.models import LlamaCache, LlamaConfig, LlamaForCausalLM
from nxd_engine.models.llama_config import long_rope_from, rotary_tables
from nxd_layers import gather_from_tensor_model_parallel_region
from nxd_layers.hf import number_of_experts, parallelize
from nxd_layers.key_value_heads import kv_size_multiplier_for
from nxd_state import ParallelDegrees, active_group, model_parallel_is_initialized, splits_experts
from nxd_trace import TraceContent, source_digest
from nxd_trace.generation import (
    CacheLayer,
    CacheView,
    Generator,
    HuggingFaceDecoder,
    PromptInputs,
    PromptInputShapes,
    compile_generator,
)
from torch import Tensor, nn
from torch.nn import functional

from nxd_trainer.image_features import ImageFeatures
from nxd_trainer.image_prompts import ImagePrompts, probe_inputs
from nxd_trainer.opened_model import TextCodec, open_codec, open_image_processor, open_model, reads_images


class LlamaDecoder(nn.Module):
    """A `LlamaForCausalLM` as a decoder, with a cache of fixed shape and a position for each token.

    Args:
        model: a model built with `sequence_parallel=False`; may be on the meta device.

    Raises:
        ValueError: the model is sequence parallel.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        if model.sequence_parallel:
            raise ValueError("generation with a cache needs a model built with sequence_parallel=False")
        self.model = model
        self.max_positions = model.config.max_position_embeddings
        dtype = next(model.parameters()).dtype
        # Stored as data, since the graph would recompute them for every token: [variants, positions, head].
        self._long_from = long_rope_from(model.config)
        lengths = [self.max_positions] if self._long_from is None else [self._long_from, self.max_positions]
        like = torch.empty(0, dtype=dtype, device="cpu")
        variants = [rotary_tables(torch.arange(length), length, model.config, like=like) for length in lengths]
        cos, sin = (_stacked(tables, self.max_positions) for tables in zip(*variants, strict=True))
        self.cos, self.sin = nn.Buffer(cos, persistent=False), nn.Buffer(sin, persistent=False)

    def cache_layers(self) -> Sequence[CacheLayer]:
        """Return one cache layer per model layer, all alike."""
        config, size = self.model.config, active_group("tp").size
        heads = config.num_key_value_heads * kv_size_multiplier_for(config.num_key_value_heads, size) // size
        layer = CacheLayer(heads, config.head_size, config.head_size, next(self.model.parameters()).dtype)
        return [layer] * config.num_hidden_layers

    def forward(self, input_ids: Tensor, positions: Tensor, cache: CacheView) -> Tensor:
        """Map ids and positions `[batch, seq]` to the logits after the last column, `[batch, vocab]`."""
        llama = self.model.model
        hidden_sbh = llama.embed_tokens(input_ids.t())
        # A sequence's newest token selects the variant for all of its columns.
        variant = cache.newest >= self._long_from if self._long_from else cache.newest.new_zeros(())
        variant = variant.long().expand_as(positions)
        rotary = (self.cos[variant, positions].unsqueeze(1), self.sin[variant, positions].unsqueeze(1))
        for layer in llama.layers:
            hidden_sbh = layer(hidden_sbh, rotary, _LayersCache(cache), cache.mask)
        logits = self.model.lm_head(llama.norm(hidden_sbh[-1:]))  # [1, batch, vocab/tp]
        whole: Tensor = gather_from_tensor_model_parallel_region(logits)[0]
        return whole


def _stacked(tables: Sequence[Tensor], length: int) -> Tensor:
    """Pad shorter tables with zeros that no sequence reads, and stack them: `[variants, positions, head]`."""
    return torch.stack([functional.pad(table, (0, 0, 0, length - len(table))) for table in tables])


class _LayersCache(LlamaCache):
    """The cache interface that the layers call."""

    def __init__(self, view: CacheView) -> None:
        super().__init__()
        self._view = view

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._view.update(key, value, layer)


@dataclass(frozen=True)
class BuildLlamaDecoder:
    """Builds the decoder in each worker, on the meta device; a class so that it can be pickled."""

    config: LlamaConfig  # the model's sizes
    dtype: torch.dtype  # the dtype of all parameters

    def __call__(self) -> LlamaDecoder:
        """The decoder, without weights."""
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config, dtype=self.dtype)
        return LlamaDecoder(model)


@dataclass(frozen=True)
class BuildHuggingFaceDecoder:
    """Like `BuildLlamaDecoder`, for a transformers model, with memory allocated."""

    description: ModelDescription  # the model's description
    dtype: torch.dtype  # the dtype of all parameters
    input_shapes: PromptInputShapes | None = None  # what it takes beside token ids

    def __call__(self) -> HuggingFaceDecoder:
        """The decoder, without weights."""
        model = transformers_model(self.description, self.dtype, text_only=True)
        return HuggingFaceDecoder(model, self.input_shapes)


@dataclass(frozen=True)
class CompilableCheckpoint:
    """A checkpoint to generate text with."""

    description: ModelDescription  # the model's description
    dtype: torch.dtype  # the dtype of its weights
    weights: ModelWeights  # the model's weights, with an adapter merged into them
    codec: TextCodec  # the tokenizer and chat template
    max_positions: int  # the longest text that the model can be compiled for, in tokens
    images: ImagePrompts[PromptInputs] | None = None  # reads prompts with images, if the model is to take them
    input_shapes: PromptInputShapes | None = None  # what it then takes beside token ids

    def compile(
        self,
        *,
        batch_size: int,
        max_length: int | None = None,
        tp_degree: int = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        draft: Self | None = None,
        num_speculative_tokens: int = 4,
        **settings: Any,
    ) -> Generator:
        """Compile a generator; each worker reads only its part of the weights.

        If this machine has already compiled the same model, sizes and versions, that generator is reused.

        Args:
            batch_size: concurrent sequences.
            max_length: tokens of a prompt and its completion; the model's maximum if None.
            tp_degree: ranks that share the weights.
            context_parallel_size: replicas of these that read a prompt together.
            expert_parallel_size: ranks that a model's experts are divided among, as for `compile_generator`.
            draft: a smaller model with the same tokenizer that drafts tokens, on one rank. It does not change the text.
            num_speculative_tokens: draft tokens that are verified at a time, with a draft model.
            **settings: as for `nxd_trace.generation.compile_generator`.

        Raises:
            ValueError: the model cannot be compiled, cannot be split over this many ranks, or supports only shorter
                sequences; or the draft model has another vocabulary.
            nxd_ckpt.CheckpointError: the checkpoint is damaged.
        """
        max_length = max_length or self.max_positions
        sizes = {"batch_size": batch_size, **settings}
        ranks = (tp_degree, context_parallel_size, expert_parallel_size)
        if draft is None:
            return self._compile(max_length, *ranks, **sizes)
        self._check_draft(draft, max_length, num_speculative_tokens)
        with ExitStack() as on_failure:
            model = self._compile(max_length, *ranks, num_speculative_tokens=num_speculative_tokens, **sizes)
            on_failure.callback(model.close)
            guessing = draft._compile(max_length, num_speculative_tokens=1, **sizes)
            on_failure.callback(guessing.close)
            generator = Generator(model.model, guessing.model)
            on_failure.pop_all()
        return generator

    def _check_draft(self, draft: Self, max_length: int, num_speculative_tokens: int) -> None:
        """Raise ValueError before anything is compiled if the draft model does not fit."""
        what = f"the draft model ({draft.description.architecture})"
        ours, theirs = (it.codec.tokenizer.vocabulary for it in (self, draft))
        if ours != theirs:
            differing = min(token for token, _ in ours.items() ^ theirs.items())
            raise ValueError(
                f"{what} has a different tokenizer: {differing!r} is token {theirs.get(differing)} there, but "
                f"{ours.get(differing)} in the model's; use a draft model of the same family"
            )
        sizes = [it.description.config.get("vocab_size") for it in (self, draft)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{what} has vocab_size={sizes[1]}, the model {sizes[0]}; use a draft model with the same vocabulary"
            )
        if max_length > draft.max_positions:
            raise ValueError(
                f"{what} supports {draft.max_positions} tokens, fewer than the {max_length} of a text; compile for "
                "shorter texts (--max-length), or use another draft model"
            )
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be 1 or more with a draft model")

    def _compile(
        self,
        max_length: int,
        tp_degree: int = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        **settings: Any,
    ) -> Generator:
        if expert_parallel_size > 1:
            self._check_experts(expert_parallel_size)
        if max_length > self.max_positions:
            raise ValueError(
                f"a length of {max_length} tokens is more than the {self.max_positions} that the model can be compiled "
                "for (max_position_embeddings, or its attention window); use that or less"
            )
        content = {
            "config": self.description.config,
            "stored_shapes": self.description.stored_shapes,
            "dtype": str(self.dtype),
            "code": source_digest("nxd_trainer", "nxd_layers"),
            "transformers": version("transformers") if find_spec("transformers") else None,
        }
        if self.input_shapes is not None:
            content["input_shapes"] = {name: str(value) for name, value in vars(self.input_shapes).items()}
        check = partial(self._check_degrees, tp_degree, context_parallel_size, expert_parallel_size)
        return compile_generator(
            self.decoder_builder(tp_degree),
            max_length=max_length,
            tp_degree=tp_degree,
            context_parallel_size=context_parallel_size,
            expert_parallel_size=expert_parallel_size,
            weights=self.weights,
            input_shapes=self.input_shapes,
            content=TraceContent(content, check=check),
            **settings,
        )

    def decoder_builder(self, tp_degree: int) -> BuildLlamaDecoder | BuildHuggingFaceDecoder:
        """Return the builder of the decoder in each worker: our own Llama if it supports the model at this degree."""
        config = self.description.own_llama_at(tp_degree)
        if config is not None:
            return BuildLlamaDecoder(config, self.dtype)
        return BuildHuggingFaceDecoder(replace(self.description, files={}), self.dtype, self.input_shapes)

    def _check_experts(self, expert_parallel_size: int) -> None:
        """Raise ValueError if the model has no experts, or this many ranks do not divide them."""
        is_own = self.description.own_llama_at(1) is not None
        experts = 0 if is_own else number_of_experts(model_on_meta_of(self.description))
        if not experts:
            raise ValueError(
                f"expert_parallel_size={expert_parallel_size} needs a model with experts and an expert-parallel plan, "
                f"which {self.description.architecture} is not; leave it out"
            )
        if experts % expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size={expert_parallel_size} does not divide the {experts} experts of a layer of "
                f"{self.description.architecture}; use a divisor of {experts}"
            )

    def _check_degrees(self, tp_degree: int, replicas: int, expert_parallel_size: int) -> None:
        """Raise ValueError, before workers start, if the model cannot be compiled or split over this many ranks."""
        if self.description.own_llama_at(tp_degree) is not None:
            return
        from nxd_plan.profile import planned_ranks  # noqa: PLC0415 - slow to load, and rarely needed

        splits_each = replicas % expert_parallel_size == 0  # as the workers lay them out
        degrees = ParallelDegrees(tp_degree, ep=expert_parallel_size, etp=tp_degree if splits_each else 1)
        # A process with ranks of its own cannot emulate others; then the workers report sizes that do not divide.
        has_ranks = dist.is_initialized() or model_parallel_is_initialized()
        try:
            with nullcontext() if has_ranks else planned_ranks(degrees):
                model = parallelize(model_on_meta_of(self.description), expert_parallel=splits_experts())
                HuggingFaceDecoder(model).cache_layers()
        except Exception as error:  # any error from the model
            self.description.check_own_llama(tp_degree)
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            raise ValueError(
                f"{self.description.architecture} cannot be compiled at tp_degree={tp_degree}: {reason}; nxd generate "
                "runs it uncompiled"
            ) from error


def open_for_compilation(
    folder: str | Path,
    tag: str | None = None,
    *,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
    images: Literal["no", "yes", "if it reads them"] = "no",
) -> CompilableCheckpoint:
    """Read a model's description and its tokenizer; arguments and errors are as for `load_for_generation`.

    Args:
        folder: as for `load_for_generation`.
        tag: as for `load_for_generation`.
        tokenizer: as for `load_for_generation`.
        adapter: as for `load_for_generation`.
        images: whether the model is to read images. Then its encoders are loaded into this process. If it reads images
            but cannot here, "if it reads them" gives a warning.

    Raises:
        ValueError: also if the model cannot be compiled, or is to read images and cannot.
    """
    opened = open_model(folder, tag, adapter=adapter)
    codec = open_codec(opened, tokenizer)
    longest = _max_positions(opened.description)
    checkpoint = CompilableCheckpoint(opened.description, opened.dtype, opened.weights, codec, longest)
    if images == "no" or (images != "yes" and not reads_images(opened)):
        return checkpoint
    try:
        processor = open_image_processor(opened, tokenizer)
        features = ImageFeatures(opened.description, opened.weights, opened.dtype)
        shapes = features.shapes(probe_inputs(processor))
    except ValueError as error:
        if images == "yes":
            raise
        get_logger("nxd_trainer").warning(f"{folder} is served for text alone: {error}")
        return checkpoint
    return replace(checkpoint, images=ImagePrompts(processor, codec.chat, features), input_shapes=shapes)


def _max_positions(description: ModelDescription) -> int:
    config = description.own_llama_at(1)
    if config is not None:
        return config.max_position_embeddings
    try:
        return HuggingFaceDecoder(model_on_meta_of(description)).max_positions
    except (TypeError, AttributeError) as error:  # AttributeError: the config has no maximum length
        raise ValueError(
            f"{description.architecture} cannot be compiled: {error}; nxd generate runs it uncompiled"
        ) from error
