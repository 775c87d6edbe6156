"""`CoreAttention` and its masks against loops over batch, heads, queries and keys, in float64."""

import math

import pytest
import torch
from nxd_layers.attention import CoreAttention, attention_mask, document_ids_from_lengths
from nxd_state import get_group, get_rng_state, seed_model_parallel, set_rng_state

BATCH, HEAD = 2, 4
FLOAT64 = {"dtype": torch.float64}


def may_look(query, key, *, offset, causal, padding, documents):
    """Whether the query at a place after `offset` cached ones may look at a key."""
    position = query + offset
    return (
        (not causal or key <= position)
        and (padding is None or bool(padding[key]))
        and (documents is None or documents[key] == documents[position])
    )


def attention_by_loops(query, key, value, *, causal=True, padding=None, documents=None, scale=None):
    batch, heads, num_queries, head_size = query.shape
    key_heads, num_keys = key.shape[1:3]
    scale = 1 / math.sqrt(head_size) if scale is None else scale
    rows = []
    for b in range(batch):
        for head in range(heads):
            shared = head * key_heads // heads
            for q in range(num_queries):
                rules = {
                    "offset": num_keys - num_queries,
                    "causal": causal,
                    "padding": None if padding is None else padding[b],
                    "documents": None if documents is None else documents[b],
                }
                keys = [k for k in range(num_keys) if may_look(q, k, **rules)]
                scores = [(query[b, head, q] * key[b, shared, k]).sum() * scale for k in keys]
                total = sum(score.exp() for score in scores)
                mixed = sum(
                    (score.exp() / total * value[b, shared, k] for score, k in zip(scores, keys, strict=True)),
                    torch.zeros(head_size, **FLOAT64),
                )
                rows.append(mixed)
    return torch.stack(rows).view(query.shape)


def random_tensors(heads, key_heads, num_queries, num_keys):
    torch.manual_seed(1)
    shapes = [(BATCH, heads, num_queries, HEAD), *[(BATCH, key_heads, num_keys, HEAD)] * 2]
    return [torch.randn(shape, requires_grad=True, **FLOAT64) for shape in shapes]


def gradients(output, tensors):
    torch.manual_seed(2)
    return torch.autograd.grad(output, tensors, torch.randn_like(output))


LEFT_PADDED = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
RIGHT_PADDED = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
DOCUMENTS = [[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]]


@pytest.mark.pairs
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("num_queries", [5, 3, 1])  # of five keys: the others are cached
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("padding", "documents"),
    [(None, None), (LEFT_PADDED, None), (RIGHT_PADDED, None), (None, DOCUMENTS), (LEFT_PADDED, DOCUMENTS)],
)
def test_attention_equals_loops(assert_same, heads, key_heads, num_queries, causal, padding, documents):
    tensors = random_tensors(heads, key_heads, num_queries, 5)
    mask = None
    if padding is not None or documents is not None:
        mask = attention_mask(
            num_queries,
            5,
            causal=causal,
            padding_mask=None if padding is None else torch.tensor(padding),
            document_ids=None if documents is None else torch.tensor(documents),
        )

    output = CoreAttention(causal=causal)(*tensors, mask)

    expected = attention_by_loops(*tensors, causal=causal, padding=padding, documents=documents)
    assert_same(output, expected)
    for found, grad in zip(gradients(output, tensors), gradients(expected, tensors), strict=True):
        assert_same(found, grad)


def test_attention_scale_is_that_given(assert_same):
    tensors = random_tensors(2, 1, 3, 3)

    assert_same(CoreAttention(scale=0.3)(*tensors), attention_by_loops(*tensors, scale=0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_query_that_may_look_at_nothing_gets_zeros_and_no_nan(dtype):
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in random_tensors(2, 1, 5, 5)]

    output = CoreAttention()(*tensors, attention_mask(5, 5, padding_mask=torch.tensor(LEFT_PADDED)))

    assert output.dtype == dtype
    assert output[0, :, :2].count_nonzero() == 0
    assert all(torch.isfinite(grad).all() for grad in gradients(output, tensors))


@pytest.mark.parametrize("lengths", [[0, 2, 3, 7], [0, 7], [0, 3, 3, 5]])
def test_document_ids_number_the_documents(lengths):
    expected = [sum(start <= place for start in lengths) - 1 for place in range(7)]

    assert document_ids_from_lengths(torch.tensor(lengths), 7).tolist() == expected


def test_packed_documents_attend_as_if_each_were_alone(assert_same):
    tensors = random_tensors(4, 2, 6, 6)
    ids = document_ids_from_lengths(torch.tensor([0, 2, 6]), 6)

    output = CoreAttention()(*tensors, attention_mask(6, 6, document_ids=ids))

    alone = [CoreAttention()(*(tensor[:, :, part] for tensor in tensors)) for part in (slice(0, 2), slice(2, 6))]
    assert_same(output, torch.cat(alone, dim=2))


def test_dropout_differs_between_the_ranks_and_repeats_with_the_seed(on_tp):
    def job():
        core = CoreAttention(dropout=0.5)
        ones = torch.ones(1, 2, 6, HEAD)
        outputs = []
        for _ in range(2):
            seed_model_parallel(7)
            outputs.append(core(ones, ones, ones))
        shared = torch.rand(1).item()  # the stream that all ranks share has not moved apart
        return outputs[0].tolist(), torch.equal(*outputs), shared, torch.equal(core.eval()(ones, ones, ones), ones)

    (first, *rest), (second, *others) = on_tp(2, job)
    assert first != second
    assert rest == others
    assert rest[0] is True
    assert rest[2] is True


def test_dropout_without_mesh_draws_from_torchs_own_stream():
    core, ones = CoreAttention(dropout=0.5), torch.ones(1, 2, 6, HEAD)

    torch.manual_seed(3)
    first = core(ones, ones, ones)
    torch.manual_seed(3)

    assert torch.equal(first, core(ones, ones, ones))
    assert not torch.equal(first, core(ones, ones, ones))


def test_dropout_on_several_ranks_without_seed_says_what_to_call(on_tp):
    def job():
        set_rng_state({"default": get_rng_state()["default"]})  # forgets what an earlier job has seeded
        ones = torch.ones(1, 2, 6, HEAD)
        with pytest.raises(RuntimeError, match=r"call seed_model_parallel\(seed\) after"):
            CoreAttention(dropout=0.5)(ones, ones, ones)
        return get_group("tp").size

    assert on_tp(2, job) == [2, 2]


def test_keys_are_not_repeated_in_memory(operations):
    tensors = [tensor.detach() for tensor in random_tensors(4, 2, 5, 5)]

    names = operations(lambda: CoreAttention()(*(tensor.float() for tensor in tensors)))

    assert not {"aten::repeat_interleave", "aten::repeat", "aten::clone"} & set(names)


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_attention_equals_the_eager_one(assert_same, masked):
    tensors = random_tensors(4, 2, 3, 5)
    mask = attention_mask(3, 5, document_ids=torch.tensor(DOCUMENTS)) if masked else None
    compiled = torch.compile(CoreAttention(), fullgraph=True, backend="aot_eager")

    output = compiled(*tensors, mask)

    expected = CoreAttention()(*tensors, mask)
    assert_same(output, expected)
    for found, grad in zip(gradients(output, tensors), gradients(expected, tensors), strict=True):
        assert_same(found, grad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CoreAttention(dropout=1.0), r"dropout=1\.0 must be at least 0 and below 1"),
        (lambda: CoreAttention()(*random_tensors(3, 2, 5, 5)), "2 key and value heads do not divide the 3 query heads"),
        (
            lambda: CoreAttention()(*random_tensors(2, 2, 5, 5), torch.ones(2, 5)),
            r"mask has shape \(2, 5\); expected \[batch or 1, 1, 5, 5\], as returned by attention_mask",
        ),
        (
            lambda: CoreAttention()(*random_tensors(2, 2, 5, 5), torch.ones(1, 1, 5, 5, **FLOAT64)),
            r"the mask is torch\.float64; expected torch\.bool, True where",
        ),
        (
            lambda: CoreAttention()(*random_tensors(2, 2, 5, 5), torch.ones(1, 1, 5, 5, dtype=torch.int64)),
            r"the mask is torch\.int64; expected torch\.bool",
        ),
        (lambda: attention_mask(5, 3), "5 queries do not fit into a sequence of 3 positions"),
        (
            lambda: attention_mask(2, 3, padding_mask=torch.ones(2, 2).bool()),
            r"padding_mask has shape \(2, 2\) and dtype torch\.bool; expected \[batch, 3\] of bool",
        ),
        (lambda: attention_mask(2, 3, padding_mask=torch.ones(3).bool()), r"padding_mask has shape \(3,\)"),
        (lambda: attention_mask(2, 3, padding_mask=torch.zeros(2, 3)), r"\(2, 3\) and dtype torch\.float32; expected"),
        (
            lambda: attention_mask(2, 3, document_ids=torch.ones(2).long()),
            r"document_ids has shape \(2,\) and dtype torch\.int64; expected \[batch, 3\] or \[3\] of integers",
        ),
        (lambda: attention_mask(2, 3, document_ids=torch.ones(1, 1, 3).long()), r"document_ids has shape \(1, 1, 3\)"),
        (lambda: attention_mask(2, 3, document_ids=torch.ones(2, 3)), r"dtype torch\.float32; expected .* of integers"),
        (lambda: attention_mask(2, 3, document_ids=torch.ones(2, 3).bool()), r"dtype torch\.bool; expected"),
    ],
)
def test_wrong_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
