"""The order of copied key and value heads in checkpoints of NeuronX Distributed.

If ranks hold copies of heads, that library uses one of two orders. Blocked order, which we also use, is K0 K0 K1 K1,
with queries in their own order. Tiled order, for its older hardware, is K0 K1 K0 K1; queries are permuted so that each
stays next to its key, and so are the columns of the output projection. Files do not name their order; the copies in
them show it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxd_ckpt import CheckpointError
from nxd_ckpt.interop.neuronx import Piece, Pieces
from nxd_ckpt.interop.source import same_bits
from nxd_layers import GQAQKVColumnParallelLinear, RowParallelLinear
from nxd_layers.key_value_heads import kv_size_multiplier_for
from nxd_layers.qkv_linear import PROJECTIONS
from torch import Tensor, nn

from nxd_engine.checkpoints.state import logical_name


@dataclass(frozen=True)
class HeadOrder:
    """Which heads a tensor-parallel rank holds.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        multiplier: number of copies of each key and value head.
        tp_size: number of tensor-parallel ranks.
        blocked: whether copies of a head are adjacent, with queries in their own order (`--hw_backend trn2`);
            otherwise all heads are repeated copy by copy, and queries are permuted to match.

    Raises:
        ValueError: the heads do not divide.
    """

    num_heads: int
    num_kv_heads: int
    multiplier: int
    tp_size: int
    blocked: bool

    def __post_init__(self) -> None:
        copies = self.num_kv_heads * self.multiplier
        if copies % self.tp_size or self.num_heads % copies:
            fewest = kv_size_multiplier_for(self.num_kv_heads, self.tp_size)
            fits = self.num_heads % (self.num_kv_heads * fewest) == 0
            advice = (
                f"--qkv_linear True --kv_size_multiplier {fewest}" if fits else "another --tp_size, no multiplier fits"
            )
            raise ValueError(
                f"{self.num_kv_heads} key and value heads times --kv_size_multiplier {self.multiplier} must be a "
                f"multiple of --tp_size {self.tp_size} and divide the {self.num_heads} query heads; use {advice}"
            )

    def kv_heads_of(self, rank: int) -> list[int]:
        """Return the key and value heads on a rank, in order."""
        copies = range(self.num_kv_heads * self.multiplier)
        order = [copy // self.multiplier if self.blocked else copy % self.num_kv_heads for copy in copies]
        return _part(order, rank, self.tp_size)

    def heads_of(self, rank: int) -> list[int]:
        """Return the query heads on a rank, in order, each next to its key head."""
        per_copy = self.num_heads // (self.num_kv_heads * self.multiplier)
        order: list[int] = []
        for copy in range(self.num_kv_heads * self.multiplier):
            place = copy  # index of its run of queries among the runs of all heads
            if not self.blocked:
                place = (copy % self.num_kv_heads) * self.multiplier + copy // self.num_kv_heads
            order += range(place * per_copy, (place + 1) * per_copy)
        return _part(order, rank, self.tp_size)


def _part(order: Sequence[int], rank: int, tp_size: int) -> list[int]:
    length = len(order) // tp_size
    return list(order[rank * length : (rank + 1) * length])


def stacked(
    shapes: Mapping[str, tuple[int, ...]], dim: int, by_rank: Sequence[Sequence[tuple[str, int, int]]]
) -> Pieces:
    """Describe a rank's tensor that concatenates runs of whole tensors along a dim.

    Args:
        shapes: shapes of the whole tensors, by name.
        dim: the dim of the runs.
        by_rank: for each rank, its runs `(whole tensor, begin, length)` in order.
    """
    all_pieces = []
    for runs in by_rank:
        pieces, end = [], 0
        for name, begin, length in runs:
            box = [length if it == dim else size for it, size in enumerate(shapes[name])]
            local = [end if it == dim else 0 for it in range(len(box))]
            offsets = [begin if it == dim else 0 for it in range(len(box))]
            pieces.append(Piece(name, local, box, offsets))
            end += length
        all_pieces.append(pieces)
    first = next(iter(shapes.values()))
    local_shape = [end if it == dim else size for it, size in enumerate(first)]
    return Pieces(local_shape, dict(shapes), all_pieces)


@dataclass(frozen=True)
class CopiedHeads:
    """A layer with several key and value heads, of which the ranks hold several copies each.

    Attributes:
        layer: name of the layer.
        order: the tiled order of its heads.
        head_size: number of rows of its weights per head.
        held: for each of its parameters, the shapes of the whole tensors in it by name, queries first.
        keys_and_values: where keys and values begin, as `(parameter, row)`.
        outputs: shapes of the whole weights, by name, of the sibling row-parallel layers that take all heads.
    """

    layer: str
    order: HeadOrder
    head_size: int
    held: Mapping[str, Mapping[str, tuple[int, ...]]]
    keys_and_values: Sequence[tuple[str, int]]
    outputs: Mapping[str, tuple[int, ...]]

    def is_tiled(self, saved: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether the first two key or value heads differ; in blocked order they are copies of one head.

        Args:
            saved: tensors that the first two tensor-parallel ranks saved, by name.
        """
        is_one_per_rank = self.order.num_kv_heads * self.order.multiplier == self.order.tp_size
        for name, begin in self.keys_and_values:
            first = saved[0][name][begin:][: self.head_size]
            second = saved[1][name][begin:] if is_one_per_rank else saved[0][name][begin + self.head_size :]
            if not same_bits(first, second[: self.head_size]):
                return True
        return False

    def tiled(self) -> dict[str, Pieces]:
        """Describe how the ranks hold the parameters of the layer and of the output projection in tiled order."""
        if len(self.outputs) != 1:
            raise CheckpointError(
                f"the copies of heads in {self.layer} are in trn1 order, which also permutes the columns of the output "
                "projection; expected exactly one RowParallelLinear next to it that takes "
                f"{self.order.num_heads * self.head_size} features, found {len(self.outputs)}. Use the checkpoint "
                "converter with --convert_to_full_state --hw_backend trn1, and load the whole weights"
            )
        rules = {name: self._permuted(shapes, 0) for name, shapes in self.held.items()}
        return rules | {name: self._permuted({name: shape}, 1) for name, shape in self.outputs.items()}

    def _permuted(self, shapes: Mapping[str, tuple[int, ...]], dim: int) -> Pieces:
        size = self.head_size
        heads_of = {
            whole: self.order.kv_heads_of if _projection(whole) in _KEYS_AND_VALUES else self.order.heads_of
            for whole in shapes
        }
        ranks = range(self.order.tp_size)
        runs = [[(whole, head * size, size) for whole in shapes for head in heads_of[whole](rank)] for rank in ranks]
        return stacked(shapes, dim, runs)


def copied_heads(modules: Mapping[str, nn.Module]) -> dict[str, CopiedHeads]:
    """Return the layers whose heads the two orders arrange differently, by name."""
    return {
        name: _copied_heads(name, module, modules)
        for name, module in modules.items()
        if isinstance(module, GQAQKVColumnParallelLinear) and _orders_differ(module)
    }


_KEYS_AND_VALUES = (PROJECTIONS["k"], PROJECTIONS["v"])


def _projection(whole: str) -> str:
    return whole.split(".")[-2]


def _orders_differ(module: GQAQKVColumnParallelLinear) -> bool:
    layout = module.key_value_layout
    is_padded = bool(layout.padding) or module.padded_q_size != module.q_size
    in_whole_heads = module.q_size % (layout.num_heads * layout.copies * layout.head_size) == 0
    return layout.copies > 1 and layout.num_heads > 1 and in_whole_heads and not is_padded


def _copied_heads(name: str, module: GQAQKVColumnParallelLinear, modules: Mapping[str, nn.Module]) -> CopiedHeads:
    layout = module.key_value_layout
    num_queries, rows = module.q_size // layout.head_size, module.q_size // module.tensor_parallel_size
    held: dict[str, Mapping[str, tuple[int, ...]]] = {}
    for full_name, parameter in module.named_parameters(prefix=name, recurse=False):
        kind, _, letters = full_name.split(".")[-1].partition("_")
        held[full_name] = {
            logical_name(full_name, f"{PROJECTIONS[letter]}.{kind}"): (
                module.q_size if letter == "q" else module.kv_size,
                *parameter.shape[1:],
            )
            for letter in letters
        }
    weights = [full_name for full_name in held if full_name.split(".")[-1].startswith("weight_")]
    beside = name.rpartition(".")[0]
    return CopiedHeads(
        name,
        HeadOrder(num_queries, layout.num_heads, layout.copies, layout.tensor_parallel_size, blocked=False),
        layout.head_size,
        held,
        [(weights[0], rows), (weights[0], rows + layout.rows_per_rank)]
        if module.fuse_qkv
        else [(weights[1], 0), (weights[2], 0)],
        {
            f"{other}.weight": (layer.output_size, layer.input_size)
            for other, layer in modules.items()
            if other.rpartition(".")[0] == beside
            and isinstance(layer, RowParallelLinear)
            and layer.input_size == module.q_size
        },
    )
