"""Inference as scripts for NeuronX Distributed write it: builders, models, shards, sampling, recorded tensors."""

from collections import OrderedDict
from types import SimpleNamespace

import neuronx_distributed as nxd
import nxd_trace
import pytest
import torch
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.quantization import dequantize, quantization_config
from neuronx_distributed.quantization.microscaling import transform_weights as microscaling
from neuronx_distributed.trace import BucketModelConfig
from neuronx_distributed.trace.mock_torchdist import mock_distributed
from neuronx_distributed.trace.model_builder import BaseModelInstance
from neuronx_distributed.trace.model_builder import ModelBuilder as ModelBuilderV1
from neuronx_distributed.utils import medusa_utils
from neuronx_distributed.utils.sampling import Sampler
from neuronx_distributed.utils.tensor_capture import (
    disable_tensor_capture,
    enable_tensor_capture,
    get_captured_tensors_dict,
    register_tensor,
)
from neuronx_distributed.utils.tensor_capture.model_modification import find_available_modules, restore_model
from neuronx_distributed.utils.tensor_replacement import modify_model_for_tensor_replacement
from neuronx_distributed.utils.tensor_replacement.registry import RuntimeRegister
from nxd_neuronx.traced_model import arguments_of_compiler
from nxd_state import get_tensor_model_parallel_size, initialize_model_parallel
from torch import nn


@pytest.fixture(autouse=True)
def _quick_compiler_and_own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")  # without a C++ compiler programs are exported only
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def feed_forward():
    return nn.Sequential(
        ColumnParallelLinear(4, 8, gather_output=False), nn.ReLU(), RowParallelLinear(8, 4, input_is_parallel=True)
    )


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_built_model_is_saved_loaded_and_given_its_shards(tmp_path, tp):
    reference, prompt, token = plain(), torch.randn(2, 3, 4), torch.randn(2, 1, 4)
    with nxd.NxDParallelState(world_size=tp, tensor_model_parallel_size=tp):
        builder = nxd.ModelBuilder(feed_forward()).trace(args=prompt, tag="prefill")
        built = builder.trace(kwargs={"input": token}, tag="decode").compile()
        built.save(tmp_path / "nxd_model.pt")
        built.close()
        shards = nxd.shard_checkpoint(reference.state_dict(), feed_forward(), serialize_path=tmp_path / "weights")

    model = nxd.NxDModel.load(tmp_path / "nxd_model.pt")
    model.set_weights(shards)
    model.to_neuron()

    assert model.get_available_keys() == {"prefill", "decode"}
    torch.testing.assert_close(model(prompt), reference(prompt))
    torch.testing.assert_close(model(input=token), reference(token))
    torch.testing.assert_close(model(token), reference(token))
    torch.testing.assert_close(model(input=prompt), reference(prompt))
    torch.testing.assert_close(model(prompt, model_name="prefill"), reference(prompt))
    assert len(list((tmp_path / "weights").glob("tp*_sharded_checkpoint.safetensors"))) == tp
    model.close()


@pytest.mark.slow
def test_inputs_are_traced_by_position_and_by_name_of_a_class_defined_anywhere():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x, scale=None, bias=None):
            self.calls += 1
            scaled = self.layer(x) if scale is None else scale * self.layer(x)
            return (scaled if bias is None else scaled + bias) + self.calls

    reference, x = Counting(), torch.randn(2, 4)
    layer, more = reference.layer, {"scale": torch.randn(2, 4), "bias": torch.randn(2, 4)}
    builder = nxd.ModelBuilder(reference).trace(args=x, kwargs=more, tag="all").trace(args=x, tag="one")

    model = builder.compile()

    torch.testing.assert_close(model(x, **more), more["scale"] * layer(x) + more["bias"] + 1)
    torch.testing.assert_close(model(x), layer(x) + 2)
    model.write_to_neuron_buffer(torch.tensor([6.0]), "calls", 0)
    torch.testing.assert_close(model(x), layer(x) + 7)
    assert model.read_from_neuron_buffer("calls", 0) == 7
    torch.testing.assert_close(model.weights, [{"layer.weight": layer.weight.data, "layer.bias": layer.bias.data}])
    torch.testing.assert_close(model.read_from_neuron_buffer("layer.bias", 0), layer.bias.data)
    model.close()


@pytest.mark.slow
def test_the_first_builder_takes_instances_and_a_loader_of_weights():
    reference, inputs = plain(), torch.randn(2, 4)
    builder = ModelBuilderV1(router=None, tp_degree=2, checkpoint_loader=reference.state_dict)

    builder.add("model", BaseModelInstance(feed_forward, {}), [(inputs,), (inputs[:1],)])
    model = builder.trace(initialize_model_weights=False)

    torch.testing.assert_close(model(inputs), reference(inputs))
    torch.testing.assert_close(model(inputs[:1]), reference(inputs[:1]))
    assert [shard["0.weight"].shape for shard in builder.shard_checkpoint()] == [(4, 4), (4, 4)]
    model.nxd_model.close()


@pytest.mark.slow
@pytest.mark.parametrize("loader", [dict, None])
def test_the_first_builder_gets_its_weights_later(loader):
    reference, inputs = plain(), torch.randn(2, 4)
    builder = ModelBuilderV1(router=None, tp_degree=2, checkpoint_loader=loader)
    builder.add("model", BaseModelInstance(feed_forward, {}), [(inputs,)])
    with nxd.NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        shards = nxd.shard_checkpoint(reference.state_dict(), feed_forward())

    model = builder.trace(initialize_model_weights=False)
    model.nxd_model.initialize(shards, torch.tensor([0]))

    torch.testing.assert_close(model(inputs), reference(inputs))
    model.nxd_model.close()


class Counting(nn.Module):
    """Adds the number of its calls, which is state that no checkpoint holds, and its bucket."""

    def __init__(self):
        super().__init__()
        self.layer = ColumnParallelLinear(4, 8, bias=False)
        self.calls = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.rank = SPMDRank(2)
        self.bucket = -1

    def preshard_hook(self, state, name):
        state["layer.weight"] = state.pop("stored.weight")

    def forward(self, inputs):
        calls = self.calls + 1
        return self.layer(inputs) + calls + self.bucket, calls


class CountingInstance(BaseModelInstance):
    def __init__(self):
        super().__init__(Counting, {})

    def get(self, bucket_rank, **kwargs):
        self.module.bucket = 10 * bucket_rank
        return self.module, {self.module.calls: 1}


@pytest.mark.slow
def test_the_first_builder_calls_preshard_hooks_numbers_buckets_and_keeps_state_that_weights_lack():
    weight, inputs = torch.randn(8, 4), torch.randn(2, 4)
    builder = ModelBuilderV1(None, 2, lambda: {"stored.weight": weight})
    buckets = BucketModelConfig(None, func_kwargs=[{"bucket_rank": 0}, {"bucket_rank": 1}])

    builder.add("buckets", CountingInstance(), [(inputs[:1],), (inputs,)], "--auto-cast=none", bucket_config=buckets)
    builder.add("other", CountingInstance(), [(inputs.repeat(2, 1),)], "-O1")
    model = builder.trace(initialize_model_weights=False)
    shards = builder.shard_checkpoint()

    torch.testing.assert_close(model(inputs[:1]), inputs[:1] @ weight.t() + 1)
    torch.testing.assert_close(model(inputs), inputs @ weight.t() + 12)
    assert [shard["rank.rank"].tolist() for shard in shards] == [[0], [1]]
    model.nxd_model.close()


def test_the_builder_of_nxd_trace_is_made_by_its_own_arguments():
    assert type(nxd.trace.ModelBuilder(feed_forward, tp_degree=2)) is nxd_trace.ModelBuilder


def test_builders_say_what_they_do_not_take():
    with pytest.raises(ValueError, match="router must be None"):
        ModelBuilderV1(max, 2, dict)
    with pytest.raises(ValueError, match="No traces available"):
        nxd.ModelBuilder(feed_forward()).compile()
    with pytest.raises(ValueError, match="example inputs as args"):
        nxd.ModelBuilder(feed_forward()).trace()
    with pytest.raises(TypeError, match="missing a required argument: 'input'"):
        nxd.ModelBuilder(feed_forward()).trace(args=())
    with pytest.raises(ValueError, match=r"nothing has been added; call add\(\) before trace\(\)"):
        ModelBuilderV1(None, 2, dict).trace()
    with pytest.raises(ValueError, match=r"compiler_args lack \['b'\]; pass options for each"):
        nxd.ModelBuilder(feed_forward()).trace(args=torch.ones(1, 4), tag="b").compile(compiler_args={"a": "-O1"})


def test_planned_ranks_answer_as_if_they_ran():
    with mock_distributed(world_size=8):
        torch.distributed.init_process_group(backend="xla", rank=0, world_size=8)
        initialize_model_parallel(tensor_model_parallel_size=4)
        layer = ColumnParallelLinear(4, 8)
        assert (torch.distributed.get_world_size(), get_tensor_model_parallel_size()) == (8, 4)
        torch.distributed.destroy_process_group()

    assert layer.weight.shape == (2, 4)
    assert not torch.distributed.is_initialized()


# Sampling.


def sampler(top_k, **further):
    config = SimpleNamespace(do_sample=True, num_beams=1, top_k=top_k)
    return Sampler(SimpleNamespace(on_device_sampling=False, hf_config=config, **further))


def test_samples_are_drawn_among_the_likeliest_by_their_probability():
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 3.0, 2.0, -5.0]]).repeat(20000, 1)

    drawn = sampler(2).sample(logits).bincount(minlength=4) / 20000

    torch.testing.assert_close(drawn, torch.tensor([0, 1, 1, 0]) * logits[0].softmax(0) / 0.8995, atol=0.02, rtol=0)
    assert sampler(1).sample(logits[:2]).tolist() == [1, 1]
    assert sampler(2, is_medusa=True).sample(logits[:1]).tolist() == [[1, 2]]


def test_a_tree_of_candidates_accepts_the_branch_that_agrees_longest():
    buffers = medusa_utils.generate_medusa_buffers([[0], [0, 0], [0, 1], [1]])
    guesses = torch.arange(20, 40).view(2, 1, 1, 10)  # of two heads

    branches, tree = medusa_utils.generate_candidates(
        guesses, torch.tensor([[[7, 8]]]), buffers["tree_indices"], buffers["retrieve_indices"]
    )
    said = torch.tensor([[[20], [31], [9]]]).repeat(3, 1, 1)  # by the model, after each token
    best, accepted = medusa_utils.evaluate_posterior(said, branches)
    ids, *_, count, places = medusa_utils.update_inference_inputs(
        torch.tensor([[5]]), branches, best, accepted, buffers["retrieve_indices"], {}, said, said[None], 0
    )

    assert tree.tolist() == [[7, 20, 21, 30, 31]]
    assert sorted(branches.tolist()) == [[7, 20, 30], [7, 20, 31], [7, 21, 0]]
    assert buffers["medusa_attn_mask"].tolist()[4] == [1, 1, 0, 0, 1]
    assert buffers["medusa_position_ids"].tolist() == [0, 1, 1, 2, 2]
    assert branches[best].tolist() == [7, 20, 31]
    assert (accepted.item(), int(count)) == (2, 3)
    assert ids.tolist() == [[5, 7, 20, 31]]
    assert (places - 1).tolist() == [0, 1, 4]
    with pytest.raises(ValueError, match="include all ancestors"):
        medusa_utils.generate_medusa_buffers([[0, 0]])


# Recorded and replaced tensors.


def test_what_modules_return_is_recorded_until_it_is_disabled():
    model, inputs = plain(), torch.randn(2, 4)

    enable_tensor_capture(model, ["0", "2"], max_tensors=1, capture_inputs=True)
    output = model(inputs)
    register_tensor("extra", output)
    register_tensor("one too many", output)
    records = get_captured_tensors_dict()
    disable_tensor_capture(model)
    model(inputs)

    assert list(records) == ["0.inputs.0", "0.outputs", "2.inputs.0", "2.outputs", "manual_extra"]
    assert torch.equal(records["2.outputs"], output)
    assert get_captured_tensors_dict() == {}
    with pytest.raises(ValueError, match=r"not found in the model: \['9'\]"):
        enable_tensor_capture(model, ["9"])


def test_records_are_of_the_last_forward_of_any_model_until_it_is_restored():
    class Registering(nn.Sequential):
        def forward(self, inputs):
            register_tensor("sum", inputs.sum())
            return super().forward(inputs)

    one, other = (enable_tensor_capture(Registering(plain()), ["0"], max_tensors=1) for _ in range(2))
    for inputs in (torch.ones(1, 4), torch.zeros(1, 4)):
        one(inputs)
    first = get_captured_tensors_dict()
    restore_model(one)
    one(torch.ones(1, 4))
    kept = get_captured_tensors_dict()
    other(torch.ones(1, 4))
    last = get_captured_tensors_dict()
    disable_tensor_capture(other)

    assert type(first) is OrderedDict
    assert list(first) == ["0.outputs", "manual_sum"]
    assert first["manual_sum"] == 0
    torch.testing.assert_close(kept, first)
    assert last["manual_sum"] == 4
    assert find_available_modules(plain(), "net") == ["net.0", "net.1", "net.2"]


def test_a_replaced_tensor_takes_the_place_of_what_a_module_returns(monkeypatch):
    monkeypatch.setattr(RuntimeRegister, "module_superset", ["0"])
    model, inputs, forced = plain(), torch.randn(2, 4), torch.zeros(2, 8)
    expected = model[2](forced)

    model, _ = modify_model_for_tensor_replacement(model)

    torch.testing.assert_close(model(inputs, forced, torch.ones(2, 8, dtype=torch.bool)), expected)
    with pytest.raises(ValueError, match="expected 2 trailing replacement args"):
        model(inputs)


# Quantization's further names; numbers and layers are tested in nxd-layers.


def test_default_configs_name_their_way():
    config = quantization_config.get_default_per_channel_custom_qconfig_dict()

    assert config["quantization_type"] is quantization_config.QuantizationType.PER_CHANNEL_SYMMETRIC
    assert "per_channel_symmetric" in quantization_config.QuantizationType
    assert quantization_config.QuantizedDtype.get_dtype("f8e4m3") == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="f9 is not a valid QuantizedDtype; use one of INT8"):
        quantization_config.QuantizedDtype.has_dtype("f9")


def test_packed_4_bit_floats_become_their_values_times_the_scale_of_their_block():
    halves = torch.tensor([[0, 1, 7, 15], [8, 9, 2, 3]], dtype=torch.uint8)  # two blocks of four
    scales = torch.tensor([128, 126], dtype=torch.uint8)
    expected = torch.tensor([0.0, 1.0, 12.0, -12.0, -0.0, -0.25, 0.5, 0.75])
    packed = microscaling.pack_byte_4bit_tensor(halves)
    quads = microscaling.pack_fp4_x4_uint16(packed)

    found = [
        microscaling.get_mxfp4_tensor(packed, scales, dtype=torch.float32),
        microscaling.get_mxfp4_tensor_from_uint16(quads, scales, dtype=torch.float32),
        microscaling.get_mxfp4_tensor_from_uint16(quads, scales, dtype=torch.float32, output_quad_row=True).flatten(),
    ]

    assert packed.tolist() == [[0x10, 0xF7], [0x98, 0x32]]
    assert torch.equal(microscaling.pack_byte_4bit_tensor(halves[0]), packed[0])
    assert torch.equal(microscaling.split_byte_4bit_tensor(packed), halves)
    assert all(torch.equal(values, expected) for values in found)
    assert microscaling.apply_lut_byte_4bit_tensor(halves).tolist()[:4] == [0.0, 0.5, 6.0, -6.0]
    with pytest.raises(ValueError, match=r"scales of shape \[1\] do not match the blocks; expected \[2\]"):
        microscaling.get_mxfp4_tensor(packed, scales[:1])
    with pytest.raises(ValueError, match=r"uint8 \[2, 3\] cannot be packed; pass uint8 in rows of even length"):
        microscaling.pack_byte_4bit_tensor(halves[:, :3])
    with pytest.raises(ValueError, match="cannot be packed"):
        microscaling.pack_fp4_x4_uint16(halves.int())


def test_packed_4_bit_floats_are_dequantized_by_blocks():
    quads = torch.tensor([[0xF710, 0x3298]], dtype=torch.uint16)
    scales = torch.tensor([[128, 126]], dtype=torch.uint8)

    values = dequantize.blockwise_scale_dequantize(quads, scales, torch.float32)

    assert values.tolist() == [[0.0, 1.0, 12.0, -12.0, -0.0, -0.25, 0.5, 0.75]]


def whole_weights():
    return plain().state_dict()


@pytest.mark.slow
def test_a_trace_takes_its_weights_from_a_loader_and_is_saved_on_the_way(tmp_path):
    inputs = torch.randn(2, 4)
    traced = nxd.trace.parallel_model_trace(
        feed_forward,
        inputs,
        inline_weights_to_neff=False,
        tp_degree=2,
        spmd_mode=True,
        checkpoint_loader_callable=whole_weights,
        serialization_path=tmp_path / "saved",
    )
    traced.close()
    loaded = nxd.trace.parallel_model_load(model_dir=tmp_path / "saved")

    torch.testing.assert_close(loaded(inputs), plain()(inputs))
    loaded.close()


def test_a_trace_with_states_or_two_sources_of_weights_is_refused():
    with pytest.raises(ValueError, match="return the model and its aliases from func"):
        nxd.trace.parallel_model_trace(feed_forward, torch.ones(1, 4), states=[torch.ones(1)])
    with pytest.raises(ValueError, match="weights= and checkpoint_loader_callable="):
        nxd.trace.parallel_model_trace(
            feed_forward, torch.ones(1, 4), weights={}, checkpoint_loader_callable=whole_weights
        )


@pytest.mark.parametrize("given", ["--model-type=transformer -O1", ["--optlevel", "2"], "-O1"])
def test_options_of_neuronx_cc_do_not_reach_the_compilers_of_torch(given):
    for compiler in ("inductor", "export"):
        assert arguments_of_compiler(given, compiler) is None
    assert arguments_of_compiler(given, "neuronx") == given
    assert arguments_of_compiler("max_autotune=True", "inductor") == "max_autotune=True"
