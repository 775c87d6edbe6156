"""An embedding table split over the tensor-parallel ranks, by vocabulary or by embedding dim.

With one rank, or without an initialised mesh, it is `nn.Embedding`.
"""

import torch
from nxd_state import Group, active_group, shard_along
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.initialization import InitMethod, empty_sharded_parameter, fill_from_logical
from nxd_layers.layer_group import layer_group
from nxd_layers.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)


class ParallelEmbedding(nn.Module):
    """A table of `num_embeddings` vectors of `embedding_dim`, split over the ranks.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: length of each vector.
        init_method: fills the whole table in place.
        dtype: of the table, and of the output.
        device: of the table; torch's default device if None.
        padding_idx: a token whose vector is zero at the start and gets no gradient.
        shard_across_embedding: split the vectors instead of the vocabulary.
        pad: allow a vocabulary that does not divide: rows of zeros, of no token, fill up the last ranks' parts.
        sequence_parallel_enabled: leave the output split along the sequence.
        sequence_dimension: which dim of the token ids is the sequence.

    Attributes:
        weight: `[vocab/tp, hidden]`, or `[vocab, hidden/tp]` split across the embedding.

    Raises:
        ValueError: the tensor-parallel degree does not divide the split dim; a padding_idx outside the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = nn.init.normal_,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        padding_idx: int | None = None,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int = 0,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} is outside the vocabulary 0..{num_embeddings - 1}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.init_method = init_method
        self.shard_across_embedding = shard_across_embedding
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        group = active_group("tp")
        self.tensor_parallel_size = group.size
        dim = 1 if shard_across_embedding else 0
        padded = -(-num_embeddings // group.size) * group.size if pad and dim == 0 else None
        self._spec = shard_along(
            (num_embeddings, embedding_dim), dim, rank=group.rank, size=group.size, padded_length=padded
        )
        self.weight = empty_sharded_parameter(
            self._spec, partition_dim=dim, num_partitions=group.size, dtype=dtype, device=device
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew, the same at every tensor-parallel degree."""
        fill_from_logical(self.weight, self._spec, (self.num_embeddings, self.embedding_dim), self._init_whole_table)

    def _init_whole_table(self, table: Tensor) -> None:
        self.init_method(table)
        if self.padding_idx is not None:
            table[self.padding_idx] = 0

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids `[...]` to vectors `[..., hidden]`; one dim is `seq/tp` long if sequence parallel.

        Raises:
            IndexError: (on the CPU) an id outside the vocabulary.
        """
        # Elsewhere a look at the values would stall the device.
        if input_.is_cpu and not torch.compiler.is_compiling():
            self._check_ids(input_)
        group = layer_group(self.tensor_parallel_size)
        if group.size == 1:
            return F.embedding(input_, self.weight, self.padding_idx)
        # Counted from the end, the sequence is one dim further in the vectors than in the ids.
        sequence_dim = self.sequence_dimension if self.sequence_dimension >= 0 else self.sequence_dimension - 1
        if self.shard_across_embedding:
            vectors = gather_from_tensor_model_parallel_region(F.embedding(input_, self.weight, self.padding_idx))
            if self.sequence_parallel_enabled:
                return scatter_to_sequence_parallel_region(vectors, sequence_dim)
            return vectors
        partial = lookup_own_tokens(input_, self.weight, self.padding_idx, group)
        if self.sequence_parallel_enabled:
            return reduce_scatter_to_sequence_parallel_region(partial, sequence_dim)
        return reduce_from_tensor_model_parallel_region_(partial)

    def _check_ids(self, ids: Tensor) -> None:
        wrong = (ids < 0) | (ids >= self.num_embeddings)
        if wrong.any():
            raise IndexError(f"token id {int(ids[wrong][0])} is outside the vocabulary 0..{self.num_embeddings - 1}")

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, local={tuple(self.weight.shape)}, "
            f"padding_idx={self.padding_idx}, sequence_parallel={self.sequence_parallel_enabled}"
        )


def lookup_own_tokens(ids: Tensor, table: Tensor, padding_idx: int | None, group: Group) -> Tensor:
    """Vectors `[..., hidden]` of the tokens in this rank's part of the vocabulary, zeros for the others.

    Args:
        ids: `[...]`, in the whole vocabulary.
        table: `[vocab/tp, hidden]`.
        padding_idx: in the whole vocabulary, the token whose vector gets no gradient, if there is one.
        group: the ranks that the vocabulary is split over.
    """
    rows = table.shape[0]
    local = ids - group.rank_tensor(ids) * rows
    elsewhere = (local < 0) | (local >= rows)
    vectors = F.embedding(local.masked_fill(elsewhere, 0), table)
    if padding_idx is not None and table.requires_grad:
        # The row that `F.embedding` would take as its padding_idx is another one on each rank.
        vectors = torch.where((ids == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
    return vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
