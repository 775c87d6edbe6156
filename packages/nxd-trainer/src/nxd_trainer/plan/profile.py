"""What one microbatch does on one rank, measured on the real layers with tensors that have shapes and no memory.

One process takes the place of the first rank of a tensor-parallel group that does not exist; torch's own "fake"
transport moves nothing. A model of one decoder layer runs forward and backward there. Hooks tell embedding, layer and
head apart, and a model of any number of layers, or a stage of it, is put together from these parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on the meta device, before torch 2.13
import torch.testing._internal.distributed.fake_pg  # registers the transport "fake"
from nxd_layers import CoreAttention, apply_activation_checkpointing
from nxd_state import destroy_model_parallel, initialize_model_parallel, model_parallel_is_initialized
from torch import Tensor, nn

from nxd_trainer.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_trainer.plan.operations import Operation, OperationLog, Outcomes, Segment

CHECKPOINTING = {"none": None, "CoreAttention": CoreAttention, "full": "full"}


@contextmanager
def planned_ranks(tensor_parallel_size: int) -> Iterator[None]:
    """Inside, this process is the first rank of a tensor-parallel group of that size.

    Raises:
        RuntimeError: the process has real ranks already.
        ValueError: the size is not positive.
    """
    if dist.is_initialized() or model_parallel_is_initialized():
        raise RuntimeError(
            "a plan is made in a process without ranks of its own, but torch.distributed is initialised here; plan "
            "before, or in another process"
        )
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size} must be 1 or more")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=tensor_parallel_size)
    try:
        initialize_model_parallel(tensor_parallel_size)
        yield
    finally:
        destroy_model_parallel()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Pass:
    """The forward or the backward of one part of the model, for one microbatch on one rank.

    Attributes:
        kept: bytes that stay when it is over, beyond those that were there; negative for a backward.
        peak: the most bytes in between, beyond those that were there when it began.
        operations: what it computes.
        messages: bytes that the rank sends in each collective of its tensor-parallel group.
        product_bytes: of the results of its matrix products.
    """

    kept: int
    peak: int
    operations: tuple[Operation, ...]
    messages: tuple[int, ...]
    product_bytes: int

    @property
    def flops(self) -> int:
        """Of all operations."""
        return sum(operation.flops for operation in self.operations)

    def extrapolated(self, to_three: "Pass", size: int) -> "Pass":
        """For microbatches of `size`, where this is for one of 2 and `to_three` for one of 3.

        Every tensor either is as large as the microbatch or has nothing to do with it, so all numbers lie on lines.
        """
        return Pass(
            kept=_on_line(self.kept, to_three.kept, size),
            peak=_on_line(self.peak, to_three.peak, size),
            operations=tuple(
                Operation(_on_line(a.flops, b.flops, size), _on_line(a.bytes, b.bytes, size))
                for a, b in zip(self.operations, to_three.operations, strict=True)
            ),
            messages=tuple(_on_line(a, b, size) for a, b in zip(self.messages, to_three.messages, strict=True)),
            product_bytes=_on_line(self.product_bytes, to_three.product_bytes, size),
        )


@dataclass(frozen=True)
class Part:
    """Embedding, decoder layer, or final norm, head and loss."""

    forward: Pass
    backward: Pass

    def extrapolated(self, to_three: "Part", size: int) -> "Part":
        """See `Pass.extrapolated`."""
        return Part(
            self.forward.extrapolated(to_three.forward, size), self.backward.extrapolated(to_three.backward, size)
        )


@dataclass(frozen=True)
class Profile:
    """The parts of a model, and the bytes of the hidden states between them."""

    embedding: Part
    layer: Part
    head: Part
    hidden_bytes: int

    def extrapolated(self, to_three: "Profile", size: int) -> "Profile":
        """See `Pass.extrapolated`."""
        return Profile(
            embedding=self.embedding.extrapolated(to_three.embedding, size),
            layer=self.layer.extrapolated(to_three.layer, size),
            head=self.head.extrapolated(to_three.head, size),
            hidden_bytes=_on_line(self.hidden_bytes, to_three.hidden_bytes, size),
        )


def _on_line(at_two: int, at_three: int, size: int) -> int:
    return at_two + (at_three - at_two) * (size - 2)


class Profiler:
    """Profiles of one model at one tensor-parallel degree, to be used inside `planned_ranks`; each is made once.

    Args:
        config: sizes of the model; the number of layers does not matter.
        dtype: of its parameters.
        sequence_length: tokens in a sequence.
    """

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, sequence_length: int) -> None:
        self._config = replace(config, num_hidden_layers=1)
        self._dtype = dtype
        self._sequence_length = sequence_length
        self._outcomes = Outcomes()
        self._measured = cache(self._measure)
        self._model = cache(self._make_model)

    def profile(self, *, sequence_parallel: bool, checkpointing: str, microbatch_size: int) -> Profile:
        """The parts of the model for a microbatch of any size.

        Args:
            sequence_parallel: activations split along the sequence between the layers.
            checkpointing: one of `CHECKPOINTING`.
            microbatch_size: sequences in it.
        """
        if microbatch_size <= 2:  # tensors of one sequence may be transposed without a copy, so it is on no line
            return self._measured(sequence_parallel, checkpointing, microbatch_size)
        of_two = self._measured(sequence_parallel, checkpointing, 2)
        return of_two.extrapolated(self._measured(sequence_parallel, checkpointing, 3), microbatch_size)

    def _make_model(self, sequence_parallel: bool) -> LlamaForCausalLM:
        model = LlamaForCausalLM(self._config, sequence_parallel=sequence_parallel, dtype=self._dtype, device="meta")
        _layer_of(model).self_attn.core = _AttentionAsOneOperation()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # to which backward adds, as in all microbatches but one
        return model

    def _measure(self, sequence_parallel: bool, checkpointing: str, microbatch_size: int) -> Profile:
        model = self._model(sequence_parallel)
        apply_activation_checkpointing(model, CHECKPOINTING[checkpointing])
        with OperationLog(self._outcomes) as log:
            tokens = torch.zeros(microbatch_size, self._sequence_length, dtype=torch.int64, device="meta")
            marks = _Marks(_layer_of(model), log)
            log.begin("embedding forward")
            loss = model(tokens, tokens)
            log.begin("head backward")
            loss.backward()
            log.begin("end")
            marks.remove()
        parts = {name: _part(log.segments, name) for name in ("embedding", "layer", "head")}
        return Profile(**parts, hidden_bytes=marks.hidden_bytes)


def _layer_of(model: LlamaForCausalLM) -> LlamaDecoderLayer:
    (layer,) = model.model.layers
    assert isinstance(layer, LlamaDecoderLayer)
    return layer


class _Marks:
    """Hooks on the one layer, at which the segments of a forward and backward begin."""

    def __init__(self, layer: nn.Module, log: OperationLog) -> None:
        self.hidden_bytes = 0
        self._log = log
        self._handles = [layer.register_forward_pre_hook(self._enter), layer.register_forward_hook(self._leave)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, layer: nn.Module, args: Any) -> None:
        args[0].register_hook(lambda _: self._log.begin("embedding backward"))
        self._log.begin("layer forward")

    def _leave(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.hidden_bytes = output.nbytes
        output.register_hook(lambda _: self._log.begin("layer backward"))
        self._log.begin("head forward")


class _AttentionAsOneOperation(CoreAttention):
    """Causal attention as devices have it; of tensors without memory torch would make many operations of it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `CoreAttention`."""
        mixed: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)[0]
        return mixed


def _part(segments: dict[str, Segment], name: str) -> Part:
    return Part(_pass(segments[f"{name} forward"]), _pass(segments[f"{name} backward"]))


def _pass(segment: Segment) -> Pass:
    return Pass(
        kept=segment.after - segment.before,
        peak=segment.peak - segment.before,
        operations=tuple(segment.operations),
        messages=tuple(segment.messages),
        product_bytes=segment.product_bytes,
    )
