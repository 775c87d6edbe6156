"""The branch of embeddings: A `[r, vocab]` is a second table of short vectors, which B `[hidden, r]` projects up.

As in PEFT, A starts at zero, B is drawn from N(0, 1), and there is no dropout. Only short vectors, `[..., r]`, cross
the ranks.
"""

from typing import Any

from nxd_layers.embedding import ParallelEmbedding, lookup_own_tokens
from nxd_layers.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from nxd_state import active_group
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_lora.adapter import (
    LayerKind,
    complete_factor,
    factor,
    fill_factor,
    make_factor,
    product,
    scale_of,
)
from nxd_lora.config import LoraConfig
from nxd_lora.linear import check_parallel_features

_SUPPORTED = ("padding", "sequence_parallel_enabled", "padding_idx", "forward", "adapter")


def _add_factors(layer: Any, config: LoraConfig, part: str) -> None:
    if isinstance(layer, ParallelEmbedding):
        across = ("shard_across_embedding",) if layer.shard_across_embedding else ("rank_ordering",)
        check_parallel_features(layer, (*_SUPPORTED, *across))
    elif layer.max_norm is not None:
        raise ValueError(f"{layer} has max_norm, which an adapter does not support; leave it out of target_modules")
    rank = config.lora_rank
    partial = getattr(layer, "sequence_parallel_enabled", False)
    layer.lora_embedding_A = make_factor(layer.weight, 0, lora_rank=rank, rank_dim=0, sequence_parallel=partial)
    layer.lora_embedding_B = make_factor(layer.weight, 1, lora_rank=rank, rank_dim=1, sequence_parallel=partial)
    fill_factor(layer.lora_embedding_A, layer.num_embeddings, rank_dim=0, init_method=nn.init.zeros_)
    fill_factor(layer.lora_embedding_B, layer.embedding_dim, rank_dim=1, init_method=nn.init.normal_)


def _weight_deltas(layer: Any) -> dict[str, Tensor]:
    return {"weight": scale_of(layer) * product(layer.lora_embedding_B, layer.lora_embedding_A).t()}


def _embedding_delta(layer: Any, ids: Tensor) -> Tensor:
    short = F.embedding(
        ids, complete_factor(layer, 0).t(), layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq
    )
    return F.linear(short * scale_of(layer), complete_factor(layer, 1))


def _parallel_embedding_delta(layer: Any, ids: Tensor) -> Tensor:
    ids, sequence_dim = layer.in_sequence_order(ids)
    if layer.tensor_parallel_size == 1:
        return _embedding_delta(layer, ids)
    if layer.shard_across_embedding:
        return _delta_across_embedding(layer, ids)
    # [..., r], zeros for other ranks' tokens
    first_token = layer.first_token(ids, active_group("tp"))
    short = lookup_own_tokens(ids, factor(layer, 0).t(), layer.padding_idx, first_token) * scale_of(layer)
    if layer.sequence_parallel_enabled:
        short = reduce_scatter_to_sequence_parallel_region(short, sequence_dim)
    else:
        short = reduce_from_tensor_model_parallel_region_(short)
    return F.linear(short, factor(layer, 1))


def _delta_across_embedding(layer: ParallelEmbedding, ids: Tensor) -> Tensor:
    """A is whole and B split; gathering B is cheaper than gathering its product."""
    rows = factor(layer, 1)
    if layer.sequence_parallel_enabled:
        ids = scatter_to_sequence_parallel_region(ids, layer.sequence_dimension or 0)
        whole = gather_from_sequence_parallel_region(rows)  # each rank's gradient covers its part of the sequence
    else:
        whole = gather_from_tensor_model_parallel_region(rows, dim=0)
    short = F.embedding(ids, factor(layer, 0).t(), layer.padding_idx)
    return F.linear(short * scale_of(layer), whole)


_FACTOR_NAMES = ("lora_embedding_A", "lora_embedding_B")
PLAIN_EMBEDDING = LayerKind(_FACTOR_NAMES, _add_factors, _embedding_delta, _weight_deltas, zero_factor=0)
PARALLEL_EMBEDDING = LayerKind(_FACTOR_NAMES, _add_factors, _parallel_embedding_delta, _weight_deltas, zero_factor=0)
