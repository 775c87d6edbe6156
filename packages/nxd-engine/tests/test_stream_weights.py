"""`stream_weights` beside `save_pretrained`: the same bits from every layout, bounded memory, no rank left waiting."""

import contextlib
import gc
import re
import sys
from functools import partial

import nxd_engine
import pytest
import torch
from nxd_engine.hugging_face import save_pretrained
from nxd_layers.quantization import quantize_fp8_blocks
from nxd_lora import LoraConfig, save_peft_adapter
from nxd_state import PeerError, get_world_group, whole_parameters

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | more, architectures=["LlamaForCausalLM"])
    return transformers.LlamaForCausalLM(config)


def mixture(**more):
    torch.manual_seed(0)
    more |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 4,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | more))


def parallel(make, *, lora=None, zero_stage=None, **degrees):
    options = {} if zero_stage is None else {"optimizer_config": {"zero_stage": zero_stage}}
    if degrees.get("pipeline_parallel_size", 1) > 1:
        options["pipeline_config"] = {"num_microbatches": 1, "auto_partition": True}
    config = nxd_engine.neuronx_distributed_config(**degrees, **options, lora_config=lora)
    return nxd_engine.initialize_parallel_model(config, make)


def assert_same(streamed, expected):
    assert list(streamed) == list(expected)
    for name, tensor in expected.items():
        assert streamed[name].dtype == tensor.dtype
        assert streamed[name].shape == tensor.shape
        assert torch.equal(streamed[name].view(torch.uint8), tensor.view(torch.uint8)), name


def saved_by(model, folder, **options):
    """The tensors of the folder that `save_pretrained` writes, in its order; on rank 0."""
    save_pretrained(model, folder, **options)
    if get_world_group().rank:
        return {}
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.offset_keys()}


LAYOUTS = {
    "tp": (llama, 2, {"tensor_parallel_size": 2}),
    "pp": (llama, 2, {"pipeline_parallel_size": 2}),
    "tp-pp": (llama, 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "zero3": (llama, 2, {"zero_stage": 3}),
    "tp-zero3": (llama, 4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "ep": (mixture, 2, {"expert_parallel_size": 2}),
    "tp-sp, tied": (
        partial(llama, tie_word_embeddings=True),
        2,
        {"tensor_parallel_size": 2, "sequence_parallel": True},
    ),
    "tp-ep": (mixture, 4, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
    "cp-zero3": (llama, 2, {"context_parallel_size": 2, "zero_stage": 3}),
    "tp, padded vocabulary": (partial(llama, vocab_size=63), 2, {"tensor_parallel_size": 2}),
}
ALWAYS = ("tp", "zero3", "ep", "tp, padded vocabulary")


@pytest.mark.parametrize("layout", [it if it in ALWAYS else pytest.param(it, marks=pytest.mark.slow) for it in LAYOUTS])
def test_streamed_tensors_equal_the_saved_folder_bit_by_bit(run_ranks, tmp_path, layout):
    make, num_ranks, degrees = LAYOUTS[layout]

    def stream():
        model = parallel(make, **degrees)
        expected = saved_by(model, tmp_path / "saved")
        streamed = dict(nxd_engine.stream_weights(model, bucket_size=1000))  # also cuts tensors
        assert_same(streamed, expected)
        whole = {} if make is mixture else make().state_dict()
        for name in streamed.keys() & whole.keys():
            assert torch.equal(streamed[name], whole[name]), name  # neither of the two is wrong
        return len(streamed)

    counts = run_ranks(stream, num_ranks)

    assert counts == [counts[0]] + [0] * (num_ranks - 1)
    assert counts[0] >= 20


def test_tied_weights_come_once_in_another_dtype_and_to_every_rank_that_asks(run_ranks, tmp_path):
    def stream():
        degrees = {"tensor_parallel_size": 2}
        model = parallel(partial(llama, tie_word_embeddings=True), **degrees)
        expected = saved_by(model, tmp_path / "saved", dtype=torch.bfloat16)
        return dict(nxd_engine.stream_weights(model, to="every_rank", dtype=torch.bfloat16)), expected

    (on_rank_0, expected), (on_rank_1, _) = run_ranks(stream, 2)

    assert "lm_head.weight" not in expected
    assert_same(on_rank_0, expected)
    assert_same(on_rank_1, expected)


def test_only_the_names_that_rank_0_asks_for_are_streamed(run_ranks):
    def stream():
        model = parallel(llama, tensor_parallel_size=2)
        is_first = get_world_group().rank == 0
        wanted = {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}
        by_set = dict(nxd_engine.stream_weights(model, names=wanted if is_first else None))
        by_pattern = dict(nxd_engine.stream_weights(model, names="model.layers.0.mlp.*", to="every_rank"))
        with pytest.raises((ValueError, PeerError)) as error:
            list(nxd_engine.stream_weights(model, names="lm_haed*"))
        return by_set, list(by_pattern), f"{error.type.__name__}: {error.value}"

    (by_set, by_pattern, error), (nothing, same, told) = run_ranks(stream, 2)

    whole = llama().state_dict()
    assert_same(by_set, {name: whole[name] for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")})
    assert nothing == {}
    assert by_pattern == same == [f"model.layers.0.mlp.{it}_proj.weight" for it in ("gate", "up", "down")]
    assert error.startswith("ValueError: names='lm_haed*' matches none of the 21 tensors, such as ")
    assert told == f"PeerError: streaming the weights failed on rank 0: {error}"


@pytest.mark.parametrize("zero_stage", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_adapters_are_streamed_merged_or_alone_and_train_on_unmerged(run_ranks, tmp_path, zero_stage):
    def stream():
        lora = LoraConfig(lora_rank=2, target_modules=["q_proj", "down_proj"])
        degrees = {"tensor_parallel_size": 2} if zero_stage is None else {"zero_stage": zero_stage}
        model = parallel(llama, lora=lora, **degrees)
        with whole_parameters(model.parameters(), changed=True), torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.5)
            before = [parameter.detach().clone() for parameter in model.parameters()]
        merged = dict(nxd_engine.stream_weights(model, bucket_size=1000))
        alone = dict(nxd_engine.stream_weights(model, adapters="alone"))
        with whole_parameters(model.parameters()):
            assert all(map(torch.equal, before, model.parameters()))
        save_peft_adapter(model.lora_model, tmp_path / "adapter")
        model.lora_model.merge()
        already = dict(nxd_engine.stream_weights(model))
        assert model.lora_model.is_merged
        return merged, alone, already

    (merged, alone, already), _ = run_ranks(stream, 2)

    base = llama()
    base.save_pretrained(tmp_path / "base")
    theirs = pytest.importorskip("peft").PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    assert_same(already, merged)
    assert merged.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    changed = {name for name, tensor in llama().state_dict().items() if not torch.equal(tensor, merged[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    assert len(changed) == 4
    assert_same(dict(sorted(alone.items())), safetensors.load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


@contextlib.contextmanager
def bytes_of_new_tensors():
    """A list to which each return of a function that gathers adds the bytes of the tensors made in the block."""
    counts = []

    def count(frame, event, _):
        if event == "return" and frame.f_code.co_filename.endswith(
            ("gathering.py", "streaming.py", "collectives/c10d.py")
        ):
            storages = [it.untyped_storage() for it in gc.get_objects() if type(it) is torch.Tensor]
            counts.append(sum({it.data_ptr(): it.nbytes() for it in storages if it.data_ptr() not in known}.values()))

    known = {it.untyped_storage().data_ptr() for it in gc.get_objects() if isinstance(it, torch.Tensor)}
    gc.freeze()  # leaves only what is made from here on to be counted
    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        gc.unfreeze()


@pytest.mark.parametrize("quantize", [None, "fp8_blocks"])
def test_rank_0_holds_no_more_than_a_bucket_and_the_largest_tensor(run_ranks, quantize):
    def stream(bucket_size):
        model = parallel(llama, tensor_parallel_size=2)
        total = largest = 0
        with bytes_of_new_tensors() as counts:
            for _, tensor in nxd_engine.stream_weights(model, bucket_size=bucket_size, quantize=quantize):
                total, largest = total + tensor.nbytes, max(largest, tensor.nbytes)
                del tensor  # what the caller keeps is not counted
        return max(counts), largest, total

    for bucket_size in (1500, 8192):
        (held, largest, total), _ = run_ranks(stream, 2, bucket_size)
        print(f"{held} bytes of {total}; a bucket of {bucket_size} and the largest tensor of {largest}")
        assert largest < held <= bucket_size + largest
        assert held < 0.6 * total


QUANTIZED = {f"{it}_proj" for it in ("q", "k", "v", "o", "gate", "up", "down")}  # not embeddings, norms, routers, heads


@pytest.mark.parametrize("layout", ["ep", pytest.param("tp", marks=pytest.mark.slow)])
def test_fp8_blocks_equal_those_of_one_process_and_only_linear_layers_have_them(run_ranks, layout):
    make, num_ranks, degrees = LAYOUTS[layout]
    make = partial(make, hidden_size=144, intermediate_size=272)  # more than a block, and an incomplete one

    def stream():
        model = parallel(make, **degrees)
        options = {"dtype": torch.bfloat16, "quantize": "fp8_blocks", "bucket_size": 9999}
        expected = {}
        for name, tensor in nxd_engine.stream_weights(model, to="every_rank", dtype=torch.bfloat16):
            if name.split(".")[-2] in QUANTIZED:
                expected[name], expected[f"{name}_scale_inv"] = quantize_fp8_blocks(tensor)
            else:
                expected[name] = tensor
        streamed = dict(nxd_engine.stream_weights(model, to="every_rank", **options))
        assert_same(streamed, expected)
        some = nxd_engine.stream_weights(model, names="*.1.self_attn.?_proj.weight", **options)
        return {name: (tensor.dtype, len(tensor)) for name, tensor in some}

    some, nothing = run_ranks(stream, num_ranks)

    weight = "model.layers.1.self_attn.k_proj.weight"
    assert some[weight][0] == torch.float8_e4m3fn
    assert some[f"{weight}_scale_inv"] == (torch.float32, 1)
    assert len(some) == 8
    assert nothing == {}


class ConsumerError(Exception):
    """Raised by whoever gets the tensors."""


@pytest.mark.parametrize("to", ["rank_0", "every_rank"])
def test_rank_that_leaves_the_loop_ends_it_on_all_and_the_next_one_works(run_ranks, to):
    def fail(model, failing, act):
        for number, _ in enumerate(nxd_engine.stream_weights(model, to=to, bucket_size=1500)):
            if number == 4 and get_world_group().rank == failing:
                if act == "break":
                    break
                raise ConsumerError("the engine is gone")

    def stream():
        model, raised = parallel(llama, tensor_parallel_size=2), []
        for failing in (0, 1) if to == "every_rank" else (0,):
            for act in ("raise", "break"):
                try:
                    fail(model, failing, act)
                    raised.append("nothing")
                except (ConsumerError, PeerError) as error:
                    raised.append(f"{type(error).__name__}: {error}")
        return raised, len(dict(nxd_engine.stream_weights(model, to=to)))

    (of_first, count), (of_second, _) = run_ranks(stream, 2)

    doing = "PeerError: streaming the weights failed on rank"
    own = ["ConsumerError: the engine is gone", "nothing"]
    told = ["the loop over the tensors ended early"] * 2
    assert of_second[:2] == [f"{doing} 0: {it}" for it in told]
    assert of_first == own + ([f"{doing} 1: {it}" for it in told] if to == "every_rank" else [])
    assert of_second[2:] == (own if to == "every_rank" else [])
    assert count == 21


def test_adapters_are_unmerged_when_the_loop_ends_early(run_ranks):
    def stream():
        model = parallel(llama, lora=LoraConfig(lora_rank=2, target_modules=["q_proj"]), tensor_parallel_size=2)
        with contextlib.suppress(PeerError), contextlib.closing(nxd_engine.stream_weights(model)) as stream:
            next(stream)
        return model.lora_model.is_merged

    assert run_ranks(stream, 2) == [False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "all"}, "to='all' is not a receiver; use one of rank_0, every_rank"),
        ({"adapters": "alone"}, 'adapters="alone", but the model has no adapters; leave it out'),
        ({"adapters": "both"}, "adapters='both' is unknown; use one of merged, alone"),
        ({"bucket_size": 0}, "0 bytes is too small; use 1 byte or more, such as '5GB'"),
        ({"dtype": torch.int8}, "torch.int8 is not a floating-point dtype"),
        ({"quantize": "int4"}, "quantize='int4' is unknown; use fp8_blocks or None"),
        ({"quantize": "fp8_blocks", "config": {"architectures": ["Own"]}}, "it does not know ['Own']"),
        ({"names": {"lm_haed.weight"}}, "names has ['lm_haed.weight'], which the model lacks; it has "),
    ],
)
def test_wrong_argument_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        next(nxd_engine.stream_weights(llama(), **options))


def test_config_of_other_sizes_is_refused_not_cut_to():
    with pytest.raises(ValueError, match=r"lm_head.weight is \[64, 16\], and \[64, 8\] according to"):
        next(nxd_engine.stream_weights(llama(), config=llama(hidden_size=8).config))


def test_streamed_tensors_do_not_change_with_the_model():
    model = llama()
    streamed = dict(nxd_engine.stream_weights(model))

    with torch.no_grad():
        model.model.norm.weight.fill_(7.0)

    assert not (streamed["model.norm.weight"] == 7.0).any()


def test_ranks_that_call_it_differently_all_fail(run_ranks):
    def stream():
        model = parallel(llama, tensor_parallel_size=2)
        with pytest.raises(ValueError, match="to is 'rank_0' on rank 0 and 'every_rank' on rank 1"):
            list(nxd_engine.stream_weights(model, to=["rank_0", "every_rank"][get_world_group().rank]))

    run_ranks(stream, 2)
