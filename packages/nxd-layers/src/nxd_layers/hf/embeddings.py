"""Tables of tokens split over the ranks, in the places of plain ones and of subclasses that scale their vectors."""

from functools import cache
from typing import Any

from torch import nn

from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.hf.shards import take_part


def parallel_embedding(table: nn.Embedding, *, shard_across_embedding: bool = False) -> Any:
    """`ParallelEmbedding` with the rows of `table`; a vocabulary that does not divide is padded.

    A subclass of `nn.Embedding` still does what it did around its lookup.

    Raises:
        ValueError: the table has options that change its values or its gradients.
    """
    if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        raise ValueError(f"{table} cannot be split: max_norm, scale_grad_by_freq and sparse are not supported")
    layer = ParallelEmbedding(
        table.num_embeddings,
        table.embedding_dim,
        padding_idx=table.padding_idx,
        dtype=table.weight.dtype,
        device="meta",
        shard_across_embedding=shard_across_embedding,
        pad=True,
    )
    layer.weight = take_part(layer.weight, table.weight)
    layer.training = table.training
    if type(table) is nn.Embedding:
        return layer
    return _in_class_of(table, layer)


class _Lookup(ParallelEmbedding, nn.Embedding):  # type: ignore[misc]
    """A parallel table where `super().forward(ids)` of a subclass of `nn.Embedding` expects a plain one."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which does not find a class that was made here."""
        return _without_state, (plain_class_of(self),), self.__dict__


@cache
def _split_class(cls: Any) -> Any:
    return type(f"Parallel{cls.__name__}", (cls, _Lookup), {"__doc__": f"`{cls.__name__}`, split over the ranks."})


def plain_class_of(layer: ParallelEmbedding) -> type[nn.Module]:
    """The class of the table that the layer stands for."""
    return type(layer).__bases__[0] if isinstance(layer, _Lookup) else nn.Embedding


def _in_class_of(table: nn.Embedding, layer: ParallelEmbedding) -> nn.Module:
    made = _without_state(type(table))
    kept = ("_buffers", "_non_persistent_buffers_set", "_modules")
    made.__dict__.update({**vars(table), **vars(layer), **{name: vars(table)[name] for name in kept}})
    made._parameters = {**table._parameters, **layer._parameters}
    return made


def _without_state(cls: Any) -> nn.Module:
    split = _split_class(cls)
    made: nn.Module = split.__new__(split)
    return made
