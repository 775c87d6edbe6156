"""Each layer beside its rivals: torch's own layer in one process, and the same layer under DTensor on several ranks.

All take the same input, laid out as the layer gets it inside a model: whole, or split as the layer before leaves it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from nxd_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    column_parallel_linears,
    parallel_cross_entropy,
)
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

ROWS, BATCH, HIDDEN, VOCAB = 128, 4, 2048, 16384  # ROWS * BATCH = 512 tokens
KEY_VALUE = HIDDEN // 4

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A layer to time.

    Attributes:
        ours: makes the layer; every rank holds its part.
        plain: makes torch's.
        input: makes this rank's input, for a tensor-parallel degree.
        plan: how DTensor splits the plain one.
    """

    ours: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]
    input: Callable[[int], Tensor]
    plan: dict[str, ParallelStyle] | ParallelStyle | None = field(default=None)

    def dtensor(self, mesh: DeviceMesh) -> nn.Module:
        """The plain layer on a mesh."""
        plain = self.plain()
        if isinstance(plain, PlainLoss):
            return DTensorLoss(mesh)
        return parallelize_module(plain, mesh, self.plan)


class SharedInput(nn.Module):
    """Query, key and value: three products of one input."""

    def __init__(self) -> None:
        super().__init__()
        make = partial(ColumnParallelLinear, HIDDEN, bias=False, gather_output=False)
        self.query, self.key, self.value = make(HIDDEN), make(KEY_VALUE), make(KEY_VALUE)

    def forward(self, hidden: Tensor) -> Tensor:
        """Joined along the last dim."""
        return torch.cat(column_parallel_linears(hidden, [self.query, self.key, self.value]), dim=-1)


class GroupedQuery(nn.Module):
    """The same by the layer for grouped-query attention, whose weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = GQAQKVColumnParallelLinear(HIDDEN, [HIDDEN, KEY_VALUE], bias=False, gather_output=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Joined along the last dim."""
        return torch.cat(self.projections(hidden), dim=-1)


class PlainSharedInput(nn.Module):
    """The same in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        make = partial(nn.Linear, HIDDEN, bias=False)
        self.query, self.key, self.value = make(HIDDEN), make(KEY_VALUE), make(KEY_VALUE)

    def forward(self, hidden: Tensor) -> Tensor:
        """Joined along the last dim."""
        return torch.cat([self.query(hidden), self.key(hidden), self.value(hidden)], dim=-1)


class OurLoss(nn.Module):
    """Cross entropy of split logits."""

    def forward(self, logits: Tensor) -> Tensor:
        """Mean over all tokens."""
        return parallel_cross_entropy(logits, labels()).mean()


class PlainLoss(nn.Module):
    """Cross entropy of whole logits."""

    def forward(self, logits: Tensor) -> Tensor:
        """Mean over all tokens."""
        return F.cross_entropy(logits.flatten(0, 1), labels().flatten())


class DTensorLoss(nn.Module):
    """Cross entropy of split logits, by torch's `loss_parallel`; it takes backward along, which must run inside."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, logits: Tensor) -> Tensor:
        """Mean over all tokens."""
        whole = DTensor.from_local(logits.flatten(0, 1), self.mesh, [Shard(-1)], run_check=False)
        return F.cross_entropy(whole, labels().flatten())

    context = staticmethod(loss_parallel)


def labels() -> Tensor:
    """Whole, the same on every rank."""
    return torch.randint(VOCAB, (ROWS, BATCH), generator=torch.Generator().manual_seed(1))


def _whole(tensor_parallel: int) -> Tensor:
    return torch.randn(ROWS, BATCH, HIDDEN)


def _split_last(tensor_parallel: int) -> Tensor:
    return torch.randn(ROWS, BATCH, HIDDEN // tensor_parallel)


def _split_sequence(tensor_parallel: int) -> Tensor:
    return torch.randn(ROWS // tensor_parallel, BATCH, HIDDEN)


def _logits(tensor_parallel: int) -> Tensor:
    return torch.randn(ROWS, BATCH, VOCAB // tensor_parallel)


def _column() -> ColumnParallelLinear:
    return ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, gather_output=False)


def _row() -> RowParallelLinear:
    return RowParallelLinear(HIDDEN, HIDDEN, bias=False, input_is_parallel=True)


def _linear() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN, bias=False)


QUERY_KEY_VALUE_PLAN: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("query", "key", "value")}

CASES = {
    "column": Case(_column, _linear, _whole, ColwiseParallel()),
    "row": Case(_row, _linear, _split_last, RowwiseParallel()),
    "column, SiLU, row": Case(
        lambda: nn.Sequential(_column(), nn.SiLU(), _row()),
        lambda: nn.Sequential(_linear(), nn.SiLU(), _linear()),
        _whole,
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    ),
    "query, key, value: one input": Case(SharedInput, PlainSharedInput, _whole, QUERY_KEY_VALUE_PLAN),
    "query, key, value: one layer": Case(GroupedQuery, PlainSharedInput, _whole, QUERY_KEY_VALUE_PLAN),
    "embedding": Case(
        lambda: ParallelEmbedding(VOCAB, HIDDEN),
        lambda: nn.Embedding(VOCAB, HIDDEN),
        lambda tensor_parallel: labels(),
        RowwiseParallel(input_layouts=Replicate()),
    ),
    "RMSNorm": Case(
        lambda: RMSNorm(HIDDEN, sequence_parallel_enabled=True),
        lambda: nn.RMSNorm(HIDDEN, eps=1e-5),
        _split_sequence,
        SequenceParallel(sequence_dim=0),
    ),
    "cross entropy": Case(OurLoss, PlainLoss, _logits),
}
