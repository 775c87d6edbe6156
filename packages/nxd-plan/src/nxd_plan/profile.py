"""Profiles one microbatch on one rank by running the real layers on meta tensors, which have shapes but no memory.

One process plays the first rank of a tensor-parallel group that does not exist; torch's "fake" backend sends nothing.
A model with one decoder layer of each kind runs forward and backward there. Hooks separate embedding, layers and head,
and a model with any number of layers, or a stage of it, is assembled from these parts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on the meta device, before torch 2.13
import torch.testing._internal.distributed.fake_pg  # registers the "fake" backend
from nxd_layers import CoreAttention, apply_activation_checkpointing
from nxd_state import (
    ParallelDegrees,
    active_group,
    destroy_model_parallel,
    initialize_mesh,
    model_parallel_is_initialized,
    static_shapes,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from nxd_plan.model import PlannedModel
from nxd_plan.operations import Operation, OperationCache, OperationLog, WorkSegment

CHECKPOINTING = {"none": None, "CoreAttention": CoreAttention, "full": "full"}


@contextmanager
def planned_ranks(degrees: ParallelDegrees, *, has_static_shapes: bool = False) -> Iterator[None]:
    """Make this process the first of the ranks that split a layer and its experts, with one stage and no CP.

    With `has_static_shapes`, the model computes as on devices where no shape may depend on values.
    """
    if dist.is_initialized() or model_parallel_is_initialized():
        raise RuntimeError(
            "planning needs a process without torch.distributed, but it is already initialized here; plan before "
            "that, or in another process"
        )
    of_layer = ParallelDegrees(degrees.tp, ep=degrees.ep, etp=degrees.etp)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=of_layer.least_ranks)
    try:
        initialize_mesh(of_layer)
        with static_shapes() if has_static_shapes else nullcontext():
            yield
    finally:
        destroy_model_parallel()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Pass:
    """The forward or the backward of one part of the model, for one microbatch on one rank.

    Attributes:
        kept: bytes at its end minus bytes at its start; negative for a backward.
        peak: maximum bytes in between minus bytes at its start.
        operations: the operations that it runs.
        messages: bytes that the rank sends in each collective of its tensor-parallel group.
        to_experts: bytes that it sends to other ranks' experts, and back, in each exchange.
        product_bytes: bytes of the results of its matrix products.
    """

    kept: int
    peak: int
    operations: tuple[Operation, ...]
    messages: tuple[int, ...]
    product_bytes: int
    to_experts: tuple[int, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all operations."""
        return sum(operation.flops for operation in self.operations)


@dataclass(frozen=True)
class PartProfile:
    """A part of the model: the embedding, a decoder layer, or the final norm, head and loss."""

    forward: Pass
    backward: Pass


@dataclass(frozen=True)
class Profile:
    """The parts of a model, with one layer of each kind, and the bytes of the hidden states between them."""

    embedding: PartProfile
    layers: tuple[PartProfile, ...]
    head: PartProfile
    hidden_bytes: int


def _extrapolated(of_two: Any, of_three: Any, size: int) -> Any:
    """Extrapolate the numbers in a profile to microbatches of `size`, from those of sizes 2 and 3.

    Every tensor is either proportional to the microbatch or independent of it, so all numbers are linear in size.
    """
    if isinstance(of_two, int):
        return of_two + (of_three - of_two) * (size - 2)
    if isinstance(of_two, tuple):
        return tuple(_extrapolated(two, three, size) for two, three in zip(of_two, of_three, strict=True))
    values = {it.name: (getattr(of_two, it.name), getattr(of_three, it.name)) for it in fields(of_two)}
    return type(of_two)(**{name: _extrapolated(two, three, size) for name, (two, three) in values.items()})


class Profiler:
    """Profiles one model at one tensor-parallel degree, inside `planned_ranks`; each profile is made once.

    Args:
        model: the model to profile.
        dtype: dtype of its parameters.
        sequence_length: tokens per sequence.
    """

    def __init__(self, model: PlannedModel, dtype: torch.dtype, sequence_length: int) -> None:
        self._planned = model
        self._dtype = dtype
        self._sequence_length = sequence_length
        self._cache = OperationCache()
        self._measured = cache(self._measure)
        self.model = cache(self._make_model)

    def profile(self, *, sequence_parallel: bool, checkpointing: str, microbatch_size: int) -> Profile:
        """Return the profile of a microbatch of any size.

        Args:
            sequence_parallel: whether activations between the layers are split along the sequence.
            checkpointing: one of `CHECKPOINTING` that the model supports.
            microbatch_size: sequences per microbatch.
        """
        if microbatch_size <= 2:  # size 1 is not linear: one sequence may be transposed without a copy
            return self._measured(sequence_parallel, checkpointing, microbatch_size)
        of_two, of_three = (self._measured(sequence_parallel, checkpointing, size) for size in (2, 3))
        extrapolated: Profile = _extrapolated(of_two, of_three, microbatch_size)
        return extrapolated

    def _make_model(self, sequence_parallel: bool) -> nn.Module:
        model = self._planned.on_rank(self._dtype, sequence_parallel=sequence_parallel)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # backward adds to it, as in all but the first microbatch
        return model

    def _measure(self, sequence_parallel: bool, checkpointing: str, microbatch_size: int) -> Profile:
        model = self.model(sequence_parallel)
        layers = list(model.get_submodule(self._planned.layers_path).children())
        apply_activation_checkpointing(model, CHECKPOINTING[checkpointing])
        with OperationLog(self._cache, _expert_group()) as log, _attention_as_one_operation():
            tokens = torch.zeros(microbatch_size, self._sequence_length, dtype=torch.int64, device="meta")
            marks = _Marks(layers, log)
            log.begin("embedding forward")
            try:
                output = model(**dict.fromkeys(self._planned.input_names, tokens))
                loss: Tensor = output if isinstance(output, Tensor) else output.loss
                del output
                log.begin("head backward")
                loss.backward()
            except Exception as error:  # a model may do anything that meta tensors do not support
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"{type(model).__name__} does not run on meta tensors, which planning needs: "
                    f"{type(error).__name__}: {reason}"
                ) from error
            finally:
                marks.remove()
            log.begin("end")
        return Profile(
            embedding=_part(log.segments, "embedding"),
            layers=tuple(_part(log.segments, _name(kind)) for kind in range(len(layers))),
            head=_part(log.segments, "head"),
            hidden_bytes=marks.hidden_bytes,
        )


def _expert_group() -> str:
    """Name of the process group of the ranks with other experts, or "" if it is the tensor-parallel group."""
    experts = active_group("ep")
    return "" if experts.ranks == active_group("tp").ranks else experts.name


class _Marks:
    """Hooks on the layers that begin the segments of a forward and backward."""

    def __init__(self, layers: Sequence[nn.Module], log: OperationLog) -> None:
        self.hidden_bytes = 0
        self._log = log
        self._handles = [layers[0].register_forward_pre_hook(self._enter_first, with_kwargs=True)]
        for place, layer in enumerate(layers):
            following = _name(place + 1) if place + 1 < len(layers) else "head"
            self._handles.append(layer.register_forward_hook(partial(self._leave, place, following)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_first(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = next(it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor))
        hidden.register_hook(lambda _: self._log.begin("embedding backward"))
        self._log.begin(f"{_name(0)} forward")

    def _leave(self, place: int, following: str, layer: nn.Module, args: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        self.hidden_bytes = hidden.nbytes
        hidden.register_hook(lambda _: self._log.begin(f"{_name(place)} backward"))
        self._log.begin(f"{following} forward")


def _name(kind: int) -> str:
    return f"layer {kind}"


@contextmanager
def _attention_as_one_operation() -> Iterator[None]:
    """Make attention one operation, as on devices; on meta tensors torch would split it into many."""
    of_torch = F.scaled_dot_product_attention
    # A torch mode would not apply to what backward recomputes.
    F.scaled_dot_product_attention = _causal_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = of_torch


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute causal attention; values with smaller heads than queries and keys are padded."""
    size = value.shape[-1]
    filled = F.pad(value, (0, query.shape[-1] - size)) if size < query.shape[-1] else value
    mixed: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, filled, 0.0, True)[0]
    return mixed[..., :size]


def _part(segments: dict[str, WorkSegment], name: str) -> PartProfile:
    if f"{name} backward" not in segments:
        raise ValueError(
            f"planning cannot tell where the backward of the {name} begins, because no gradient reaches what the model "
            "passes to its first layer; choose the layout by hand"
        )
    return PartProfile(_pass(segments[f"{name} forward"]), _pass(segments[f"{name} backward"]))


def _pass(segment: WorkSegment) -> Pass:
    return Pass(
        kept=segment.after - segment.before,
        peak=segment.peak - segment.before,
        operations=tuple(segment.operations),
        messages=tuple(segment.messages),
        product_bytes=segment.product_bytes,
        to_experts=tuple(segment.to_experts),
    )
