"""Experts of an unmodified Mixtral over ranks: training, checkpoints at other layouts, and what is refused."""

import pytest
import torch
from neuronx_distributed.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    neuronx_distributed_config,
    save_checkpoint,
)
from nxd_ckpt import open_checkpoint
from nxd_layers.hf import parallelize
from nxd_lora import LoraConfig
from nxd_parity import InFloat64
from nxd_state import (
    destroy_model_parallel,
    get_data_parallel_rank,
    get_data_parallel_size,
    initialize_model_parallel,
)
from nxd_trainer.parity import ParityCase, compare

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

pytestmark = pytest.mark.sample(3)  # each takes its time

EXPERTS = 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
ZERO1 = {"optimizer_config": {"zero_one_enabled": True}}
TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
PIPELINE = {"num_microbatches": 2, "auto_partition": True, "input_names": ["input_ids", "labels"]}
BATCHES = [torch.arange(8 * 10).view(8, 10) * step % 61 + 2 for step in (5, 7, 11, 13)]


def ep(size, *further, **more):
    layout = {"expert_parallel_size": size, **more}
    for part in further:
        layout |= part
    return layout | ({"pipeline_config": PIPELINE} if "pipeline_parallel_size" in layout else {})


def make_mixtral():
    config = transformers.MixtralConfig(**SIZES, use_cache=False)
    config._experts_implementation = "eager"  # grouped products know no float64
    return transformers.MixtralForCausalLM(config).double()


def compared(layout, make_model=make_mixtral):
    batches = [{"input_ids": ids, "labels": ids} for ids in BATCHES[:2]]
    report = compare(ParityCase(model_fn=make_model, batches=batches, nxd_config=layout))
    return report.agrees, str(report)


LAYOUTS = {
    "EP 2 + ZeRO-1": (2, ep(2, ZERO1)),
    "EP 2 over TP 2, split sequence": (2, ep(2, TP2, expert_tensor_parallel_size=1, sequence_parallel=True)),
    "EP 4": (4, ep(4)),
    "EP 2 x DP 2 + ZeRO-1": (4, ep(2, ZERO1)),
    "EP 2 x TP 2 + ZeRO-1": (4, ep(2, TP2, ZERO1)),
    "EP 4 over TP 2 and DP 2 + ZeRO-1": (4, ep(4, TP2, ZERO1, expert_tensor_parallel_size=1)),
    "EP 1 with whole experts on TP 2": (2, ep(1, TP2, expert_tensor_parallel_size=1)),
    "EP 2 x PP 2, recomputed": (4, ep(2, PP2, activation_checkpoint_config="full")),
    "EP 2 x TP 2 x PP 2": (8, ep(2, TP2, PP2)),
}
QUICK = ("EP 2 + ZeRO-1", "EP 2 over TP 2, split sequence")


@pytest.mark.parametrize("layout", [it if it in QUICK else pytest.param(it, marks=pytest.mark.slow) for it in LAYOUTS])
def test_losses_gradients_norms_and_weights_are_those_of_one_process(run_ranks, layout):
    ranks, config = LAYOUTS[layout]

    for agrees, report in run_ranks(compared, ranks, config, timeout=300):
        assert agrees, report


def make_half_dense():
    sizes = SIZES | {"num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts": EXPERTS}
    config = transformers.Qwen3MoeConfig(**sizes, head_dim=8, mlp_only_layers=[0, 2], use_cache=False)
    config._experts_implementation = "eager"  # grouped products know no float64
    return transformers.Qwen3MoeForCausalLM(config).double()


def test_layers_without_experts_between_others_train_as_in_one_process_with_a_split_sequence(run_ranks):
    ranks, config = LAYOUTS["EP 2 over TP 2, split sequence"]

    for agrees, report in run_ranks(compared, ranks, config, make_half_dense, timeout=300):
        assert agrees, report


LORA = LoraConfig(
    lora_rank=3,
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    target_modules=["q_proj"],
    save_lora_base=True,
)


@pytest.mark.parametrize(
    "layout",
    [
        "EP 2 + ZeRO-1",
        *(
            pytest.param(it, marks=pytest.mark.slow)
            for it in ("EP 2 over TP 2, split sequence", "EP 2 x TP 2 + ZeRO-1", "EP 2 x PP 2, recomputed")
        ),
    ],
)
def test_adapters_of_experts_train_as_in_one_process(run_ranks, layout):
    ranks, config = LAYOUTS[layout]

    for agrees, report in run_ranks(compared, ranks, {**config, "lora_config": LORA}, timeout=300):
        assert agrees, report


def trained(layout, steps, root, *, save=None, load=None):
    """Losses of these steps, after a checkpoint was loaded; another is saved behind them."""
    destroy_model_parallel()
    config = neuronx_distributed_config(**layout)
    torch.manual_seed(0 if load is None else 1)
    model = initialize_parallel_model(config, make_mixtral)
    optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    if load is not None:
        load_checkpoint(root, load, model=model, optimizer=optimizer)
    losses = []
    for ids in (BATCHES[step] for step in steps):
        own = ids.chunk(get_data_parallel_size())[get_data_parallel_rank()]
        with InFloat64():
            losses.append(model.run_train(input_ids=own, labels=own))
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        save_checkpoint(root, save, model=model, optimizer=optimizer)
    return [None if loss is None else float(loss) for loss in losses]


def reshaped(root, first, others):
    expected = trained(first, range(2), root, save="first")
    for name, layout in others.items():
        trained(layout, [], root, load="first", save=name)
    return expected


@pytest.mark.slow
def test_checkpoint_of_split_experts_loads_at_other_layouts_bit_by_bit(run_ranks, tmp_path):
    others = {"tp": ep(2, TP2, ZERO1), "pp": ep(2, PP2), "whole": ep(1, ZERO1)}

    run_ranks(reshaped, 4, str(tmp_path), ep(4, ZERO1), others, timeout=300)

    first = open_checkpoint(str(tmp_path), "first")
    experts = [name for name in first.tensors if "experts" in name and not name.endswith("/step")]
    assert len(experts) == 2 * 2 * 3  # weights and two states of two tensors of two layers
    for name in experts:
        assert first.read(name).shape[0] == EXPERTS
        assert all(expert.any() for expert in first.read(name))
    for other in others:
        copy = open_checkpoint(str(tmp_path), other)
        assert copy.tensors.keys() == first.tensors.keys()
        for name in first.tensors:
            assert torch.equal(copy.read(name), first.read(name)), (other, name)


def test_adapters_of_experts_load_at_another_layout(run_ranks, tmp_path):
    run_ranks(reshaped, 2, str(tmp_path), ep(2, ZERO1, lora_config=LORA), {"tp": ep(1, TP2, lora_config=LORA)})

    first, copy = open_checkpoint(str(tmp_path), "first"), open_checkpoint(str(tmp_path), "tp")
    shapes = {name: tuple(first.tensors[name].global_shape) for name in first.tensors if "experts.lora" in name}
    rank, hidden, inner = LORA.lora_rank, SIZES["hidden_size"], SIZES["intermediate_size"]
    experts = "model.layers.1.mlp.experts"
    assert shapes[f"{experts}.lora_A_gate_up_proj"] == (EXPERTS, rank, hidden)
    assert shapes[f"{experts}.lora_B_gate_up_proj"] == (EXPERTS, 2 * inner, rank)
    assert shapes[f"{experts}.lora_A_down_proj"] == (EXPERTS, rank, inner)
    assert copy.tensors.keys() == first.tensors.keys()
    for name in first.tensors:
        assert torch.equal(copy.read(name), first.read(name)), name
        assert "lora_B" not in name or first.read(name).any()


def resumed(root, layout):
    trained(layout, range(2), root, save="at two")
    whole = trained(layout, range(4), root)
    return whole[2:], trained(layout, range(2, 4), root, load="at two")


def test_run_with_split_experts_resumes_bitwise(run_ranks, tmp_path):
    for whole, after in run_ranks(resumed, 2, str(tmp_path), ep(2, ZERO1)):
        assert after == whole


def generated(model, replica):
    """Another prompt and number of tokens for each replica."""
    ids = BATCHES[0][replica : replica + 1, : 3 + 2 * replica]
    with InFloat64():
        return model.generate(ids, max_new_tokens=2 + 6 * replica, do_sample=False, pad_token_id=0)[0].tolist()


def test_replicas_that_generate_other_numbers_of_tokens_wait_for_each_other(run_ranks):
    def job():
        torch.manual_seed(0)
        whole = make_mixtral()
        expected = [generated(whole, replica) for replica in range(2)]
        initialize_model_parallel(1, 1, 2)
        model = parallelize(whole, expert_parallel=True)
        return expected[get_data_parallel_rank()], generated(model, get_data_parallel_rank())

    for expected, found in run_ranks(job, 2):
        assert found == expected


def test_what_cannot_be_split_is_refused_with_the_reason(run_ranks):
    def job():
        initialize_model_parallel(1, 1, 2)
        llama = transformers.LlamaConfig(**{name: it for name, it in SIZES.items() if "expert" not in name})
        with pytest.raises(ValueError, match="LlamaForCausalLM has no expert-parallel plan"):
            parallelize(transformers.LlamaForCausalLM(llama), expert_parallel=True)
        odd = transformers.MixtralConfig(**SIZES | {"num_local_experts": 3})
        with pytest.raises(
            ValueError,
            match="expert_model_parallel_size=2 does not divide the 3 experts",
        ):
            parallelize(transformers.MixtralForCausalLM(odd), expert_parallel=True)
        layer = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
        with pytest.raises(ValueError, match="none of its parameters has grouped_gemm"):
            parallelize(make_mixtral(), plan=layer, expert_parallel=True)
        plan = layer | {"model.layers.*.mlp.experts.down_proj": "grouped_gemm"}
        with pytest.raises(ValueError, match="has one row for each of 4 experts; give it the style grouped_gemm"):
            parallelize(make_mixtral(), plan=plan, expert_parallel=True)

    run_ranks(job, 2)
