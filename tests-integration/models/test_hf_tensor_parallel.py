"""Unmodified models of transformers, split over tensor-parallel ranks: the logits, loss and gradients of one process.

Everything is in float64, also what the models themselves compute in float32. All models of one number of ranks run in
one job.
"""

import copy
import pickle
from collections import Counter
from dataclasses import dataclass, field

import neuronx_distributed as nxd
import pytest
import torch
from nxd_layers import apply_activation_checkpointing
from nxd_layers.hf import parallelize
from nxd_lora import LoraConfig, LoraModel
from nxd_parity import InFloat64
from nxd_pipeline import NxDPPModel
from nxd_state import all_reduce, destroy_model_parallel, get_group, get_shard_spec, initialize_model_parallel
from nxd_testing import assemble_logical, logical_pieces
from packaging.version import Version
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

pytestmark = pytest.mark.sample(8)  # each takes its time

EXACT = {"rtol": 1e-9, "atol": 1e-11}
IDS = torch.arange(16).view(2, 8) * 7 % 59 + 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "sliding_window": 4,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "head_dim": 4}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Model:
    """A config of transformers, small, and the arguments of `parallelize`."""

    model_type: str
    sizes: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)


SPLIT_SEQUENCE = {"sequence_parallel": True}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
BLOOM = {"n_layer": 2, "n_head": 4}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0}
FALCON_H1 = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
ON_TWO_RANKS = {
    "llama": Model("llama"),
    "llama, tied, odd vocabulary": Model("llama", TIED | {"vocab_size": 63}),
    "qwen2": Model("qwen2"),
    "qwen3": Model("qwen3"),
    "gemma2": Model("gemma2"),
    "gemma3": Model("gemma3_text"),
    "mistral": Model("mistral"),
    "phi3": Model("phi3", {"head_dim": None}),
    "gpt-neox": Model("gpt_neox", {"hidden_dropout": 0.0}),
    "gpt-neox, three heads": Model("gpt_neox", {"num_attention_heads": 3, "hidden_size": 24}),
    "olmo2": Model("olmo2"),
    "starcoder2": Model("starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "mixtral": Model("mixtral", EXPERTS),
    "qwen3 with experts": Model("qwen3_moe", EXPERTS),
    "deepseek-v2": Model("deepseek_v2", EXPERTS | LATENT),
    "granite with sinks": Model("granite_swa"),
    "one key/value head": Model("llama", {"num_key_value_heads": 1}),
    "three key/value heads": Model("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}),
    "llama, split sequence": Model("llama", options=SPLIT_SEQUENCE),
    "qwen3, split sequence": Model("qwen3", options=SPLIT_SEQUENCE),
    "gemma2, split sequence": Model("gemma2", options=SPLIT_SEQUENCE),
    "starcoder2, split sequence": Model("starcoder2", {"residual_dropout": 0.0}, SPLIT_SEQUENCE),
    "phi3, split sequence": Model("phi3", {"head_dim": None}, SPLIT_SEQUENCE),
    "olmo2, split sequence": Model("olmo2", options=SPLIT_SEQUENCE),
    "mixtral, split sequence": Model("mixtral", EXPERTS, SPLIT_SEQUENCE),
    "deepseek-v2, split sequence": Model("deepseek_v2", EXPERTS | LATENT, SPLIT_SEQUENCE),
    "llama4, split sequence": Model("llama4_text", EXPERTS, SPLIT_SEQUENCE),
    "gpt2": Model("gpt2", GPT2),
    "gpt2, split sequence": Model("gpt2", GPT2, SPLIT_SEQUENCE),
    "gpt-oss": Model("gpt_oss", EXPERTS),
    "gpt-oss, split sequence": Model("gpt_oss", EXPERTS, SPLIT_SEQUENCE),
    "bloom": Model("bloom", BLOOM),
    "opt": Model("opt", OPT),
    "opt, three heads": Model("opt", OPT | {"num_attention_heads": 3, "hidden_size": 24}),
    "falcon-h1": Model("falcon_h1", FALCON_H1),
    "whole logits": Model("llama", options={"vocabulary_parallel_loss": False}),
}
ON_FOUR_RANKS = {
    "fewer key/value heads than ranks": Model("qwen2"),
    "seven heads of one group": Model("qwen3", {"num_attention_heads": 7, "num_key_value_heads": 1}),
    "heads as in the smallest qwen2": Model("qwen2", {"num_attention_heads": 14, "hidden_size": 112}),
    "gpt-oss with fewer key/value heads": Model("gpt_oss", EXPERTS),
    "fewer key/value heads, split sequence": Model("llama", {"num_key_value_heads": 1}, SPLIT_SEQUENCE),
}


def make_config(model):
    config_class = type(transformers.AutoConfig.for_model(model.model_type))
    known = config_class().to_dict()
    config = config_class(**{name: it for name, it in (SIZES | model.sizes).items() if name in known})
    config._experts_implementation = "eager"  # grouped products know no float64
    return config


def make_model(model):
    """One process's, with biases and norms that are not all alike."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(make_config(model)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def loss_and_logits(model):
    """From whole logits, by torch."""
    with InFloat64():
        logits = model(input_ids=IDS, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()), logits.detach()


def own_loss(model):
    with InFloat64():
        return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def complete_gradients(model):
    """Name, parameter and gradient, as the optimizer will have it: partial ones are summed over the ranks."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            is_partial = getattr(parameter, "sequence_parallel_enabled", False)
            yield name, parameter, all_reduce(parameter.grad, get_group("tp")) if is_partial else parameter.grad


def split_results(tp, models):
    initialize_model_parallel(tensor_model_parallel_size=tp)
    results = {}
    for name, model in models.items():
        split = parallelize(make_model(model), **model.options)
        loss, logits = loss_and_logits(split)
        own = own_loss(split)
        own.backward()
        results[name] = {
            "loss": loss.detach(),
            "own loss": own.detach(),
            "logits": logits,
            "weights": logical_pieces((key, it, it) for key, it in split.named_parameters()),
            "gradients": logical_pieces(complete_gradients(split)),
            "state names": list(split.state_dict()),
        }
    return results


def assert_equal_to_one_process(models, ranks):
    for name, model in models.items():
        whole = make_model(model)
        loss, logits = loss_and_logits(whole)
        loss.backward()
        for rank in ranks:
            for key, expected in {"loss": loss.detach(), "own loss": loss.detach(), "logits": logits}.items():
                torch.testing.assert_close(rank[name][key], expected, msg=f"{name}: {key}", **EXACT)
            assert rank[name]["state names"] == list(whole.state_dict()), name
        weights = assemble_logical([rank[name]["weights"] for rank in ranks])
        gradients = assemble_logical([rank[name]["gradients"] for rank in ranks], rtol=1e-9)
        expected = {key: it for key, it in whole.named_parameters() if it.grad is not None}
        assert weights.keys() == dict(whole.named_parameters()).keys(), name
        assert gradients.keys() == expected.keys(), name
        for key, parameter in expected.items():
            assert torch.equal(weights[key], parameter.detach()), f"{name}: {key}"
            torch.testing.assert_close(gradients[key], parameter.grad, msg=f"{name}: {key}", **EXACT)


def test_models_on_two_ranks_equal_one_process(run_ranks):
    assert_equal_to_one_process(ON_TWO_RANKS, run_ranks(split_results, 2, 2, ON_TWO_RANKS, timeout=300))


def test_rank_with_heads_of_zeros_alone_equals_one_process_and_takes_initial_values(run_ranks):
    models = {"two groups of heads": Model("llama", {"attention_bias": True})}

    def job():
        results = split_results(3, models)
        assert all(parallelize(make_config(it)) for it in models.values())
        return results

    assert_equal_to_one_process(models, run_ranks(job, 3))


@pytest.mark.slow
def test_models_on_four_ranks_equal_one_process(run_ranks):
    assert_equal_to_one_process(ON_FOUR_RANKS, run_ranks(split_results, 4, 4, ON_FOUR_RANKS, timeout=300))


def test_split_model_generates_the_tokens_of_one_process(run_ranks):
    models = {
        "llama": Model("llama", options=SPLIT_SEQUENCE),
        "gemma2": Model("gemma2"),
        "mixtral": ON_TWO_RANKS["mixtral"],
    }

    def generate(model):
        return model.eval().generate(IDS[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)

    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        return {name: generate(parallelize(make_model(it), **it.options)) for name, it in models.items()}

    ranks = run_ranks(job, 2)

    for name, model in models.items():
        expected = generate(make_model(model))
        assert expected.shape == (2, 11)
        assert all(torch.equal(rank[name], expected) for rank in ranks), name


def test_ranks_draw_the_same_tokens_however_they_are_seeded(run_ranks):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        split = parallelize(make_model(Model("llama"))).eval()
        torch.manual_seed(100 + get_group("tp").rank)
        return split.generate(IDS[:, :5], max_new_tokens=6, do_sample=True, pad_token_id=0)

    first, second = run_ranks(job, 2)

    assert torch.equal(first, second)


def test_copies_of_a_split_model_know_what_is_a_part_and_what_is_partial(run_ranks):
    def gradients(model):
        own_loss(model).backward()
        return [(name, get_shard_spec(it), grad) for name, it, grad in complete_gradients(model)]

    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        split = parallelize(make_model(Model("gemma2", {"num_key_value_heads": 1})), sequence_parallel=True)
        copies = [copy.deepcopy(split), copy.deepcopy(copy.deepcopy(split)), pickle.loads(pickle.dumps(split))]
        expected = gradients(split)
        for copied in copies:
            for (name, spec, grad), (found_name, found_spec, found) in zip(expected, gradients(copied), strict=True):
                assert (name, spec) == (found_name, found_spec)
                assert torch.equal(grad, found), name

    run_ranks(job, 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_that_read_the_same_tensor_sum_its_gradient_once(run_ranks, sequence_parallel):
    model = Model("llama", {"num_key_value_heads": 1})  # with copied heads, whose gradients need messages of their own
    loss = 2 if Version(transformers.__version__) >= Version("5.21") else 1

    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        split = parallelize(make_model(model), sequence_parallel=sequence_parallel)
        with torch.profiler.profile() as profile:
            split(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return Counter(it.name.removeprefix("c10d::").rstrip("_") for it in profile.events() if "c10d::" in it.name)

    for counts in run_ranks(job, 2, env={"NXD_SHM": "0"}):  # shared memory is no operation of torch
        layers, copied = 2, 2
        ends = 1 + 1 + loss  # embedding, head backward
        if sequence_parallel:
            assert counts.pop("allreduce") == ends + copied * layers
            # Two blocks per layer: gathered and scattered, forward and backward; and the ends of the region.
            assert sum(counts.values()) == 2 * 2 * 2 * layers + 2
        else:
            assert counts == {"allreduce": ends + 2 * 2 * layers + copied * layers}


def test_hidden_states_of_split_sequences_are_refused_and_are_whole_in_evaluation(run_ranks):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        split = parallelize(make_model(Model("llama")), sequence_parallel=True)
        with pytest.raises(ValueError, match=r"output_hidden_states=True would return parts"):
            split(input_ids=IDS, output_hidden_states=True)
        with torch.no_grad():
            assert {it.shape for it in split(input_ids=IDS, output_hidden_states=True).hidden_states} == {(2, 8, 32)}

    run_ranks(job, 2)


def test_what_a_plan_leaves_out_is_put_right_without_a_head_as_well(run_ranks):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        base = parallelize(transformers.AutoModel.from_config(make_config(Model("apertus"))))
        partial = [it.sequence_parallel_enabled for name, it in base.named_parameters() if "act_fn" in name]
        assert partial == [True] * 4

    run_ranks(job, 2)


TRAINED = {name: Model(name, options=SPLIT_SEQUENCE) for name in ("llama", "qwen3", "gemma2")}


def trained_losses(model, is_split, *, with_adapters):
    """Eight steps of AdamW, in whatever the model is."""
    torch.manual_seed(7)
    made = make_model(model)
    if is_split:
        made = parallelize(made, **model.options)
    made.train()
    if with_adapters:
        made = LoraModel(made, LoraConfig(lora_rank=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]))
    optimizer = torch.optim.AdamW([it for it in made.parameters() if it.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = own_loss(made)
        loss.backward()
        if is_split:
            for _, parameter, grad in complete_gradients(made):
                parameter.grad = grad
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("with_adapters", [False, True])
def test_split_sequences_and_adapters_train_as_one_process_does(run_ranks, with_adapters):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        return {name: trained_losses(it, True, with_adapters=with_adapters) for name, it in TRAINED.items()}

    ranks = run_ranks(job, 2)

    for name, model in TRAINED.items():
        expected = trained_losses(model, False, with_adapters=with_adapters)
        assert expected[-1] < 0.9 * expected[0], name
        for rank in ranks:
            assert rank[name] == pytest.approx(expected, rel=1e-8), name


def test_adapters_of_layers_that_are_gathered_have_the_gradients_of_one_process(run_ranks):
    adapters = LoraConfig(lora_rank=4, target_modules=["o_proj", "down_proj", "qkv_proj"])

    def gradients(model):
        adapted = LoraModel(model, adapters)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.fill_(0.1)
        own_loss(adapted).backward()
        return adapted

    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        split = gradients(parallelize(make_model(Model("phi3", {"head_dim": None})), sequence_parallel=True))
        return logical_pieces(complete_gradients(split))

    found = assemble_logical(run_ranks(job, 2), rtol=1e-9)

    whole = gradients(make_model(Model("phi3", {"head_dim": None})))
    expected = {name: it.grad for name, it in whole.named_parameters() if it.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name, **EXACT)


def test_layers_computed_again_change_no_gradient(run_ranks):
    def gradients(model):
        model.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: it.grad for name, it in model.named_parameters()}

    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        for model in TRAINED.values():
            split = parallelize(make_model(model), **model.options).train()
            expected = gradients(split)
            split.generate(IDS[:, :3], max_new_tokens=2, do_sample=False)  # whole sequences in between
            apply_activation_checkpointing(split, "full")
            found = gradients(split)
            assert all(torch.equal(found[name], it) for name, it in expected.items())

    run_ranks(job, 2)


def test_model_of_a_config_has_the_weights_of_any_degree_and_no_whole_one_in_memory(run_ranks):
    names = ("llama", "gemma3", "mixtral", "one key/value head", "granite with sinks", "gpt2", "gpt-oss", "falcon-h1")
    models = {name: ON_TWO_RANKS[name] for name in names}

    def job(tp):
        initialize_model_parallel(tensor_model_parallel_size=tp)
        results = {}
        for name, model in models.items():
            torch.manual_seed(3)
            made = parallelize(make_config(model))
            assert made(input_ids=IDS, use_cache=False).logits.isfinite().all()
            results[name] = logical_pieces((key, it, it) for key, it in made.named_parameters())
        return results

    one, two = run_ranks(job, 1, 1), run_ranks(job, 2, 2)

    for name in models:
        expected = assemble_logical([rank[name] for rank in one])
        found = assemble_logical([rank[name] for rank in two])
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], it) for key, it in expected.items()), name
        assert all(it.std() > 0 for key, it in found.items() if key.endswith("proj.weight"))


@pytest.mark.parametrize("method", ["save_pretrained", "resize_token_embeddings"])
def test_method_that_would_take_a_part_for_the_whole_model_raises(run_ranks, method):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        with pytest.raises(RuntimeError, match=rf"{method}\(\) would take this rank's shard for the full model"):
            getattr(parallelize(make_model(Model("llama"))), method)("argument")

    run_ranks(job, 2)


def test_model_on_the_meta_device_stays_there(run_ranks):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        with torch.device("meta"):
            model = parallelize(transformers.AutoModelForCausalLM.from_config(make_config(ON_TWO_RANKS["mixtral"])))
        assert all(parameter.is_meta for parameter in model.parameters())
        return model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").shape[1]

    whole = 2 * make_config(ON_TWO_RANKS["mixtral"]).intermediate_size
    assert run_ranks(job, 2) == [whole // 2] * 2


@pytest.mark.slow
def test_pipeline_of_a_split_model_equals_one_process(run_ranks):
    models = {name: ON_TWO_RANKS[name] for name in ("llama, tied, odd vocabulary", "qwen3, split sequence", "mixtral")}

    def job():
        initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        results = {}
        for name, model in models.items():
            split = parallelize(make_model(model), **model.options)
            names = ["input_ids", "labels"]
            pipeline = NxDPPModel(split, num_microbatches=2, input_names=names, auto_partition=True)
            pipeline.train()
            with InFloat64():
                loss = pipeline.run_train(input_ids=IDS, labels=IDS)
            local = dict(pipeline.local_named_parameters())
            complete = {
                key: all_reduce(it.grad, get_group("tp"))
                if getattr(it, "sequence_parallel_enabled", False)
                else it.grad
                for key, it in local.items()
            }
            results[name] = loss, logical_pieces((key, it, complete[key]) for key, it in local.items())
        return results

    ranks = run_ranks(job, 4, timeout=300)

    for name, model in models.items():
        whole = make_model(model).train()
        loss = own_loss(whole)
        loss.backward()
        assert all(rank[name][0] is None for rank in ranks[:2])
        for rank in ranks[2:]:
            torch.testing.assert_close(rank[name][0], loss.detach(), msg=name, **EXACT)
        gradients = assemble_logical([rank[name][1] for rank in ranks], rtol=1e-9)
        for key, parameter in whole.named_parameters(remove_duplicate=False):
            if key in gradients:
                torch.testing.assert_close(gradients[key], parameter.grad, msg=f"{name}: {key}", **EXACT)
        assert {id(dict(whole.named_parameters(remove_duplicate=False))[key]) for key in gradients} == {
            id(it) for it in whole.parameters()
        }


@pytest.mark.parametrize("on_meta", [False, True])
def test_documented_call_splits_the_model_by_itself(run_ranks, on_meta):
    model = Model("qwen3")

    def job(tp):
        init = {"meta_device_init": on_meta, "param_init_fn": fill if on_meta else None}
        config = nxd.neuronx_distributed_config(
            tensor_parallel_size=tp, sequence_parallel=tp > 1, model_init_config=init
        )
        torch.manual_seed(3)
        made = nxd.initialize_parallel_model(config, transformers.AutoModelForCausalLM.from_config, make_config(model))
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, made.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            loss = made.run_train(input_ids=IDS, labels=IDS)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        rows = dict(made.named_parameters())["model.layers.0.mlp.up_proj.weight"].shape[0]
        destroy_model_parallel()
        return losses, rows

    def fill(module, device):
        assert device.type == "cpu"
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, std=0.2)

    ((expected, rows),) = run_ranks(job, 1, 1)
    for losses, rows_here in run_ranks(job, 2, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert rows_here == rows // 2


def test_documented_call_recomputes_layers_of_a_model_that_keeps_a_cache(run_ranks):
    def losses(recompute):
        config = nxd.neuronx_distributed_config(tensor_parallel_size=2, activation_checkpoint_config=recompute)
        made = nxd.initialize_parallel_model(config, lambda: make_model(Model("gemma2")).float())
        loss = made.run_train(input_ids=IDS, labels=IDS)
        destroy_model_parallel()
        return float(loss), [it.grad for it in made.parameters()]

    def job():
        (expected, expected_grads), (found, grads) = losses(None), losses("full")
        assert found == expected
        assert all(torch.equal(one, other) for one, other in zip(grads, expected_grads, strict=True))

    run_ranks(job, 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model("doge"), "models of type 'doge' are not split by their own plan: its plan splits the heads"),
        (
            Model("biogpt", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}),
            "BioGptForCausalLM has no tensor-parallel plan; give one",
        ),
        (Model("gpt2", GPT2 | {"n_head": 3, "n_embd": 24}), "c_attn .qkv_colwise.: .* does not divide 3 query"),
        (Model("bert", {"num_attention_heads": 3, "hidden_size": 24}), "without a rowwise layer of its own"),
        (Model("gpt_oss", EXPERTS | {"intermediate_size": 47}), "the 47 pairs of columns of .*gate_up_proj"),
        (Model("opt", OPT, SPLIT_SEQUENCE), "layers.0.fc1: its output stays sharded until another module"),
        (Model("bloom", BLOOM, SPLIT_SEQUENCE), "self_attention: it adds the residual itself"),
        (Model("olmo_hybrid", {}, SPLIT_SEQUENCE), "sequence_parallel=True is not supported for .*linear_attn"),
        (Model("llama", {"intermediate_size": 49}), "not divide the 49 outputs of .*mlp.gate_proj; use 1 or 7"),
        (
            Model("granite_swa", {"num_attention_heads": 3, "num_key_value_heads": 3}),
            "sinks .* cannot be padded to 4 heads",
        ),
        (Model("llama", options={"plan": {"model.layers.*.mlp.up_proj": "colwize"}}), "did you mean 'colwise'"),
        (Model("llama", options={"plan": {"model.layer.*.mlp": "colwise"}}), "matches no module or parameter"),
        (
            Model("qwen3", options={"plan": {"model.layers.*.self_attn.q_proj": "colwise"}}),
            "k_proj.weight is among the sharded heads",
        ),
    ],
)
def test_model_that_cannot_be_split_is_refused_with_the_reason(run_ranks, model, message):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        with pytest.raises(ValueError, match=message):
            parallelize(make_model(model), **model.options)

    run_ranks(job, 2)


AFTER_THE_LOSS = {"vocabulary_parallel_loss": "whole_logits"}
WITH_WHOLE_LOGITS = {
    "llama": Model("llama", options=AFTER_THE_LOSS),
    "tied, odd vocabulary": Model("llama", TIED | {"vocab_size": 63}, AFTER_THE_LOSS),
    "capped, split sequence": Model("gemma2", options=AFTER_THE_LOSS | SPLIT_SEQUENCE),
}


def loss_and_another_one(model, *, return_dict):
    """The model's own loss, one more of the logits that it returns with it, and these logits."""
    with InFloat64():
        output = model(input_ids=IDS, labels=IDS, use_cache=False, return_dict=return_dict)
    loss, logits = (output.loss, output.logits) if return_dict else output[:2]
    (loss + logits.softmax(-1).square().sum(-1).mean() + 0.1 * logits.logsumexp(-1).square().mean()).backward()
    return loss.detach(), logits.detach()


@pytest.mark.parametrize("return_dict", [True, False])
def test_whole_logits_after_a_loss_of_sharded_ones_and_gradients_of_both_equal_one_process(run_ranks, return_dict):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        results = {}
        for name, model in WITH_WHOLE_LOGITS.items():
            split = parallelize(make_model(model), **model.options)
            sizes = []
            own = split.loss_function
            split.loss_function = lambda logits, *args, own=own, sizes=sizes, **kwargs: (
                sizes.append(logits.shape[-1]) or own(logits, *args, **kwargs)
            )
            loss, logits = loss_and_another_one(split, return_dict=return_dict)
            assert sizes == [32]  # half of the vocabulary
            results[name] = loss, logits, logical_pieces(complete_gradients(split))
        return results

    ranks = run_ranks(job, 2)

    for name, model in WITH_WHOLE_LOGITS.items():
        whole = make_model(model)
        expected = loss_and_another_one(whole, return_dict=return_dict)
        for rank in ranks:
            torch.testing.assert_close(rank[name][:2], expected, **EXACT)
        gradients = assemble_logical([rank[name][2] for rank in ranks], rtol=1e-9)
        for key, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, msg=f"{name}: {key}", **EXACT)


def test_unknown_choice_of_logits_is_refused_and_a_failed_forward_raises_its_own_error(run_ranks):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        whole = make_model(Model("llama"))
        with pytest.raises(ValueError, match=r"unknown vocabulary_parallel_loss='whole'; use True, False or 'whole_lo"):
            parallelize(whole, vocabulary_parallel_loss="whole")
        split = parallelize(whole, vocabulary_parallel_loss="whole_logits")
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            split(labels=IDS)
        assert split(input_ids=IDS).logits.shape == split(input_ids=IDS, labels=IDS).logits.shape == (2, 8, 64)

    run_ranks(job, 2)
