"""The layers of nxd_layers with the arguments of NeuronX Distributed: in its order, and those without effect here."""

import nxd_layers

from nxd_neuronx.arguments import fifth_is_dtype, takes_order_too

COLUMN_ORDER = (
    "input_size",
    "output_size",
    "bias",
    "gather_output",
    "dtype",
    "device",
    "stride",
    "init_method",
    "sequence_parallel_enabled",
    "sequence_dimension",
    "keep_master_weight",
    "skip_bias_add",
    "pad",
    "pad_alignment_size_per_rank",
    "keep_padded_output",
    "tensor_model_parallel_group",
    "reduce_dtype",
    "rank_ordering",
)
ROW_ORDER = (
    "input_size",
    "output_size",
    "bias",
    "input_is_parallel",
    "dtype",
    "device",
    "stride",
    "init_method",
    "sequence_parallel_enabled",
    "sequence_dimension",
    "keep_master_weight",
    "skip_bias_add",
    "pad",
    "reduce_output",
    "tensor_model_parallel_group",
    "reduce_dtype",
    "tile_cc",
    "rank_ordering",
)
QKV_ORDER = (
    "input_size",
    "output_sizes",
    "bias",
    "gather_output",
    "dtype",
    "device",
    "init_method",
    "sequence_parallel_enabled",
    "keep_master_weight",
    "kv_size_multiplier",
    "fuse_qkv",
    "reduce_dtype",
)
EMBEDDING_ORDER = (
    "num_embeddings",
    "embedding_dim",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
    "init_method",
    "device",
    "dtype",
    "shard_across_embedding",
    "pad",
    "sequence_parallel_enabled",
    "tensor_model_parallel_group",
    "use_spmd_rank",
    "sequence_dimension",
    "tile_cc",
    "rank_ordering",
    "collect_output",
)
_TILE_CC = {"tile_cc": "this library chooses how collectives are cut"}
_IGNORED_BY_EMBEDDINGS = {
    "sparse": "gradients of tables are dense tensors, with the same numbers",
    "use_spmd_rank": "the rank is data in every graph already",
    **_TILE_CC,
}


class ColumnParallelLinear(nxd_layers.ColumnParallelLinear):
    """`nxd_layers.ColumnParallelLinear`; `dtype` may also stand fifth, followed by the rest of `COLUMN_ORDER`."""

    __init__ = takes_order_too(nxd_layers.ColumnParallelLinear.__init__, COLUMN_ORDER, tells=fifth_is_dtype)


class RowParallelLinear(nxd_layers.RowParallelLinear):
    """`nxd_layers.RowParallelLinear`; `dtype` may also stand fifth, followed by the rest of `ROW_ORDER`.

    `device=False`, which one document gives, means None.
    """

    __init__ = takes_order_too(nxd_layers.RowParallelLinear.__init__, ROW_ORDER, tells=fifth_is_dtype, ignored=_TILE_CC)


class GQAQKVColumnParallelLinear(nxd_layers.GQAQKVColumnParallelLinear):
    """`nxd_layers.GQAQKVColumnParallelLinear`; `dtype` may also stand fifth, followed by the rest of `QKV_ORDER`."""

    __init__ = takes_order_too(nxd_layers.GQAQKVColumnParallelLinear.__init__, QKV_ORDER, tells=fifth_is_dtype)


class ParallelEmbedding(nxd_layers.ParallelEmbedding):
    """`nxd_layers.ParallelEmbedding`; `padding_idx` may also stand third, followed by the rest of `EMBEDDING_ORDER`."""

    __init__ = takes_order_too(
        nxd_layers.ParallelEmbedding.__init__,
        EMBEDDING_ORDER,
        tells=lambda args: len(args) > 2 and not callable(args[2]),
        ignored=_IGNORED_BY_EMBEDDINGS,
    )
