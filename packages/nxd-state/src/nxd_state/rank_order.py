"""Rank orders: which launched rank takes which position of the mesh.

Positions are row-major, so neighbours along `tp` sit next to each other. Some instance types wire their
cores so that other ranks are neighbours; an order is the permutation, within each node, that puts them there.
"""

from collections.abc import Callable
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
