"""Models whose heads do not divide, padded, against the same model in one process, in float64."""

import nxd_state
import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_layers.head_padding import pad_model
from nxd_layers.padding import divide, get_number_of_extra_heads
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_state import (
    check_shard_specs,
    get_shard_spec,
    get_tensor_model_parallel_size,
    initialize_model_parallel,
    move_model_to_device,
)
from nxd_testing import assemble_logical, logical_pieces, run_on_ranks
from torch import nn
from torch.nn import functional as F

HIDDEN, BATCH, SEQUENCE = 8, 2, 3


class Attention(nn.Module):
    """Attention as the guide has it, with an output that is not zero where its heads are zero."""

    def __init__(self, num_heads, num_kv_heads, head_size, *, fused, pad, sequence_parallel=False, multiplier=1):
        super().__init__()
        tp = get_tensor_model_parallel_size() if nxd_state.model_parallel_is_initialized() else 1
        self.head_size, self.fused = head_size, fused
        self.num_heads = divide(num_heads + get_number_of_extra_heads(num_heads, tp), tp)
        self.split_size = num_heads * head_size
        arguments = {"dtype": torch.float64, "pad": pad, "sequence_parallel_enabled": sequence_parallel}
        column = {"gather_output": False, **arguments}
        if fused == "one layer":
            del column["pad"]
            sizes = [num_heads * head_size, num_kv_heads * head_size]
            self.qkv = GQAQKVColumnParallelLinear(HIDDEN, sizes, kv_size_multiplier=multiplier, **column)
        elif fused:
            self.qkv = ColumnParallelLinear(HIDDEN, 3 * num_heads * head_size, stride=3, **column)
        else:
            self.query = ColumnParallelLinear(HIDDEN, num_heads * head_size, **column)
            self.key = ColumnParallelLinear(HIDDEN, num_kv_heads * head_size, **column)
            self.value = ColumnParallelLinear(HIDDEN, num_kv_heads * head_size, bias=False, **column)
        self.output = RowParallelLinear(num_heads * head_size, HIDDEN, input_is_parallel=True, **arguments)

    def forward(self, hidden):  # [seq, batch, hidden]
        if self.fused == "one layer":
            parts = self.qkv(hidden)
        elif self.fused:
            parts = self.qkv(hidden).chunk(3, dim=-1)
        else:
            parts = self.query(hidden), self.key(hidden), self.value(hidden)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3) for part in parts)
        assert q.shape[1] == self.num_heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        mixed = torch.cos(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2))


class Block(nn.Module):
    """Attention, and layers that need no padding."""

    def __init__(self, *attention, **arguments):
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention(*attention, **arguments)
        self.up = ColumnParallelLinear(HIDDEN, 16, gather_output=False, dtype=torch.float64)
        self.down = RowParallelLinear(16, HIDDEN, input_is_parallel=True, dtype=torch.float64)

    def forward(self, hidden):
        hidden = hidden + self.attention(hidden)
        return hidden + self.down(torch.tanh(self.up(hidden)))


def train(model, steps=3):
    """Losses of some steps of AdamW with weight decay, and the gradients of the first.

    The large eps keeps Adam from turning rounding errors into steps where the gradient is zero (that of key biases).
    """
    torch.manual_seed(1)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, eps=1e-3)
    losses, grads = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(hidden).square().mean()
        loss.backward()
        if step == 0:
            grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), grads


def pieces_of(model, tensors=None):
    """What this rank holds of the model's weights, or of `tensors` by the names of its weights."""
    return logical_pieces((name, p, p if tensors is None else tensors[name]) for name, p in model.named_parameters())


def padding_of(parameter):
    """The elements of a parameter that are padding."""
    spec = get_shard_spec(parameter)
    is_padding = torch.ones_like(parameter, dtype=torch.bool)
    for piece in spec.pieces if spec else ():
        is_padding[piece.local.slices] = False
    return parameter.detach()[is_padding] if spec else parameter.new_empty(0)


# heads, key and value heads, head size; 6 heads of 2 divide row by row, the others do not even so
ATTENTIONS = [(6, 6, 2), (6, 3, 4), (5, 5, 3), (3, 3, 5), (1, 1, 4)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_padded_model_trains_as_the_unpadded_one_does(tp, fused):
    cases = [case for case in ATTENTIONS if (not fused or case[0] == case[1]) and (tp == 4 or case[1] != 3)]
    check_training(tp, [(case, {"fused": fused}) for case in cases])


def check_training(tp, cases):
    def job(padded):
        if padded:
            initialize_model_parallel(tensor_model_parallel_size=tp)
        results = []
        for case, arguments in cases:
            model = Block(*case, pad=padded, **(arguments if padded else {**arguments, "multiplier": 1}))
            if padded:
                assert pad_model(model, tp, case[0], [Attention]) is model
                is_whole_heads = model.attention.output.weight.shape[1] % case[2] == 0
                assert is_whole_heads
            before = pieces_of(model)
            losses, grads = train(model)
            assert all(torch.count_nonzero(padding_of(parameter)) == 0 for parameter in model.parameters())
            results.append((losses, before, pieces_of(model, grads), pieces_of(model)))
        return results

    expected = job(padded=False)
    by_rank = run_on_ranks(job, tp, True)
    for index, (losses, *expected_pieces) in enumerate(expected):
        for rank in range(tp):
            torch.testing.assert_close(by_rank[rank][index][0], losses, rtol=1e-12, atol=1e-12)
        for position, pieces in enumerate(expected_pieces, start=1):
            wholes = assemble_logical([by_rank[rank][index][position] for rank in range(tp)], rtol=1e-9)
            for name, whole in assemble_logical([pieces]).items():
                torch.testing.assert_close(wholes[name], whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("tp", "cases"),
    [
        (2, [((3, 3, 2), 1), ((5, 5, 4), 1)]),
        # The second has two copies of each head on a rank, the third on two ranks: 2 query heads and 1 become 4 and 2.
        (4, [((6, 6, 2), 1), ((6, 3, 4), 1), ((6, 3, 4), 2), ((2, 1, 4), 2)]),
    ],
)
def test_padded_model_with_a_qkv_linear_trains_as_the_unpadded_one_does(tp, cases):
    check_training(tp, [(case, {"fused": "one layer", "multiplier": times}) for case, times in cases])


@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_padded_qkv_linear_keeps_its_padding_zero_whatever_reads_it(on_tp, fuse, gather_output):
    def job():
        layer = GQAQKVColumnParallelLinear(
            HIDDEN, [8, 4], gather_output=gather_output, kv_size_multiplier=2, fuse_qkv=fuse
        )
        pad_model(layer, 4, 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            outputs = layer(torch.ones(3, HIDDEN))
            sum(torch.cos(output + 1).square().sum() for output in outputs).backward()
            optimizer.step()
        padding = torch.cat([padding_of(parameter) for parameter in layer.parameters()])
        assert torch.count_nonzero(padding) == 0
        return len(padding), [output.shape[-1] for output in outputs]

    # 2 query heads and 1 of keys and values, of 4 rows, became 4 and 2; the latter are on two ranks each.
    shapes = [8, 4, 4] if gather_output else [4, 4, 4]
    assert on_tp(4, job) == [(0, shapes)] * 2 + [(12 * (HIDDEN + 1), shapes)] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_padding_is_in_no_piece_and_each_logical_element_is_held_once(fused):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=4)
        model = pad_model(Block(6, 6, 2, fused=fused, pad=False), 4, 6, [Attention])
        documented = [
            (p.tensor_model_parallel, p.partition_dim, p.num_partitions, p.partition_stride)
            for p in (next(model.attention.parameters()), model.attention.output.weight)
        ]
        specs = {name: get_shard_spec(parameter) for name, parameter in model.named_parameters()}
        return documented, {name: spec for name, spec in specs.items() if spec}

    by_rank = run_on_ranks(job, 4)
    for documented, specs in by_rank:
        assert documented == [(True, 0, 4, 3 if fused else 1), (True, 1, 4, 1)]
        for name, spec in specs.items():
            check_shard_specs([other[name] for _, other in by_rank])
            assert all(max(piece.logical_shape) in (12, 36, HIDDEN, 16) for piece in spec.pieces)
    assert [spec.has_padding for spec in (specs["attention.output.weight"] for _, specs in by_rank)] == [False] * 3 + [
        True
    ]


def test_padded_model_weights_go_to_the_ranks_of_their_heads(on_tp):
    def job():
        model = Block(6, 6, 2, fused=False, pad=False)
        with torch.no_grad():
            weight = model.attention.query.weight
            weight.copy_(torch.arange(weight.shape[0]).unsqueeze(1) + 3 * nxd_state.get_tensor_model_parallel_rank())
        pad_model(model, 4, 6, [Attention])
        assert model.attention.query.weight is weight
        return weight[:, 0].tolist()

    assert on_tp(4, job) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 0, 0, 0]]


def test_padded_model_on_the_meta_device_is_filled_later_as_one_built_on_the_cpu(on_tp):
    def job():
        on_cpu = pad_model(Block(6, 3, 4, fused=False, pad=True), 4, 6, [Attention])
        with torch.device("meta"):
            model = Block(6, 3, 4, fused=False, pad=True)
        pad_model(model, 4, 6, [Attention])
        assert all(parameter.is_meta for parameter in model.parameters())
        move_model_to_device(model, "cpu")
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for parameter, expected in zip(model.parameters(), on_cpu.parameters(), strict=True):
            assert torch.equal(parameter, expected)
            assert get_shard_spec(parameter) == get_shard_spec(expected)
        losses, expected_losses = train(model)[0], train(on_cpu)[0]
        assert torch.equal(losses, expected_losses)

    on_tp(4, job)


def test_pad_model_sequence_parallel_and_compiled_equals_the_eager(on_tp, assert_same):
    def job():
        torch.manual_seed(1)
        hidden = torch.randn(SEQUENCE * 2, BATCH, HIDDEN, dtype=torch.float64)
        torch.manual_seed(0)
        attention = Attention(3, 3, 2, fused=False, pad=False, sequence_parallel=True)
        pad_model(attention, 2, 3)
        torch._dynamo.reset()
        results = []
        for run in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
            attention.zero_grad()
            output = run(hidden)
            output.square().sum().backward()
            results.append([output, *(parameter.grad for parameter in attention.parameters())])
        for eager, compiled in zip(*results, strict=True):
            assert_same(compiled, eager)

    on_tp(2, job)


@pytest.mark.parametrize("refusing", [ColumnParallelLinear, GQAQKVColumnParallelLinear])
def test_pad_model_that_a_later_layer_refuses_changes_nothing(on_tp, refusing):
    def job():
        layers = [
            ColumnParallelLinear(HIDDEN, 6),
            GQAQKVColumnParallelLinear(HIDDEN, [6, 6]),
            RowParallelLinear(6, HIDDEN),
            refusing(HIDDEN, 4),
        ]
        model = nn.Sequential(*layers)
        before = {name: (parameter.clone(), get_shard_spec(parameter)) for name, parameter in model.named_parameters()}
        with pytest.raises(ValueError, match="length 4 cannot be padded as 3 heads are to 4"):
            pad_model(model, 2, 3)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name][0])
            assert get_shard_spec(parameter) == before[name][1]
        assert [layers[0].padded_output_size, layers[1].padded_q_size, layers[2].padded_input_size] == [6, 6, 6]

    on_tp(2, job)


def test_pad_model_calls_the_hook_with_each_wrapped_module_and_the_ratio(on_tp):
    def job():
        seen = []

        def hook(module, ratio):
            seen.append((type(module).__name__, ratio))
            module.split_size = int(module.split_size * ratio)

        model = pad_model(Block(6, 6, 2, fused=False, pad=False), 4, 6, (Attention,), hook)
        everything = []
        pad_model(nn.Sequential(nn.Tanh()), 4, 6, pad_hook_fn=lambda module, ratio: everything.append(ratio))
        return seen, model.attention.split_size, everything

    assert on_tp(4, job) == [([("Attention", 8 / 6)], 16, [8 / 6] * 2)] * 4


def test_pad_model_with_heads_that_divide_changes_nothing_but_calls_the_hook(on_tp):
    def job():
        seen = []
        model = Block(4, 4, 2, fused=False, pad=False)
        before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
        pad_model(model, 2, 4, [Attention], lambda module, ratio: seen.append(ratio))
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert torch.equal(parameter, before[name][1])
        return seen

    assert on_tp(2, job) == [[1.0]] * 2


def test_pad_model_called_again_changes_nothing(on_tp):
    def job():
        model = pad_model(Block(6, 6, 2, fused=True, pad=False), 4, 6, [Attention])
        before = [parameter.clone() for parameter in model.parameters()]
        pad_model(model, 4, 6, [Attention])
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

    on_tp(4, job)


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = ParallelEmbedding(12, HIDDEN)
        self.head = ColumnParallelLinear(HIDDEN, 12, bias=False)
        self.head.weight = self.embedding.weight


def split_without_padding():
    module = nn.Module()
    module.weight = ColumnParallelLinear(4, 4).weight
    return nn.Sequential(module)


def with_gradient():
    model = Block(6, 6, 2, fused=False, pad=False)
    model.attention.query.weight.grad = torch.zeros_like(model.attention.query.weight)
    return model


@pytest.mark.parametrize(
    ("make_model", "arguments", "error", "message"),
    [
        (nn.Tanh, {"tp_degree": 2}, ValueError, "tp_degree=2 is not the current tensor_model_parallel_size=4"),
        (nn.Tanh, {"n_heads": 0}, ValueError, "n_heads=0, tp_degree=4: both must be positive"),
        (
            nn.Tanh,
            {"wrapped_classes": [Attention]},
            ValueError,
            r"no module of Tanh is of a wrapped class \(Attention\)",
        ),
        (
            lambda: Block(6, 2, 2, fused=False, pad=True),
            {},
            ValueError,
            r"length 4 cannot be padded as 6 heads are to 8: 4 \* 8 / 6 must be a multiple of 4",
        ),
        (TiedModel, {}, ValueError, "embedding.weight is tied to head.weight, .* pass wrapped_classes"),
        (split_without_padding, {}, ValueError, "0 is a Module, which is split .* from wrapped_classes"),
        (
            lambda: Block(6, 2, 4, fused="one layer", pad=True, multiplier=2),
            {"wrapped_classes": [Attention]},
            ValueError,
            r"6 query heads cannot be padded to 8 with 2 key/value heads: .* have to be 2\.66667, .* divides 6",
        ),
        (
            lambda: GQAQKVColumnParallelLinear(HIDDEN, [8, 4]),
            {"n_heads": 2},
            ValueError,
            "1 key/value heads, padded to 2 as 2 query heads are to 4, .* build the layer with kv_size_multiplier=2",
        ),
        (
            lambda: GQAQKVColumnParallelLinear(HIDDEN, [20, 20]),
            {"n_heads": 6, "tp_degree": 4},
            ValueError,
            "length 20 cannot be padded as 6 heads are to 8",
        ),
        (with_gradient, {"wrapped_classes": [Attention]}, RuntimeError, "query.weight has a gradient already"),
    ],
)
def test_pad_model_of_what_cannot_be_padded_raises(on_tp, make_model, arguments, error, message):
    def job():
        with pytest.raises(error, match=message):
            pad_model(make_model(), **{"tp_degree": 4, "n_heads": 6} | arguments)

    on_tp(4, job)


@pytest.mark.parametrize(("n_heads", "tp", "extra"), [(6, 4, 2), (8, 4, 0), (1, 32, 31), (25, 8, 7), (3, 1, 0)])
def test_extra_heads_make_the_degree_divide(n_heads, tp, extra):
    assert get_number_of_extra_heads(n_heads, tp) == extra
    assert divide(n_heads + extra, tp) * tp == n_heads + extra


@pytest.mark.parametrize(("numerator", "denominator"), [(7, 2), (1, 4), (4, 0), (4, -2)])
def test_divide_with_a_remainder_raises(numerator, denominator):
    with pytest.raises(ValueError, match=f"{numerator} cannot be divided by {denominator}"):
        divide(numerator, denominator)
