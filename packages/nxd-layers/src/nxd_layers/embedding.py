"""`ParallelEmbedding`: an embedding table split over the tensor-parallel ranks, by vocabulary or by embedding dim.

With one rank, or without an initialized mesh, it is `nn.Embedding`.
"""

import math
from collections.abc import Sequence

import torch
from nxd_state import Group, all_reduce
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.initialization import InitMethod
from nxd_layers.mappings import (
    GivenGroup,
    gather_from_tensor_model_parallel_region,
    parts_in_order,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from nxd_layers.sharded_linear import ShardedLinear


class ParallelEmbedding(ShardedLinear):
    """A table of `num_embeddings` vectors of `embedding_dim`, split over the ranks.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: length of each vector.
        init_method: fills the whole table in place.
        dtype: dtype of the table and of the output.
        device: device of the table; None: torch's default device.
        padding_idx: a token whose vector is zero at the start and gets no gradient.
        shard_across_embedding: split the vectors instead of the vocabulary.
        pad: allow a split dim that does not divide: zeros, of no token, fill up the last ranks' parts.
        sequence_parallel_enabled: leave the output split along the sequence.
        sequence_dimension: the dim of the token ids that is the sequence. None: ids are `[batch, seq]`, and the output
            is `[seq/tp, batch, hidden]`, as other sequence-parallel layers expect it, at any tensor-parallel degree.
        max_norm: vectors that are looked up and longer than this are first shortened to it, in the table.
        norm_type: the p of the p-norm that `max_norm` limits.
        scale_grad_by_freq: divide a vector's gradient by how often its token is looked up in the call.
        tensor_model_parallel_group: the ranks to split over; None: the tensor-parallel ranks.
        rank_ordering: the part that each rank holds; None: rank r holds part r.
        collect_output: False returns only what this rank knows: zeros for other ranks' tokens `[..., hidden]`, or its
            part of the vectors `[..., hidden/tp]`.

    Attributes:
        weight: `[vocab/tp, hidden]`, or `[vocab, hidden/tp]` split across the embedding.

    Raises:
        ValueError: the tensor-parallel degree does not divide the split dim; a padding_idx outside the vocabulary; or
            `rank_ordering` is not a permutation of the ranks.
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
        sequence_dimension: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
        rank_ordering: Sequence[int] | None = None,
        collect_output: bool = True,
    ) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} is outside the vocabulary 0..{num_embeddings - 1}")
        super().__init__(
            (num_embeddings, embedding_dim),
            partition_dim=1 if shard_across_embedding else 0,
            init_method=init_method,
            pad_multiple=1 if pad else None,
            tensor_model_parallel_group=tensor_model_parallel_group,
            rank_ordering=rank_ordering,
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.shard_across_embedding = shard_across_embedding
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, norm_type, scale_grad_by_freq
        self.collect_output = collect_output
        self._add_parameters(dtype, device, bias=False)

    def _init_whole_weight(self, table: Tensor) -> None:
        self.init_method(table)
        if self.padding_idx is not None:
            table[self.padding_idx] = 0

    def features(self) -> dict[str, str]:
        """See `ShardedLinear.features`."""
        names = ("sequence_parallel_enabled", "shard_across_embedding", "padding_idx", "max_norm", "scale_grad_by_freq")
        uncollected = {} if self.collect_output else {"collect_output": "collect_output=False"}
        return super().features() | self._set_flags(*names) | uncollected

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids `[...]` to vectors `[..., hidden]`; one dim is `seq/tp` long if sequence parallel.

        Raises:
            IndexError: (on the CPU) an id outside the vocabulary.
        """
        # Elsewhere a look at the values would stall the device.
        if input_.is_cpu and not torch.compiler.is_compiling():
            self._check_ids(input_)
        group = self.group()
        ids, sequence_dim = self.in_sequence_order(input_)
        if self.max_norm is not None:
            self._renormalize(ids, group)
        vectors = self._vectors_here(ids, group)
        if self.scale_grad_by_freq and vectors.requires_grad:
            counts = self._counts(ids).to(vectors.dtype)
            vectors.register_hook(lambda grad: grad / counts)
        return self._collected(vectors, sequence_dim, group) if self.collect_output else vectors

    def in_sequence_order(self, ids: Tensor) -> tuple[Tensor, int]:
        """Ids `[...]` with their dims in the order of the output's, and the dim of the sequence in the output."""
        if self.sequence_dimension is None:
            return ids.transpose(0, 1) if self.sequence_parallel_enabled and ids.dim() > 1 else ids, 0
        # Counted from the end, the sequence is one dim further in the vectors than in the ids.
        return ids, self.sequence_dimension - (self.sequence_dimension < 0)

    def _vectors_here(self, ids: Tensor, group: Group) -> Tensor:
        """This rank's part of the vectors: its elements of each vector, or the vectors of its tokens."""
        if group.size == 1 or self.shard_across_embedding:
            return F.embedding(ids, self.weight, self.padding_idx)
        return lookup_own_tokens(ids, self.weight, self.padding_idx, self.first_token(ids, group))

    def first_token(self, ids: Tensor, group: Group) -> Tensor:
        """The first token whose vector this rank holds, as data: 0-d int64."""
        part = group.rank_tensor(ids)
        if self.rank_ordering is not None:
            part = torch.tensor(self.rank_ordering, device=ids.device).index_select(0, part.view(1)).view(())
        return part * self.weight.shape[0]

    def _collected(self, vectors: Tensor, sequence_dim: int, group: Group) -> Tensor:
        if self.shard_across_embedding:
            whole = gather_from_tensor_model_parallel_region(vectors, process_group=group)
            if self.rank_ordering is not None:
                whole = parts_in_order(whole, [self.rank_ordering.index(part) for part in range(group.size)])
            whole = whole[..., : self.embedding_dim]
            if self.sequence_parallel_enabled:
                return scatter_to_sequence_parallel_region(whole, sequence_dim, group)
            return whole
        if self.sequence_parallel_enabled:
            return reduce_scatter_to_sequence_parallel_region(vectors, sequence_dim, group)
        return reduce_from_tensor_model_parallel_region_(vectors, group)

    @torch.no_grad()
    def _renormalize(self, ids: Tensor, group: Group) -> None:
        """Shorten the vectors of these tokens, in the table, as `nn.Embedding` with `max_norm` does."""
        assert self.max_norm is not None
        rows = ids.unique()
        if not self.shard_across_embedding:
            rows = rows - self.first_token(ids, group) if group.size > 1 else rows
            rows = rows[(rows >= 0) & (rows < self.weight.shape[0])]
        vectors = self.weight[rows]
        norms = torch.linalg.vector_norm(vectors, self.norm_type, dim=-1)
        if self.shard_across_embedding and self.norm_type == math.inf:
            norms = all_reduce(norms, group, op="max")
        elif self.shard_across_embedding:
            norms = all_reduce(norms**self.norm_type, group) ** (1 / self.norm_type)
        scale = torch.where(norms > self.max_norm, self.max_norm / (norms + 1e-7), torch.ones_like(norms))
        self.weight[rows] = vectors * scale.unsqueeze(-1)

    def _counts(self, ids: Tensor) -> Tensor:
        """How often each id is in the call: `[..., 1]`."""
        return torch.bincount(ids.flatten(), minlength=self.num_embeddings)[ids].unsqueeze(-1)

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


def lookup_own_tokens(ids: Tensor, table: Tensor, padding_idx: int | None, first_token: Tensor) -> Tensor:
    """Vectors `[..., hidden]` of the tokens in this rank's part of the vocabulary, zeros for the others.

    Args:
        ids: `[...]`, tokens of the whole vocabulary.
        table: `[vocab/tp, hidden]`.
        padding_idx: the token whose vector gets no gradient, if there is one.
        first_token: the token of the table's first row, 0-d.
    """
    rows = table.shape[0]
    local = ids - first_token
    elsewhere = (local < 0) | (local >= rows)
    vectors = F.embedding(local.masked_fill(elsewhere, 0), table)
    if padding_idx is not None and table.requires_grad:
        # The row that `F.embedding` would take as its padding_idx is another one on each rank.
        vectors = torch.where((ids == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
    return vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
