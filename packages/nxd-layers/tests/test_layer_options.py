"""Options of parallel layers and norms, against one process in float64."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from nxd_layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    column_parallel_linears,
)
from nxd_state import all_gather, all_reduce, get_group, initialize_model_parallel
from torch import nn
from torch.nn import functional as F

IN, OUT, VOCAB, HIDDEN = 8, 12, 12, 8
F64 = {"dtype": torch.float64}


def sample(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_linear(kind, **arguments):
    """`nn.Linear` with the initial weights that the layer has at any degree."""
    torch.manual_seed(0)
    plain = nn.Linear(IN, OUT, dtype=torch.float32).double()
    torch.manual_seed(0)
    return plain, kind(IN, OUT, **arguments, **F64)


@pytest.mark.parametrize("shard_across_embedding", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_sequence_parallel_embedding_of_batches_gives_sequences_first(
    on_tp, assert_same, logical, tp, shard_across_embedding
):
    def job():
        layer = ParallelEmbedding(
            VOCAB, HIDDEN, **F64, shard_across_embedding=shard_across_embedding, sequence_parallel_enabled=True
        )
        ids = torch.arange(12).view(3, 4)  # three sequences of four: two ranks could not split the batch
        output = layer(ids)
        assert_same(output, F.embedding(ids.t(), logical(layer.weight)).chunk(tp)[get_group("tp").rank])
        output.sum().backward()
        assert_same(logical(layer.weight, layer.weight.grad), torch.ones(VOCAB, HIDDEN, dtype=torch.float64))

    on_tp(tp, job)


@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_column_linear_that_skips_its_bias_returns_it(on_tp, assert_same, gather_output, stride):
    def job():
        plain, layer = whole_linear(
            ColumnParallelLinear, gather_output=gather_output, stride=stride, skip_bias_add=True
        )
        x = sample(3, IN)
        for output, bias in (layer(x), *column_parallel_linears(x, [layer, layer])):
            whole = output + bias
            if not gather_output:
                whole = all_gather(whole, get_group("tp"), dim=-1)
                whole = whole.unflatten(-1, (2, stride, -1)).transpose(-3, -2).flatten(-3)
            assert_same(whole, plain(x))
        (output.sum() + 2 * bias.sum()).backward()
        assert layer.bias.grad.eq(2).all()
        return layer.bias.numel()

    assert on_tp(2, job) == [OUT // 2] * 2


def test_row_linear_that_skips_its_bias_returns_it(on_tp, assert_same):
    def job():
        plain, layer = whole_linear(RowParallelLinear, skip_bias_add=True)
        output, bias = layer(sample(3, IN))
        assert bias is layer.bias
        assert_same(output, F.linear(sample(3, IN), plain.weight))
        return RowParallelLinear(IN, OUT, False, skip_bias_add=True)(torch.ones(IN))[1]

    assert on_tp(2, job) == [None, None]


@pytest.mark.parametrize("input_is_parallel", [False, True])
@pytest.mark.parametrize("width", [8, 6])
def test_row_linear_of_fused_matrices_equals_linear(on_tp, assert_same, logical, width, input_is_parallel):
    def job():
        torch.manual_seed(0)
        layer = RowParallelLinear(width, OUT, input_is_parallel=input_is_parallel, stride=2, pad=True, **F64)
        assert (layer.padded_input_size, layer.weight.partition_stride) == (8, 2)
        x = sample(3, width).requires_grad_()
        given = x
        if input_is_parallel:  # what a column-parallel layer of two fused matrices leaves, padded
            by_matrix = F.pad(x.unflatten(-1, (2, -1)), (0, 4 - width // 2))
            given = by_matrix.unflatten(-1, (2, -1))[..., get_group("tp").rank, :].flatten(-2)
        output = layer(given)
        weight = logical(layer.weight)
        assert_same(output, F.linear(x, weight, layer.bias))
        output.sum().backward()
        assert_same(logical(layer.weight, layer.weight.grad), x.sum(dim=0).expand(OUT, -1))
        if not input_is_parallel:
            assert_same(x.grad, weight.sum(dim=0).expand(3, -1))

    on_tp(2, job)


def test_row_linear_that_does_not_reduce_leaves_summands(on_tp, assert_same):
    def job():
        plain, layer = whole_linear(RowParallelLinear, bias=False, reduce_output=False)
        assert_same(all_reduce(layer(sample(3, IN)), get_group("tp")), F.linear(sample(3, IN), plain.weight))

    on_tp(2, job)


@pytest.mark.parametrize("order", [[1, 0, 3, 2], [2, 3, 1, 0]])
def test_layers_whose_ranks_hold_parts_in_another_order_equal_their_plain_ones(on_tp, assert_same, logical, order):
    def job():
        rank, x = get_group("tp").rank, sample(3, IN)
        plain, column = whole_linear(ColumnParallelLinear, rank_ordering=order)
        assert_same(column(x), plain(x))
        assert_same(column.weight, plain.weight.chunk(4)[order[rank]])
        column(x).sum().backward()
        assert_same(logical(column.weight, column.weight.grad), x.sum(dim=0).expand(OUT, -1))
        plain, row = whole_linear(RowParallelLinear, rank_ordering=order)
        assert_same(row(x), plain(x))
        assert_same(row.weight, plain.weight.chunk(4, dim=1)[order[rank]])
        for across in (False, True):
            table = ParallelEmbedding(VOCAB, HIDDEN, **F64, rank_ordering=order, shard_across_embedding=across)
            assert_same(table(torch.arange(VOCAB)), logical(table.weight))

    on_tp(4, job)


def test_rank_ordering_that_leaves_a_rank_out_raises(on_tp):
    def job():
        with pytest.raises(ValueError, match=r"rank_ordering=\[0, 0\] must name each of the ranks 0..1 once"):
            RowParallelLinear(IN, OUT, rank_ordering=[0, 0])

    on_tp(2, job)


@pytest.mark.parametrize("wrong", [{"stride": 0}, {"stride": -1}, {"pad": True, "pad_alignment_size_per_rank": 0}])
def test_sizes_of_parts_below_one_raise(wrong):
    with pytest.raises(ValueError, match="both must be 1 or more"):
        ColumnParallelLinear(IN, OUT, **wrong)


def test_rank_ordering_that_is_a_number_raises():
    with pytest.raises(ValueError, match="rank_ordering=3 is not a sequence of ranks"):
        ColumnParallelLinear(IN, OUT, rank_ordering=3)


def test_layers_of_a_given_process_group_are_split_over_its_ranks(run_ranks, assert_same):
    def job():
        initialize_model_parallel()
        made = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = made[dist.get_rank() // 2]
        arguments = {"tensor_model_parallel_group": group}
        plain, column = whole_linear(ColumnParallelLinear, **arguments)
        assert column.weight.shape == (OUT // 2, IN)
        assert_same(copy.deepcopy(column)(sample(3, IN)), plain(sample(3, IN)))
        plain, row = whole_linear(RowParallelLinear, **arguments)
        assert_same(row(sample(3, IN)), plain(sample(3, IN)))
        torch.manual_seed(0)
        table = ParallelEmbedding(VOCAB, HIDDEN, **arguments)
        torch.manual_seed(0)
        expected = ParallelEmbedding(VOCAB, HIDDEN)
        assert_same(table(torch.arange(VOCAB)), expected(torch.arange(VOCAB)))
        return table.weight.shape[0]

    assert run_ranks(job, 4) == [VOCAB // 2] * 4


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_row_linear_sums_in_the_given_dtype_and_returns_its_own(on_tp, sent_dtypes, reduce_dtype):
    def job():
        layer = RowParallelLinear(4, 1, bias=False, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        outputs = []
        seen = sent_dtypes(lambda: outputs.append(layer(torch.ones(4, dtype=torch.bfloat16))))
        return seen, outputs[0].dtype

    assert on_tp(2, job) == [({reduce_dtype or torch.bfloat16}, torch.bfloat16)] * 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_are_summed_in_the_given_dtype(on_tp, sent_dtypes, reduce_dtype, fused):
    def job():
        if fused:
            layer = GQAQKVColumnParallelLinear(
                IN, [8, 4], gather_output=False, kv_size_multiplier=2, num_key_value_heads=1, reduce_dtype=reduce_dtype
            )
        else:
            layer = ColumnParallelLinear(IN, OUT, gather_output=False, reduce_dtype=reduce_dtype)
        x = torch.ones(3, IN, requires_grad=True)
        outputs = layer(x)
        seen = sent_dtypes(lambda: sum(it.sum() for it in (outputs if fused else [outputs])).backward())
        assert x.grad.dtype == torch.float32
        return seen

    assert on_tp(2, job) == [{reduce_dtype or torch.float32}] * 2


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_master_weight_is_the_whole_initial_weight_and_not_saved(on_tp, assert_same, logical, kind):
    def job():
        layer = kind(IN, OUT, keep_master_weight=True, **F64)
        assert_same(layer.master_weight, logical(layer.weight))
        assert set(layer.state_dict()) == {"weight", "bias"}
        assert kind(IN, OUT).master_weight is None

    on_tp(2, job)


def test_padded_column_linear_keeps_its_padding_and_is_aligned(on_tp):
    def job():
        arguments = {"pad": True, "pad_alignment_size_per_rank": 4}
        kept = ColumnParallelLinear(IN, 10, **arguments, keep_padded_output=True)
        cut = ColumnParallelLinear(IN, 10, **arguments)
        return kept(torch.ones(IN)).shape[0], cut(torch.ones(IN)).shape[0], kept.weight.shape[0]

    assert on_tp(2, job) == [(16, 10, 8)] * 2


@pytest.mark.pairs
@pytest.mark.parametrize("shard_across_embedding", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_norm": 1.5},
        {"max_norm": 0.5, "norm_type": 1.0},
        {"max_norm": 0.5, "norm_type": math.inf},
        {"scale_grad_by_freq": True},
        {"scale_grad_by_freq": True, "padding_idx": 5, "max_norm": 2.0},
    ],
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_embedding_options_are_those_of_torch(on_tp, assert_same, logical, tp, arguments, shard_across_embedding):
    def job():
        torch.manual_seed(0)
        plain = nn.Embedding(VOCAB, HIDDEN, **arguments).double()
        torch.manual_seed(0)
        layer = ParallelEmbedding(VOCAB, HIDDEN, **arguments, **F64, shard_across_embedding=shard_across_embedding)
        ids = torch.tensor([[0, 5, 7], [7, 7, 11]])
        output, expected = layer(ids), plain(ids)
        assert_same(output, expected, rtol=1e-6)
        assert_same(logical(layer.weight), plain.weight, rtol=1e-6)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert_same(logical(layer.weight, layer.weight.grad), plain.weight.grad, rtol=1e-6)

    on_tp(tp, job)


@pytest.mark.parametrize("shard_across_embedding", [False, True])
def test_embedding_that_does_not_collect_leaves_what_its_rank_knows(
    on_tp, assert_same, logical, shard_across_embedding
):
    def job():
        layer = ParallelEmbedding(
            VOCAB, HIDDEN, **F64, shard_across_embedding=shard_across_embedding, collect_output=False
        )
        vectors, group = layer(torch.arange(VOCAB)), get_group("tp")
        whole = all_gather(vectors, group, dim=-1) if shard_across_embedding else all_reduce(vectors, group)
        assert_same(whole, logical(layer.weight))

    on_tp(2, job)


def test_embedding_pads_the_vectors_that_it_splits(on_tp, assert_same, logical):
    def job():
        layer = ParallelEmbedding(VOCAB, 5, **F64, shard_across_embedding=True, pad=True)
        assert layer.weight.shape == (VOCAB, 3)
        assert_same(layer(torch.arange(VOCAB)), logical(layer.weight))

    on_tp(2, job)


def test_rms_norm_takes_what_scripts_give_it():
    norm = RMSNorm((3, 4), 1e-3, True, elementwise_affine=True)
    x = torch.randn(2, 3, 4)

    torch.testing.assert_close(norm(x), F.rms_norm(x, (3, 4), norm.weight, 1e-3))
    assert norm.weight.sequence_parallel_enabled
    assert RMSNorm(4).eps == 1e-5
    with pytest.raises(ValueError, match=r"use torch\.nn\.RMSNorm"):
        RMSNorm(4, elementwise_affine=False)


def test_layer_norm_takes_what_scripts_give_it():
    norm = LayerNorm(4, 1e-5, True, False, "cpu", torch.bfloat16, True)

    assert (norm.bias, norm.weight.dtype, norm.weight.sequence_parallel_enabled) == (None, torch.bfloat16, True)
    assert set(LayerNorm(4).state_dict()) == {"weight", "bias"}
