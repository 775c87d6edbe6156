"""Quantized weights: numbers, layers against their float ones, and two tensor-parallel ranks against one process."""

import copy

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
    column_parallel_linears,
    linear_cross_entropy,
)
from nxd_layers.quantization import (
    QuantizationType,
    QuantizedDtype,
    QuantizedLinear,
    blockwise_dequantize,
    broadcastable_block_shapes,
    convert,
    convert_qint8_to_int8_state_dict,
    default_config,
    dequantize,
    extract_q_scale,
    quantize,
    quantize_fp8_blocks,
    quantize_linears,
    quantize_to_qint8,
    quantize_weight,
    use_quantized_weight,
)
from nxd_state import get_group, get_shard_spec, initialize_model_parallel
from torch import nn

PER_TENSOR, PER_CHANNEL = QuantizationType.PER_TENSOR_SYMMETRIC, QuantizationType.PER_CHANNEL_SYMMETRIC
DTYPES = [QuantizedDtype.INT8, QuantizedDtype.F8E4M3, QuantizedDtype.F8E5M2]
STEPS = {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 16, torch.float8_e5m2: 1 / 8}  # largest relative errors


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(6, 8, gather_output=False)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True)
        self.head = ColumnParallelLinear(6, 10)

    def forward(self, hidden):
        return self.head(self.down(self.up(hidden).relu()))


def config(way, dtype):
    return {**default_config(way), "quantized_dtype": dtype}


@pytest.mark.parametrize("channel_axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", STEPS)
def test_values_times_their_scale_are_near_the_tensor(dtype, channel_axis):
    tensor = torch.randn(6, 8) * torch.logspace(-2, 2, 6)[:, None]

    values, scale = quantize(tensor, dtype, channel_axis=channel_axis)

    reached = tensor.abs().amax() if channel_axis is None else tensor.abs().amax(1 - channel_axis, keepdim=True)
    assert values.dtype == dtype
    assert scale.numel() == (1 if channel_axis is None else tensor.shape[channel_axis])
    assert ((dequantize(values, scale, torch.float32) - tensor).abs() <= reached * STEPS[dtype]).all()


def test_zeros_stay_zero_and_a_bound_clamps_larger_values():
    values, scale = quantize(torch.zeros(2, 3), torch.float8_e4m3fn, channel_axis=0)
    assert dequantize(values, scale, torch.float32).count_nonzero() == 0

    values, scale = quantize(torch.tensor([1.0, 100.0]), torch.float8_e4m3fn, clamp_bound=2.0)
    torch.testing.assert_close(dequantize(values, scale, torch.float32), torch.tensor([1.0, 2.0]))


def test_nothing_is_quantized_to_another_dtype():
    with pytest.raises(ValueError, match=r"Unsupported dtype: torch.int32; use one of"):
        quantize(torch.ones(2), torch.int32)


def test_scales_of_blocks_are_applied_to_their_blocks():
    values, scale = torch.ones(4, 6, dtype=torch.int8), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

    found = blockwise_dequantize(values, scale, torch.float32)

    assert torch.equal(found, scale.repeat_interleave(2, 0).repeat_interleave(2, 1))
    assert broadcastable_block_shapes((4, 6), (2,)) == ((2, 2, 6), (2, 1, 1))
    with pytest.raises(ValueError, match=r"\[3\] do not lie on blocks of \[4, 6\]"):
        broadcastable_block_shapes((4, 6), (3,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 128), (300, 130), (5, 7)])
def test_fp8_blocks_are_each_as_precise_as_fp8_is(shape, dtype):
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(dtype)
    weight[:128, :128] = 0.0
    before = weight.clone()

    values, scales = quantize_fp8_blocks(weight)

    rows, columns = shape
    blocks = [weight[128 * i :, 128 * j :][:128, :128] for i in range(scales.shape[0]) for j in range(scales.shape[1])]
    of_blocks = torch.stack([block.abs().max().float() / 448 for block in blocks]).view(scales.shape)
    assert torch.equal(weight, before)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    assert torch.equal(scales, of_blocks.masked_fill(of_blocks == 0, 1.0))
    scale = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    wide, found = weight.double(), values.double() * scale.double()
    step = torch.maximum(wide.abs() * 2**-4, scale.double() * 2**-10)  # of 3 bits, or of the smallest numbers
    assert ((found - wide).abs() <= step * (1 + 1e-6)).all()


@pytest.mark.parametrize("way", [PER_TENSOR, PER_CHANNEL])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_converted_model_computes_what_its_scaled_weights_say(way, dtype):
    model, hidden = Block(), torch.randn(2, 3, 6)

    quantized = convert(model, config(way, dtype))

    reference = copy.deepcopy(model)
    for name in ("up", "down", "head"):
        layer = quantized.get_submodule(name)
        reference.get_submodule(name).weight.data = dequantize(layer.weight, layer.scale, torch.float32)
    assert (quantized.up.weight.dtype, quantized.up.scale.dtype) == (dtype.value, torch.float32)
    torch.testing.assert_close(quantized(hidden), reference(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [PER_TENSOR, PER_CHANNEL])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_compute_what_one_process_computes(on_tp, way, dtype):
    hidden = torch.randn(2, 3, 6, requires_grad=True)

    def run():
        torch.manual_seed(0)
        model = convert(Block(), config(way, dtype))
        own = hidden.detach().requires_grad_()
        output = model(own)
        output.square().sum().backward()
        return output.detach(), own.grad, model.up.scale.detach(), get_shard_spec(model.up.weight)

    (alone,) = on_tp(1, run)
    ranks = on_tp(2, run)

    for rank, (output, gradient, scale, spec) in enumerate(ranks):
        torch.testing.assert_close(output, alone[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, alone[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scale, alone[2] if way is PER_TENSOR else alone[2].chunk(2)[rank])
        assert spec.pieces[0].logical_shape == (8, 6)


def test_sequence_parallel_layers_keep_their_parts(on_tp):
    hidden = torch.randn(4, 2, 6)

    def run():
        torch.manual_seed(0)
        up = ColumnParallelLinear(6, 8, gather_output=False, sequence_parallel_enabled=True)
        down = RowParallelLinear(8, 6, input_is_parallel=True, sequence_parallel_enabled=True)
        own = hidden.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
        return convert(down)(convert(up)(own)).detach()

    (alone,) = on_tp(1, run)

    torch.testing.assert_close(torch.cat(on_tp(2, run)), alone, rtol=1e-5, atol=1e-6)


def test_a_model_on_meta_is_filled_by_the_state_of_a_quantized_plain_one():
    plain = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})
    hidden = torch.randn(2, 6)
    quantized = quantize_linears(plain, modules_to_not_convert=["head"])
    with torch.device("meta"):
        model = nn.ModuleDict({"up": ColumnParallelLinear(6, 8), "down": RowParallelLinear(8, 6)})

    converted = convert(model, default_config(PER_CHANNEL))
    converted.load_state_dict(quantized.state_dict(), assign=True)

    assert isinstance(quantized["up"], QuantizedLinear)
    assert type(plain["up"]) is nn.Linear
    torch.testing.assert_close(converted["up"](hidden), quantized["up"](hidden))
    torch.testing.assert_close(quantized["up"](hidden), plain["up"](hidden), rtol=0.05, atol=0.05)


def test_a_converted_copy_keeps_the_process_group_and_the_metadata_of_what_is_not_quantized(on_tp):
    def job():
        model = nn.Sequential(ColumnParallelLinear(4, 8), ParallelEmbedding(8, 4))
        model.group = get_group("tp").process_group
        converted = convert(model)
        scales = converted[0].scale.numel(), model[0].scale
        return *scales, converted.group is model.group, get_shard_spec(converted[1].weight).pieces[0].logical_shape

    assert on_tp(2, job) == [(1, None, True, (8, 4))] * 2


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_quantized_weight_is_the_part_of_the_logical_one_that_the_float_weight_is(on_tp, layer):
    def job():
        plain = layer(4, 8)
        return get_shard_spec(plain.weight).pieces, get_shard_spec(convert(plain).weight).pieces

    for plain, quantized in on_tp(2, job):
        assert quantized == plain


def test_layers_are_chosen_by_pattern_or_left_out_by_name():
    model = nn.ModuleDict({"first": Block(), "second": Block()})

    chosen = convert(model, include=["first", "*.head"])
    rest = convert(model, modules_to_not_convert=["head"], inplace=True)

    def quantized_in(found):
        return [name for name, layer in found.named_modules() if getattr(layer, "scale", None) is not None]

    assert quantized_in(chosen) == ["first.up", "first.down", "first.head", "second.head"]
    assert quantized_in(rest) == ["first.up", "first.down", "second.up", "second.down"]
    assert rest is model
    with pytest.raises(ValueError, match="exclude each other"):
        convert(model, include=["*"], modules_to_not_convert=["head"])


def test_ways_that_are_not_supported_are_refused_when_a_layer_is_made():
    with pytest.raises(ValueError, match="blockwise_symmetric, F8E4M3: not supported"):
        convert(Block(), default_config(QuantizationType.BLOCKWISE_SYMMETRIC))
    with pytest.raises(ValueError, match="activation_quantization_type=dynamic: not supported"):
        convert(Block(), {"activation_quantization_type": "dynamic"})


def test_a_state_that_torch_packed_is_unpacked():
    weight, bias = quantize_to_qint8(torch.randn(4, 3), channel_axis=0), torch.ones(4)
    state = {"up._packed_params._packed_params": (weight, bias), "up._packed_params.dtype": torch.qint8}
    state |= {"up.scale": torch.tensor(1.0), "up.zero_point": torch.tensor(0)}

    convert_qint8_to_int8_state_dict(state)

    assert state.keys() == {"up.weight", "up.scale", "up.bias"}
    assert torch.equal(dequantize(state["up.weight"], state["up.scale"], torch.float32), weight.dequantize())
    assert extract_q_scale(quantize_to_qint8(torch.ones(2, 2))).shape == (1,)


def given_ranks():
    return {"tensor_model_parallel_group": get_group("dp")}


@pytest.mark.parametrize("way", [PER_TENSOR, PER_CHANNEL])
@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (lambda: ColumnParallelLinear(8, 12, stride=2), (3, 8)),
        (lambda: ColumnParallelLinear(8, 12, gather_output=False, stride=2), (3, 8)),
        (lambda: ColumnParallelLinear(8, 12, rank_ordering=[1, 0]), (3, 8)),
        (lambda: ColumnParallelLinear(8, 11, pad=True), (3, 8)),
        (lambda: ColumnParallelLinear(8, 11, pad=True, keep_padded_output=True), (3, 8)),
        (lambda: ColumnParallelLinear(8, 12, skip_bias_add=True), (3, 8)),
        (lambda: ColumnParallelLinear(8, 12, **given_ranks()), (3, 8)),
        (lambda: ColumnParallelLinear(8, 12, reduce_dtype=torch.float64), (3, 8)),
        (lambda: RowParallelLinear(8, 12, stride=2), (3, 8)),
        (lambda: RowParallelLinear(8, 12, rank_ordering=[1, 0]), (3, 8)),
        (lambda: RowParallelLinear(7, 12, pad=True), (3, 7)),
        (lambda: RowParallelLinear(8, 12, skip_bias_add=True), (3, 8)),
        (lambda: RowParallelLinear(8, 12, reduce_output=False), (3, 8)),
        (lambda: RowParallelLinear(8, 12, **given_ranks()), (3, 8)),
        (lambda: RowParallelLinear(8, 12, reduce_dtype=torch.float64), (3, 8)),
    ],
)
def test_a_quantized_layer_keeps_every_option_of_the_float_one(run_ranks, way, layer, given):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        torch.manual_seed(0)
        plain, hidden = layer(), torch.randn(given, requires_grad=True)
        quantized = convert(plain, default_config(way))
        plain.weight.data = dequantize(quantized.weight, quantized.scale, torch.float32)
        outputs, expected = quantized(hidden), plain(hidden)
        assert quantized.features() == {**plain.features(), "quantized": "a quantized weight"}
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        sums = [out[0].sum() if isinstance(out, tuple) else out.square().sum() for out in (outputs, expected)]
        gradients = [torch.autograd.grad(it, hidden)[0] for it in sums]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)

    run_ranks(job, 4)


def test_layers_that_share_an_input_may_be_quantized(on_tp):
    def job():
        torch.manual_seed(0)
        gate, up = ColumnParallelLinear(6, 8, gather_output=False), ColumnParallelLinear(6, 8, gather_output=False)
        quantized, hidden = convert(gate), torch.randn(3, 6)
        found = column_parallel_linears(hidden, [quantized, up])
        torch.testing.assert_close(found[0], quantized(hidden))
        torch.testing.assert_close(found[1], up(hidden))

    on_tp(2, job)


class Doubled(ColumnParallelLinear):
    def forward(self, input_):
        return 2 * super().forward(input_)


def test_a_layer_with_a_forward_of_its_own_is_not_quantized():
    with pytest.raises(ValueError, match="has a forward of its own, which quantization does not support"):
        convert(Doubled(4, 4))


def test_a_quantized_layer_is_not_padded():
    model = nn.ModuleDict({"up": ColumnParallelLinear(8, 4, gather_output=False)})
    quantized = convert(model, default_config(PER_CHANNEL))

    with pytest.raises(ValueError, match="has a quantized weight, which cannot be padded; call pad_model before"):
        quantized["up"].check_pad_heads(4, 6)


@pytest.mark.parametrize(
    "layer", [lambda: ParallelEmbedding(8, 4), lambda: OutputChannelParallelConv2d(2, 2, 1), lambda: nn.Linear(2, 2)]
)
def test_other_layers_are_refused_before_anything_changes(layer):
    layer = layer()
    before = layer.weight

    for quantize_it in (quantize_weight, lambda it, config: use_quantized_weight(it, config, "cpu")):
        with pytest.raises(ValueError, match="does not support a quantized weight"):
            quantize_it(layer, default_config())
    assert layer.weight is before


def test_a_layer_of_two_names_stays_one_layer():
    layer = ColumnParallelLinear(4, 8)

    quantized = convert(nn.ModuleDict({"a": layer, "b": layer}), mapping={ColumnParallelLinear: exchanged})

    assert quantized["a"] is quantized["b"]
    assert quantized["a"].scale is not None


def exchanged(layer, config):
    made = copy.deepcopy(layer)
    quantize_weight(made, config)
    return made


def test_a_quantized_head_is_refused_by_the_chunked_loss():
    head = convert(ColumnParallelLinear(4, 6, gather_output=False))

    with pytest.raises(ValueError, match="has a quantized weight, which linear_cross_entropy does not support"):
        linear_cross_entropy(torch.randn(3, 4), head, torch.tensor([0, 1, 2]))


def test_unsummed_outputs_of_a_quantized_layer_are_those_of_the_float_one(on_tp):
    def job():
        layer = RowParallelLinear(8, 4, reduce_output=False)
        torch.nn.init.constant_(layer.bias, 7.0)
        hidden = torch.randn(3, 8)
        torch.testing.assert_close(convert(layer)(hidden), layer(hidden), rtol=0.05, atol=0.1)

    on_tp(2, job)
