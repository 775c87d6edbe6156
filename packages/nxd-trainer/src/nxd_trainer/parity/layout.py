"""Runs the compared steps on this rank of the layout, through the documented API, and locates its parts of tensors.

Activations carry no shard metadata, so their split is inferred from their shapes: along one dim by replicas and
microbatches, along another by tensor-parallel ranks. If the shapes allow several placements, the closest one counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from nxd_engine import NxDModel, NxDOptimizer, initialize_parallel_model, initialize_parallel_optimizer
from nxd_engine.checkpoints.state import logical_name
from nxd_pipeline.partition.stand_ins import AbsentLayer, AbsentModule
from nxd_state import Box, get_group, get_mesh, whole_parameters
from nxd_state.parameter_marks import is_expert, is_sequence_parallel
from torch import Tensor, nn

from nxd_trainer.parity.case import ParityCase, has_batch, inputs_in, make_model
from nxd_trainer.parity.reference import ActivationRecord, spec_of


@dataclass(frozen=True)
class TensorPiece:
    """The values of a box of a logical tensor.

    Attributes:
        sums_over_tp: whether the tensor-parallel ranks' values must be summed: gradients of layers that see a part of
            the sequence.
        holders: for a gradient of experts, how many ranks of an expert-parallel group have the same box; else 0.
    """

    box: Box
    shape: tuple[int, ...]
    values: Tensor
    sums_over_tp: bool = False
    holders: int = 0


@dataclass
class LayoutStep:
    """This rank's results of a step; see `ReferenceStep`."""

    activations: dict[str, list[Tensor]]
    loss: float | None
    gradients: dict[str, list[TensorPiece]]
    grad_norm: float | None
    parameters: dict[str, list[TensorPiece]]


class LayoutRun:
    """This rank's model and optimizer. The mesh must be the config's."""

    def __init__(self, case: ParityCase, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Make the model and the optimizer, as a training script would."""
        self.model: NxDModel = initialize_parallel_model(config, lambda: make_model(case.model_fn, case.seed, dtype))
        self.optimizer: NxDOptimizer = initialize_parallel_optimizer(
            config, case.optimizer_class, case.parameter_groups(self.model), **case.optimizer_arguments
        )
        self._dtype = dtype
        self._first_names = self.model.pipeline.tied_names()

    def parameters(self) -> dict[str, list[TensorPiece]]:
        """Return this rank's weights by logical name."""
        with whole_parameters(self.model.parameters()):
            return self._pieces((name, it, it) for name, it in self.model.named_parameters())

    def step(self, batch: Mapping[str, Any]) -> LayoutStep:
        """Train on this replica's part of a batch. Call it on all ranks."""
        replicas = get_group("dp")
        parts = {name: value.chunk(replicas.size)[replicas.rank] for name, value in batch.items() if has_batch(value)}
        own = {**batch, **parts}
        record = ActivationRecord()
        self.optimizer.zero_grad()
        # Stand-ins for other stages' modules compute nothing.
        own_modules = [it for it in self.model.named_modules() if not isinstance(it[1], AbsentLayer | AbsentModule)]
        own_modules = _without_insides_of_experts(own_modules)
        if get_mesh().cp > 1:
            own_modules = []  # their outputs cover only this rank's positions
        # no_sync, so that gradients can be read before they are averaged or moved.
        with record.watching(own_modules), self.model.no_sync():
            loss = self.model.run_train(**inputs_in(self._dtype, own))
        if isinstance(loss, list):
            loss = torch.stack(loss).mean() if loss else None
        gradients = self._pieces((name, it, it.grad) for name, it in self.model.named_parameters() if it.requires_grad)
        self.optimizer.step()
        norm = self.optimizer.grad_norm
        return LayoutStep(
            record.outputs,
            None if loss is None else float(loss),
            gradients,
            None if norm is None else float(norm),
            self.parameters(),
        )

    def _pieces(self, named: Any) -> dict[str, list[TensorPiece]]:
        found: dict[str, list[TensorPiece]] = {}
        for own_name, parameter, tensor in named:
            if tensor is None:
                continue
            name = self._first_names.get(own_name, own_name)
            adds = tensor is not parameter and is_sequence_parallel(parameter)
            of_split_experts = get_mesh().splits_experts and is_expert(parameter)
            for piece in spec_of(parameter).pieces:
                values = tensor.detach()[piece.local.slices].cpu().clone()
                holders = piece.copies if of_split_experts else 0
                found.setdefault(logical_name(name, piece.name), []).append(
                    TensorPiece(piece.logical, piece.logical_shape, values, adds, holders)
                )
        return found


def _without_insides_of_experts(named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out the modules inside experts if experts are split: they see the tokens of other ranks."""
    if not get_mesh().splits_experts:
        return named
    experts = {f"{name}." for name, module in named if any(map(is_expert, module.parameters(recurse=False)))}
    return [it for it in named if not any(it[0].startswith(prefix) for prefix in experts)]


SMALL_SHARE = 1e-3  # tensors far below their peers, such as gradients of pure rounding, use this share as scale


@dataclass(frozen=True)
class RankPart:
    """Which part of a batch and of a layer a rank computes.

    Attributes:
        batch_index: index of the rank's part of the batch, among `batch_parts`.
        batch_parts: replicas x microbatches.
        tp_rank: rank in its tensor-parallel group.
        tp_size: number of ranks in that group.
    """

    batch_index: int
    batch_parts: int
    tp_rank: int
    tp_size: int


@dataclass(frozen=True)
class Distance:
    """The largest difference of two tensors and its place; see `Difference`."""

    max_abs: float
    max_rel: float
    index: tuple[int, ...]
    expected: float
    found: float


def candidate_slices(whole: Sequence[int], local: Sequence[int], part: RankPart) -> Iterator[tuple[slice, ...]]:
    """Yield the boxes of a whole tensor that a rank's part may cover, judging by its shape."""
    if len(whole) != len(local):
        return
    dims = range(len(whole))
    batch_dims = dims if part.batch_parts > 1 else [None]
    shard_dims = [None, *dims] if part.tp_size > 1 else [None]  # None: every rank has all of it
    for batch_dim, shard_dim in product(batch_dims, shard_dims):
        index, parts = [0] * len(whole), [1] * len(whole)
        if batch_dim is not None:
            index[batch_dim], parts[batch_dim] = part.batch_index, part.batch_parts
        if shard_dim is not None and shard_dim != batch_dim:
            index[shard_dim], parts[shard_dim] = part.tp_rank, part.tp_size
        if all(local[dim] * parts[dim] == whole[dim] for dim in dims):
            yield tuple(slice(index[dim] * local[dim], (index[dim] + 1) * local[dim]) for dim in dims)


def distance(expected: Tensor, found: Tensor, offset: Sequence[int] = ()) -> Distance:
    """Measure how far apart two tensors of one shape are; `offset` is added to the place. NaN equals only NaN."""
    if expected.numel() == 0:
        return Distance(0.0, 0.0, (), 0.0, 0.0)
    wanted, got = expected.double(), found.double()
    apart = (wanted - got).abs()
    apart = torch.where(wanted.isnan() & got.isnan() | (wanted == got), torch.zeros(()).double(), apart)
    apart = apart.nan_to_num(nan=float("inf"), posinf=float("inf"))
    flat = int(apart.argmax())
    place = tuple(int(it) for it in torch.unravel_index(torch.tensor(flat), apart.shape))
    scale = wanted.abs().nan_to_num().max().item()
    largest = apart.flatten()[flat].item()
    return Distance(
        largest,
        largest / scale if scale else (float("inf") if largest else 0.0),
        tuple(it + start for it, start in zip(place, offset or (0,) * len(place), strict=True)),
        wanted.flatten()[flat].item(),
        got.flatten()[flat].item(),
    )


def is_close(found: Distance, expected: Tensor, *, rtol: float, peers: float) -> bool:
    """Whether a difference is only rounding.

    Args:
        found: the difference.
        expected: the whole tensor of one process.
        rtol: tolerance, relative to its largest value.
        peers: the largest value in all tensors of its kind.
    """
    scale = expected.abs().nan_to_num().max().item() if expected.numel() else 0.0
    return found.max_abs <= rtol * max(scale, SMALL_SHARE * peers)
