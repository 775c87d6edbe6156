"""`ParallelEmbedding` against `nn.Embedding`'s lookup in one process, in float64."""

import pytest
import torch
from nxd_layers import ParallelEmbedding, scatter_to_sequence_parallel_region
from nxd_state import check_shard_specs, get_shard_spec
from torch.nn import functional as F

VOCAB, HIDDEN = 24, 12
SHAPES = {0: (), 1: (7,), 2: (12, 12), 3: (2, 12, 3)}


@pytest.fixture
def check_against_embedding(logical, assert_same):
    """Compares output and gradient of a layer with those of `F.embedding` on the logical table."""

    def check(layer, shape, *, sequence_dim=None):
        torch.manual_seed(1)
        ids = torch.randint(0, layer.num_embeddings, shape)
        ids.view(-1)[0] = 3  # the padding token of the tests is there
        output_grad = torch.randn(*shape, layer.embedding_dim, dtype=torch.float64)
        table = logical(layer.weight).clone().requires_grad_()
        expected = F.embedding(ids, table, layer.padding_idx)
        expected.backward(output_grad)

        output = layer(ids)
        if sequence_dim is not None:
            expected = scatter_to_sequence_parallel_region(expected, sequence_dim)
            output_grad = scatter_to_sequence_parallel_region(output_grad, sequence_dim)
        output.backward(output_grad)

        assert_same(output, expected)
        assert_same(logical(layer.weight, layer.weight.grad), table.grad)

    return check


@pytest.mark.pairs
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("padding_idx", [None, 3, 3 - VOCAB])
@pytest.mark.parametrize("shard_across_embedding", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_embedding_of_ids_of_any_rank_equals_embedding(
    on_tp, check_against_embedding, tp, shard_across_embedding, padding_idx, dims
):
    def job():
        layer = ParallelEmbedding(
            VOCAB,
            HIDDEN,
            dtype=torch.float64,
            padding_idx=padding_idx,
            shard_across_embedding=shard_across_embedding,
        )
        assert layer.weight.shape == ((VOCAB, HIDDEN // tp) if shard_across_embedding else (VOCAB // tp, HIDDEN))
        check_against_embedding(layer, SHAPES[dims])

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize(("sequence_dim", "of_vectors"), [(0, 0), (1, 1), (-1, 1)])
@pytest.mark.parametrize("shard_across_embedding", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_embedding_sequence_parallel_equals_embedding(
    on_tp, check_against_embedding, tp, shard_across_embedding, sequence_dim, of_vectors
):
    def job():
        layer = ParallelEmbedding(
            VOCAB,
            HIDDEN,
            dtype=torch.float64,
            padding_idx=3,
            shard_across_embedding=shard_across_embedding,
            sequence_parallel_enabled=True,
            sequence_dimension=sequence_dim,
        )
        check_against_embedding(layer, (12, 12), sequence_dim=of_vectors)

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize("vocab", [23, 22, 21, 5])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_embedding_of_a_padded_vocabulary_equals_embedding(on_tp, check_against_embedding, tp, vocab, sequence_dim):
    def job():
        layer = ParallelEmbedding(
            vocab,
            HIDDEN,
            dtype=torch.float64,
            pad=True,
            sequence_parallel_enabled=sequence_dim is not None,
            sequence_dimension=sequence_dim,
        )
        assert layer.weight.shape == (-(-vocab // tp), HIDDEN)
        check_against_embedding(layer, (12, 2), sequence_dim=sequence_dim)

    on_tp(tp, job)


def test_embedding_padding_rows_are_zero_and_get_no_gradient(on_tp):
    def job():
        layer = ParallelEmbedding(5, 3, pad=True)  # 4 ranks x 2 rows: rank 2 holds one token, rank 3 none
        layer(torch.arange(5)).sum().backward()
        return layer.weight, layer.weight.grad, get_shard_spec(layer.weight)

    weights, grads, specs = zip(*on_tp(4, job), strict=True)
    assert torch.count_nonzero(torch.cat(weights)[5:]) == 0
    assert torch.equal(torch.cat(grads)[:, 0], torch.tensor([1.0] * 5 + [0.0] * 3))
    check_shard_specs(specs)


def test_embedding_padding_token_starts_at_zero_and_gets_no_gradient(on_tp, logical):
    def job():
        layer = ParallelEmbedding(VOCAB, HIDDEN, padding_idx=20)
        layer(torch.arange(VOCAB)).sum().backward()
        weight, grad = logical(layer.weight), logical(layer.weight, layer.weight.grad)
        assert torch.count_nonzero(weight[20]) == 0
        assert torch.count_nonzero(weight) == (VOCAB - 1) * HIDDEN
        assert torch.equal(grad.sum(dim=1), torch.full((VOCAB,), float(HIDDEN)).index_fill(0, torch.tensor([20]), 0.0))

    on_tp(2, job)


@pytest.mark.parametrize("shard_across_embedding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_embedding_output_has_the_dtype_of_the_table(on_tp, dtype, shard_across_embedding):
    def job():
        layer = ParallelEmbedding(VOCAB, HIDDEN, dtype=dtype, shard_across_embedding=shard_across_embedding)
        output = layer(torch.arange(VOCAB))
        output.sum().backward()
        assert (output.dtype, layer.weight.grad.dtype) == (dtype, dtype)

    on_tp(2, job)


def test_embedding_takes_int32_ids(on_tp):
    def job():
        layer = ParallelEmbedding(VOCAB, HIDDEN)
        assert torch.equal(layer(torch.arange(VOCAB, dtype=torch.int32)), layer(torch.arange(VOCAB)))

    on_tp(2, job)


@pytest.mark.parametrize(
    ("arguments", "forward"),
    [
        ({}, ["c10d::allreduce_"]),
        ({"sequence_parallel_enabled": True}, ["c10d::alltoall_base_"]),
        ({"shard_across_embedding": True}, ["c10d::_allgather_base_"]),
    ],
)
def test_embedding_communicates_once_forward(on_tp, collectives, arguments, forward):
    def job():
        layer = ParallelEmbedding(VOCAB, HIDDEN, **arguments)
        return collectives(lambda: layer(torch.arange(VOCAB)))

    assert on_tp(2, job) == [forward] * 2


def test_embedding_parameters_carry_the_documented_attributes(on_tp):
    def job():
        by_vocabulary = ParallelEmbedding(VOCAB, HIDDEN).weight
        by_embedding = ParallelEmbedding(VOCAB, HIDDEN, shard_across_embedding=True).weight
        return [(w.tensor_model_parallel, w.partition_dim, w.num_partitions) for w in (by_vocabulary, by_embedding)]

    assert on_tp(2, job) == [[(True, 0, 2), (True, 1, 2)]] * 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("wrong_id", [-1, VOCAB])
def test_embedding_of_an_id_outside_the_vocabulary_raises(on_tp, tp, wrong_id):
    def job():
        with pytest.raises(IndexError, match=f"token id {wrong_id} is outside the vocabulary 0..23"):
            ParallelEmbedding(VOCAB, HIDDEN)(torch.tensor([2, wrong_id]))

    on_tp(tp, job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_embeddings": 23}, r"2 shards do not divide dim 0 of shape \(23, 6\).*pad it to 24"),
        ({"num_embeddings": 23, "embedding_dim": 5, "shard_across_embedding": True}, r"dim 1 of shape \(23, 5\)"),
        ({"num_embeddings": 24, "padding_idx": 24}, r"padding_idx=24 is outside the vocabulary 0\.\.23"),
        ({"num_embeddings": 24, "padding_idx": -25}, r"padding_idx=-25 is outside the vocabulary 0\.\.23"),
    ],
)
def test_embedding_with_wrong_arguments_raises(on_tp, arguments, message):
    def job():
        with pytest.raises(ValueError, match=message):
            ParallelEmbedding(**{"embedding_dim": 6, **arguments})

    on_tp(2, job)


def test_embedding_built_before_the_mesh_raises_when_used(on_tp):
    from nxd_state import destroy_model_parallel, initialize_model_parallel

    def job():
        destroy_model_parallel()
        layer = ParallelEmbedding(VOCAB, HIDDEN)
        initialize_model_parallel(tensor_model_parallel_size=2)
        with pytest.raises(RuntimeError, match="built for tensor_model_parallel_size=1, but it is 2 now"):
            layer(torch.arange(VOCAB))

    on_tp(2, job)
