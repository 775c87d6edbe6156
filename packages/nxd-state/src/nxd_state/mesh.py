"""The mesh of ranks: which rank sits where along each axis of parallelism.

Pure arithmetic. Nothing here needs a process group or a device, so a laptop can answer for a cluster of
100,000 ranks. Process groups are made from these answers in `process_groups`.

Positions are row-major, so neighbors along `tp` sit next to each other. Some instance types wire their cores so that
other ranks are neighbors; a rank order is the permutation, within each node, that puts them there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

TRN1_RANKS_PER_NODE = 32
TRN2_RANKS_PER_NODE = 64
TRN2_ROWS = 4


def _row_major(world_size: int, tp: int) -> list[int]:
    return list(range(world_size))


def _strided(world_size: int, tp: int) -> list[int]:
    """Tensor-parallel ranks spread evenly over a node of 32 (trn1 with tp 4: [0, 8, 16, 24], [1, 9, ...], ...)."""
    per_node = _check_nodes("strided", world_size, tp, TRN1_RANKS_PER_NODE)
    stride = per_node // tp
    return [
        node + group + member * stride
        for node in range(0, world_size, per_node)
        for group in range(stride)
        for member in range(tp)
    ]


def _row_paired(world_size: int, tp: int) -> list[int]:
    """Rows of a node of 64 paired first with last, second with third (trn2 with tp 32: [0..15, 48..63], ...)."""
    per_node = _check_nodes("row_paired", world_size, tp, TRN2_RANKS_PER_NODE)
    row_length = per_node // TRN2_ROWS
    return [
        node + row * row_length + column
        for node in range(0, world_size, per_node)
        for row in (0, 3, 1, 2)
        for column in range(row_length)
    ]


def _check_nodes(order: str, world_size: int, tp: int, per_node: int) -> int:
    if world_size % per_node or per_node % tp:
        raise ValueError(
            f"order={order!r} needs whole nodes of {per_node} ranks and a tp that divides {per_node}; "
            f"world_size={world_size}, tp={tp}: use order='row_major'"
        )
    return per_node


RANK_ORDERS: dict[str, Callable[[int, int], list[int]]] = {
    "row_major": _row_major,
    "strided": _strided,
    "row_paired": _row_paired,
}


@lru_cache(maxsize=64)
def rank_order(order: str, world_size: int, tp: int) -> list[int]:
    """The launched rank at each position of a mesh.

    Args:
        order: name of the order.
        world_size: number of ranks.
        tp: tensor-parallel degree.

    Raises:
        ValueError: an unknown order, or one that the sizes do not allow.
    """
    if order not in RANK_ORDERS:
        raise ValueError(f"unknown order={order!r}; use one of {', '.join(sorted(RANK_ORDERS))}")
    return RANK_ORDERS[order](world_size, tp)


DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "dp_exp", "ep", "etp")

RankGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mesh:
    """Ranks laid out row-major over the axes `[pp, dp, cp, tp]`, `tp` fastest.

    Inside expert layers the same ranks are seen as `[pp, dp_exp, ep, etp]`, with `dp_exp * ep * etp == dp * cp * tp`
    ("parallel folding" of Liu et al. 2025, "MoE Parallel Folding"): `ep` may take ranks of `dp`, `cp` and `tp`.

    Args:
        world_size: number of ranks.
        pp: pipeline stages.
        dp: data-parallel replicas; -1 uses all remaining ranks.
        cp: context-parallel ranks, which split one sequence.
        tp: tensor-parallel ranks, which split one layer.
        ep: expert-parallel ranks, which split the experts of a layer.
        etp: tensor-parallel ranks of each expert; -1 for as many as `tp`.
        order: name of the rank order (see `rank_order`): how positions in the mesh map to launched ranks.

    Raises:
        ValueError: a degree is not positive, or the degrees do not multiply to `world_size`.
    """

    world_size: int
    pp: int = 1
    dp: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = -1
    order: str = "row_major"

    def __post_init__(self) -> None:
        if self.etp == -1:
            object.__setattr__(self, "etp", self.tp)
        for axis in ("world_size", "pp", "cp", "tp", "ep", "etp"):
            if type(getattr(self, axis)) is not int or getattr(self, axis) < 1:
                raise ValueError(f"{axis}={getattr(self, axis)!r} is not a positive degree; use 1 to switch it off")
        model_size = self.pp * self.cp * self.tp
        if self.dp == -1:
            self._check_divides(model_size)
            object.__setattr__(self, "dp", self.world_size // model_size)
        if self.dp * model_size != self.world_size:
            raise ValueError(
                f"pp={self.pp} x dp={self.dp} x cp={self.cp} x tp={self.tp} = {self.dp * model_size} is not "
                f"world_size={self.world_size}; leave dp out to have it computed"
            )
        of_stage = self.dp * self.cp * self.tp
        if of_stage % (self.ep * self.etp):
            raise ValueError(
                f"ep={self.ep} x etp={self.etp} = {self.ep * self.etp} does not divide dp x cp x tp = {of_stage}; "
                + (f"use ep={_list_divisors(of_stage // self.etp)}" if of_stage % self.etp == 0 else "use etp=1")
            )
        rank_order(self.order, self.world_size, self.tp)

    def _check_divides(self, model_size: int) -> None:
        if self.world_size % model_size == 0:
            return
        usable = self.world_size // (self.pp * self.cp)
        advice = (
            f"use tp={_list_divisors(usable)}"
            if usable and self.world_size % (self.pp * self.cp) == 0
            else "lower pp or cp, or start more ranks"
        )
        raise ValueError(
            f"pp={self.pp} x cp={self.cp} x tp={self.tp} = {model_size} does not divide "
            f"world_size={self.world_size}; {advice}"
        )

    @property
    def dp_exp(self) -> int:
        """Data-parallel replicas of each expert: `dp * cp * tp / (ep * etp)`."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def splits_experts(self) -> bool:
        """Whether expert layers are laid out differently from dense ones."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def experts_span_replicas(self) -> bool:
        """Whether the ranks that hold all experts of a layer are more than those of one tensor-parallel group."""
        return self.ep * self.etp > self.tp

    def size(self, *axes: str) -> int:
        """Number of ranks in a group of these axes."""
        size = 1
        for axis in self._view(axes):
            if axis in axes:
                size *= getattr(self, axis)
        return size

    def groups(self, *axes: str) -> RankGroups:
        """All groups of one axis, or of several combined: ranks that differ only along these axes.

        `groups("tp")` are the tensor-parallel groups, `groups("dp", "cp")` those that share gradients,
        `groups("pp", "tp")` those that hold one replica of the model. Ranks within a group are in mesh order.
        """
        return _groups(self, tuple(axes))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one group of these axes that `rank` is in."""
        coordinates = self.coordinates(rank)
        view = self._view(axes)
        first = sum(coordinates[axis] * _stride(self, view, axis) for axis in view if axis not in axes)
        order = _ranks_in_mesh_order(self)
        return tuple(order[first + offset] for offset in _offsets(self, view, axes))

    def embedding_groups(self) -> RankGroups:
        """First and last stage of each pipeline: the ranks that hold a tied embedding and head."""
        return tuple(tuple(dict.fromkeys((group[0], group[-1]))) for group in self.groups("pp"))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis: pp, dp, cp and tp, then dp_exp, ep and etp."""
        self._check_rank(rank)
        found = dict.fromkeys((*DENSE_AXES, *EXPERT_AXES), 0)
        for view in (DENSE_AXES, EXPERT_AXES):
            rest = _positions(self)[rank]
            for axis in reversed(view):
                rest, found[axis] = divmod(rest, getattr(self, axis))
        return found

    def rank_at(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        coordinates = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        for axis, value in coordinates.items():
            if not 0 <= value < getattr(self, axis):
                raise ValueError(f"{axis}={value} is outside 0..{getattr(self, axis) - 1}")
        position = sum(value * _stride(self, DENSE_AXES, axis) for axis, value in coordinates.items())
        return _ranks_in_mesh_order(self)[position]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside 0..{self.world_size - 1}")

    def _view(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axis order, dense or expert, in which all of `axes` occur."""
        for view in (DENSE_AXES, EXPERT_AXES):
            if axes and set(axes) <= set(view):
                return view
        raise ValueError(f"axes={axes}: expected one or more of {DENSE_AXES}, or of {EXPERT_AXES}")


def _ranks_in_mesh_order(mesh: Mesh) -> list[int]:
    """The rank at each position in the mesh."""
    return rank_order(mesh.order, mesh.world_size, mesh.tp)


@lru_cache(maxsize=64)
def _positions(mesh: Mesh) -> list[int]:
    """The position in the mesh of each rank: the inverse of its rank order."""
    positions = [0] * mesh.world_size
    for position, rank in enumerate(_ranks_in_mesh_order(mesh)):
        positions[rank] = position
    return positions


@lru_cache(maxsize=64)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> RankGroups:
    view = mesh._view(axes)
    order = _ranks_in_mesh_order(mesh)
    within = _offsets(mesh, view, axes)
    firsts = _offsets(mesh, view, tuple(axis for axis in view if axis not in axes))
    return tuple(tuple([order[first + offset] for offset in within]) for first in firsts)


def _stride(mesh: Mesh, view: tuple[str, ...], axis: str) -> int:
    """The number of positions between neighbours along an axis."""
    return math.prod(getattr(mesh, inner) for inner in view[view.index(axis) + 1 :])


def _offsets(mesh: Mesh, view: tuple[str, ...], axes: tuple[str, ...]) -> list[int]:
    """Offsets from the first position of those that differ from it only along these axes, in mesh order."""
    offsets = [0]
    for axis in view:
        if axis in axes:
            stride = _stride(mesh, view, axis)
            offsets = [offset + index * stride for offset in offsets for index in range(getattr(mesh, axis))]
    return offsets


def divisors(number: int) -> list[int]:
    """The degrees that divide a number, in order."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def _list_divisors(number: int) -> str:
    listed = list(map(str, divisors(number)))
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
