"""Layers with adapters against plain layers and the formula in one process: output and every gradient, in float64."""

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_lora import LoraConfig, LoraModel
from torch import nn
from torch.nn import functional as F

INPUT, OUTPUT, VOCABULARY, RANK = 8, 24, 12, 3


def wrapped(layer, **settings):
    settings = {"lora_rank": RANK, "target_modules": ["0"], "bias": "lora_only", **settings}
    return LoraModel(nn.Sequential(layer), LoraConfig(**settings))


def own_part(whole, layer, *, sequence_dim, split):
    """This rank's part of a tensor that is split along the sequence, along its last dim, or not."""
    if sequence_dim is not None:
        return scatter_to_sequence_parallel_region(whole, sequence_dim)
    return scatter_to_tensor_model_parallel_region(whole) if split else whole


@pytest.fixture
def check_linear(fill_adapter, complete_grad, logical, assert_same):
    """Compares a layer with an adapter with `F.linear` and the product of the factors, on logical tensors."""

    def check(layer, *, input_sequence=None, input_split=False, output_sequence=None, output_split=False, **settings):
        model = wrapped(layer, **settings)
        whole = fill_adapter(model)
        a, b = (whole[f"0.lora_{name}"].requires_grad_() for name in "AB")
        weight = logical(layer.weight)
        bias = None if layer.bias is None else logical(layer.bias).requires_grad_()
        torch.manual_seed(1)
        whole_input = torch.randn(8, 4, INPUT, dtype=torch.float64, requires_grad=True)
        whole_grad = torch.randn(8, 4, len(weight), dtype=torch.float64)
        scale = model.lora_config.scale
        expected = F.linear(whole_input, weight, bias) + scale * F.linear(F.linear(whole_input, a), b)
        expected.backward(whole_grad)

        def part_of_input(tensor):
            return own_part(tensor.detach(), layer, sequence_dim=input_sequence, split=input_split)

        def part_of_output(tensor):
            return own_part(tensor.detach(), layer, sequence_dim=output_sequence, split=output_split)

        own_input = part_of_input(whole_input).clone().requires_grad_()
        output = model(own_input)
        output.backward(part_of_output(whole_grad))

        assert_same(output, part_of_output(expected))
        assert_same(own_input.grad, part_of_input(whole_input.grad))
        assert_same(logical(layer.lora_A, complete_grad(layer.lora_A)), a.grad)
        assert_same(logical(layer.lora_B, complete_grad(layer.lora_B)), b.grad)
        assert layer.weight.grad is None
        if bias is not None:
            assert_same(logical(layer.bias, complete_grad(layer.bias)), bias.grad)

    return check


SCALES = [{}, {"use_rslora": True, "lora_alpha": 3.5}, {"init_lora_weights": "gaussian"}]


@pytest.mark.parametrize("settings", SCALES)
@pytest.mark.parametrize("tp", [1, 2])
def test_plain_linear_with_adapter_equals_the_formula(on_tp, check_linear, tp, settings):
    def job():
        check_linear(nn.Linear(INPUT, OUTPUT, dtype=torch.float64), **settings)

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("sequence_dim", [None, 0, 1, -2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_column_linear_with_adapter_equals_the_formula(on_tp, check_linear, tp, sequence_dim, gather_output, bias):
    def job():
        for settings in SCALES:
            layer = ColumnParallelLinear(
                INPUT,
                OUTPUT,
                bias,
                gather_output,
                sequence_dim is not None,
                torch.float64,
                sequence_dimension=sequence_dim or 0,
            )
            check_linear(layer, input_sequence=sequence_dim, output_split=not gather_output, **settings)

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_column_linear_of_fused_matrices_with_adapter_equals_the_formula(on_tp, check_linear, tp, stride, sequence_dim):
    def job():
        layer = ColumnParallelLinear(
            INPUT, OUTPUT, sequence_parallel_enabled=sequence_dim is not None, dtype=torch.float64, stride=stride
        )
        check_linear(layer, input_sequence=sequence_dim)

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence_dim", [None, 0, 1, -2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_linear_with_adapter_equals_the_formula(on_tp, check_linear, tp, sequence_dim, bias):
    def job():
        for settings in SCALES:
            layer = RowParallelLinear(
                INPUT,
                OUTPUT,
                bias,
                True,
                sequence_dim is not None,
                torch.float64,
                sequence_dimension=sequence_dim or 0,
            )
            check_linear(layer, input_split=True, output_sequence=sequence_dim, **settings)

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_linear_of_a_whole_input_with_adapter_equals_the_formula(on_tp, check_linear, tp):
    def job():
        check_linear(RowParallelLinear(INPUT, OUTPUT, dtype=torch.float64))

    on_tp(tp, job)


@pytest.fixture
def check_embedding(fill_adapter, complete_grad, logical, assert_same):
    """Compares an embedding with an adapter with two lookups in whole tables."""

    def check(layer, *, sequence_dim=None):
        model = wrapped(layer, bias="none")
        whole = fill_adapter(model)
        a, b = (whole[f"0.lora_embedding_{name}"].requires_grad_() for name in "AB")
        torch.manual_seed(1)
        ids = torch.randint(VOCABULARY, (8, 4))
        ids[0, 0] = 2  # the padding token, where there is one
        whole_grad = torch.randn(8, 4, OUTPUT, dtype=torch.float64)
        short = F.embedding(ids, a.t(), layer.padding_idx)
        expected = F.embedding(ids, logical(layer.weight)) + model.lora_config.scale * F.linear(short, b)
        expected.backward(whole_grad)

        output = model(ids)
        output.backward(own_part(whole_grad, layer, sequence_dim=sequence_dim, split=False))

        assert_same(output, own_part(expected.detach(), layer, sequence_dim=sequence_dim, split=False))
        for parameter, reference in [(layer.lora_embedding_A, a), (layer.lora_embedding_B, b)]:
            assert_same(logical(parameter, complete_grad(parameter)), reference.grad)

    return check


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_plain_embedding_with_adapter_equals_two_lookups(on_tp, check_embedding, tp, padding_idx):
    def job():
        check_embedding(nn.Embedding(VOCABULARY, OUTPUT, padding_idx, dtype=torch.float64))

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("sequence_dim", [None, 0, 1, -1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parallel_embedding_with_adapter_equals_two_lookups(
    on_tp, check_embedding, tp, sequence_dim, across, padding_idx
):
    def job():
        layer = ParallelEmbedding(
            VOCABULARY,
            OUTPUT,
            dtype=torch.float64,
            padding_idx=padding_idx,
            shard_across_embedding=across,
            sequence_parallel_enabled=sequence_dim is not None,
            sequence_dimension=sequence_dim or 0,
        )
        vectors_dim = -2 if sequence_dim == -1 else sequence_dim
        check_embedding(layer, sequence_dim=vectors_dim)

    on_tp(tp, job)


def test_parallel_embedding_of_a_padded_vocabulary_with_adapter_equals_two_lookups(on_tp, check_embedding):
    def job():
        check_embedding(ParallelEmbedding(VOCABULARY + 1, OUTPUT, dtype=torch.float64, pad=True))

    on_tp(4, job)


def test_padded_column_and_row_with_adapters_equal_the_formula(on_tp, check_linear):
    def job():
        check_linear(ColumnParallelLinear(INPUT, OUTPUT + 1, dtype=torch.float64, pad=True))
        check_linear(RowParallelLinear(INPUT, OUTPUT, dtype=torch.float64, pad=True))

    on_tp(3, job)


def test_factors_are_split_as_the_weight_is_or_whole(on_tp):
    def job():
        layers = [
            ColumnParallelLinear(INPUT, OUTPUT),
            RowParallelLinear(INPUT, OUTPUT),
            ParallelEmbedding(VOCABULARY, OUTPUT),
            ParallelEmbedding(VOCABULARY, OUTPUT, shard_across_embedding=True),
        ]
        for layer in layers:
            wrapped(layer)
        return [tuple(tuple(p.shape) for name, p in layer.named_parameters() if "lora" in name) for layer in layers]

    column, row, embedding, across = on_tp(2, job)[0]
    assert column == ((RANK, INPUT), (OUTPUT // 2, RANK))
    assert row == ((RANK, INPUT // 2), (OUTPUT, RANK))
    assert embedding == ((RANK, VOCABULARY // 2), (OUTPUT, RANK))
    assert across == ((RANK, VOCABULARY), (OUTPUT // 2, RANK))


@pytest.mark.parametrize("initialization", ["default", "gaussian"])
def test_factors_start_the_same_at_every_degree(on_tp, logical, initialization):
    def job():
        torch.manual_seed(0)
        layers = [
            ColumnParallelLinear(INPUT, OUTPUT),
            RowParallelLinear(INPUT, OUTPUT),
            ParallelEmbedding(VOCABULARY, OUTPUT),
        ]
        config = LoraConfig(target_modules=["0", "1", "2"], init_lora_weights=initialization)
        model = LoraModel(nn.Sequential(*layers), config)
        return {name: logical(parameter) for name, parameter in model.adapter_parameters().items()}

    alone = on_tp(1, job)[0]
    for whole in on_tp(4, job):
        assert whole.keys() == alone.keys()
        assert all(torch.equal(whole[name], alone[name]) for name in whole)
    assert not alone["0.lora_B"].any()
    assert not alone["2.lora_embedding_A"].any()


def test_default_factor_is_drawn_as_a_linear_weight_and_gaussian_with_deviation_one_over_rank():
    torch.manual_seed(0)
    default = LoraModel(nn.Sequential(nn.Linear(400, 4)), LoraConfig(target_modules=["0"]))
    gaussian = LoraModel(
        nn.Sequential(nn.Linear(400, 4)), LoraConfig(target_modules=["0"], init_lora_weights="gaussian")
    )

    drawn = default.module[0].lora_A
    assert drawn.abs().max() <= 1 / 20
    assert drawn.std().item() == pytest.approx(1 / 20 / 3**0.5, rel=0.05)
    assert gaussian.module[0].lora_A.std().item() == pytest.approx(1 / 16, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_adapters_keep_the_dtype_of_their_weight(on_tp, dtype):
    def job():
        column, row = ColumnParallelLinear(INPUT, OUTPUT, dtype=dtype), RowParallelLinear(OUTPUT, INPUT, dtype=dtype)
        model = LoraModel(nn.Sequential(column, row), LoraConfig(target_modules=["0", "1"]))
        output = model(torch.ones(3, INPUT, dtype=dtype))
        output.sum().backward()
        assert output.dtype == dtype
        assert {p.grad.dtype for p in model.adapter_parameters().values()} == {dtype}

    on_tp(2, job)


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward"),
    [
        # The layers' own: the row's sum forward, the column's backward. The branches': the same, of rank-sized tensors.
        (False, {"c10d::allreduce_": 2}, {"c10d::allreduce_": 2}),
        (
            True,
            {"c10d::_allgather_base_": 2, "c10d::alltoall_base_": 2},
            {"c10d::_allgather_base_": 2, "c10d::alltoall_base_": 2},
        ),
    ],
)
def test_branches_add_one_small_collective_per_layer(on_tp, collectives, sequence_parallel, forward, backward):
    def job():
        column = ColumnParallelLinear(INPUT, OUTPUT, gather_output=False, sequence_parallel_enabled=sequence_parallel)
        row = RowParallelLinear(OUTPUT, INPUT, input_is_parallel=True, sequence_parallel_enabled=sequence_parallel)
        model = LoraModel(nn.Sequential(column, row), LoraConfig(target_modules=["0", "1"]))
        input_ = torch.ones(4, 2, INPUT, requires_grad=True)
        outputs = []
        in_forward = collectives(lambda: outputs.append(model(input_)))
        in_backward = collectives(lambda: outputs[0].sum().backward())
        return [{name: names.count(name) for name in names} for names in (in_forward, in_backward)]

    assert on_tp(2, job) == [[forward, backward]] * 2


def test_conv1d_of_transformers_with_adapter_equals_the_formula(fill_adapter, assert_same):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = conv1d(OUTPUT, INPUT).double()
    model = wrapped(layer)
    whole = fill_adapter(model)
    input_ = torch.randn(5, INPUT, dtype=torch.float64)

    product = whole["0.lora_B"] @ whole["0.lora_A"]
    expected = input_ @ (layer.weight + model.lora_config.scale * product.t()) + layer.bias

    assert_same(model(input_), expected)
    model.merge()
    assert_same(model(input_), expected)
