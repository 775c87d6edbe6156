"""Losses of routers and loads of experts over a global batch, at all layouts, against one process with all of it."""

import pytest
import torch
from nxd_engine import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from nxd_layers.experts import BalanceConfig, RouterBalance
from nxd_layers.hf import find_routers
from nxd_parity import InFloat64
from nxd_state import (
    all_gather_object,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_world_group,
)
from nxd_testing import assemble_logical, logical_pieces

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

LAYERS, EXPERTS, TOP_K = 2, 4, 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.4,
    "use_cache": False,
}
IDS = torch.arange(8 * 6).view(8, 6) ** 2 % 61 + 2  # sequences that choose other experts
# Padding before and behind tokens; in one row there is none, and rows of a microbatch have other lengths.
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]]).repeat(2, 1)
MASK[7] = torch.tensor([1, 1, 1, 1, 1, 0])
LABELS = torch.full_like(IDS, -100).index_copy(1, torch.tensor([3]), IDS[:, 3:4])  # as many in all microbatches
PADDED = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
WHOLE = {"input_ids": IDS, "labels": IDS}
LEARNING_RATE = 0.5
EXACT = {"rtol": 1e-10, "atol": 1e-12}

GLOBAL = BalanceConfig(aux_loss_coef=0.7, z_loss_coef=0.1)
SEQUENCE = BalanceConfig(aux_loss_coef=0.7, aux_loss_scope="sequence")


def make_mixtral():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS, output_router_logits=False)
    config._experts_implementation = "eager"  # grouped products know no float64
    return transformers.MixtralForCausalLM(config).double()


def make_deepseek():
    further = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2}
    heads = {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
    config = transformers.DeepseekV3Config(**SIZES | further | heads, topk_group=1, first_k_dense_replace=0)
    config._experts_implementation = "eager"
    return transformers.DeepseekV3ForCausalLM(config).double()


def router_losses(logits, config, mask=MASK):
    """The losses of `[sequences, length, experts]` logits of each layer, as their papers write them."""
    sequences = [one[is_token] for layer in logits for one, is_token in zip(layer, mask.bool(), strict=True)]
    all_logits = torch.cat(sequences)
    losses = config.z_loss_coef * all_logits.logsumexp(-1).square().mean()
    parts = [all_logits] if config.aux_loss_scope == "global" else sequences
    auxiliary = []
    for part in parts:
        probabilities = part.softmax(-1)
        shares = torch.zeros_like(part).scatter(1, part.topk(TOP_K).indices, 1.0).mean(0)
        auxiliary.append(EXPERTS * (shares * probabilities.mean(0)).sum())
    return losses + config.aux_loss_coef * torch.stack(auxiliary).mean()


def one_process(make, config):
    """Loss and weights after a step on the whole batch, and how many tokens each expert had."""
    torch.manual_seed(0)
    model = make()
    logits, tokens = [], torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)

    def record(module, args, output):
        tokens[len(logits)] += output[2][MASK.flatten().bool()].flatten().bincount(minlength=EXPERTS)
        logits.append(output[0].view(*IDS.shape, EXPERTS))

    for name in find_routers(model):
        model.get_submodule(name).register_forward_hook(record)
    with InFloat64():
        loss = model(**PADDED).loss + router_losses(logits, config)
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(LEARNING_RATE * parameter.grad)
    return loss.detach(), dict(model.named_parameters()), tokens


def balanced_model(layout, make, config):
    nxd_config = neuronx_distributed_config(
        **layout, optimizer_config={"grad_clipping": False, "zero_one_enabled": False}
    )
    routers = {}

    def make_and_look():
        module = make()
        routers.update(find_routers(module))
        return module

    torch.manual_seed(0)
    model = initialize_parallel_model(nxd_config, make_and_look)
    model.balance_experts(config, routers)
    return model, initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=LEARNING_RATE)


def step(model, optimizer, batch=WHOLE):
    own = {name: it.chunk(get_data_parallel_size())[get_data_parallel_rank()] for name, it in batch.items()}
    with InFloat64():
        loss = model.run_train(**own)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def one_rank(layout, make, config, batch=PADDED):
    model, optimizer = balanced_model(layout, make, config)
    loss = step(model, optimizer, batch)
    losses = [it for it in all_gather_object(loss, get_world_group()) if it is not None]
    named = [(name, parameter, parameter.detach()) for name, parameter in model.named_parameters()]
    tokens = model.router_balance.statistics.tokens_per_expert
    return torch.stack(losses).mean(), logical_pieces(named), tokens.to(torch.int64)


def pipeline(num_microbatches, *, stages=1):
    further = {"pipeline_parallel_size": stages} if stages > 1 else {}
    config = {"num_microbatches": num_microbatches, "input_names": ["input_ids", "attention_mask", "labels"]}
    return further | {"pipeline_config": config | ({"auto_partition": True} if stages > 1 else {})}


EP2 = {"expert_parallel_size": 2}
LAYOUTS = {
    "DP 2, 2 microbatches": (2, pipeline(2)),
    "EP 2": (2, EP2),
    "EP 2 over TP 2, split sequence": (
        2,
        EP2 | {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
    ),
    "CP 2": (2, {"context_parallel_size": 2}),  # whose chunks of 2 positions are filled up
    "PP 2": (2, pipeline(2, stages=2)),
    "CP 2 x PP 2": (4, {"context_parallel_size": 2} | pipeline(2, stages=2)),
    "EP 2 x PP 2, recomputed": (4, EP2 | {"activation_checkpoint_config": "full"} | pipeline(2, stages=2)),
    "EP 2 x TP 2": (4, EP2 | {"tensor_parallel_size": 2} | pipeline(2)),
    "EP 2 x TP 2 x PP 2": (8, EP2 | {"tensor_parallel_size": 2} | pipeline(2, stages=2)),
}
QUICK = ("DP 2, 2 microbatches", "CP 2", "PP 2")


@pytest.mark.sample(3)
@pytest.mark.parametrize("config", [GLOBAL, SEQUENCE], ids=["global", "sequence"])
@pytest.mark.parametrize("layout", [it if it in QUICK else pytest.param(it, marks=pytest.mark.slow) for it in LAYOUTS])
def test_router_losses_and_their_gradients_are_those_of_one_process_with_the_global_batch(run_ranks, layout, config):
    ranks, nxd_config = LAYOUTS[layout]
    expected, weights, tokens = one_process(make_mixtral, config)

    found = run_ranks(one_rank, ranks, nxd_config, make_mixtral, config, timeout=300)

    for loss, _, counted in found:
        torch.testing.assert_close(loss, expected, **EXACT)
        assert torch.equal(counted, tokens)
    updated = assemble_logical([pieces for _, pieces, _ in found])
    for name, weight in weights.items():
        torch.testing.assert_close(updated[name], weight.detach(), **EXACT)


def test_auxiliary_loss_is_not_the_mean_of_the_ranks_own(run_ranks):
    """The bug of averaging over the wrong group: shares and probabilities are means, their product is none."""
    config = BalanceConfig(aux_loss_coef=0.7)
    of_parts, logits = [], []
    torch.manual_seed(0)
    model = make_mixtral()
    for name in find_routers(model):
        model.get_submodule(name).register_forward_hook(lambda *given: logits.append(given[2][0].view(-1, 6, EXPERTS)))
    for part in IDS.chunk(4):
        logits.clear()
        with torch.no_grad(), InFloat64():
            of_parts.append(model(input_ids=part, labels=part).loss + router_losses(logits, config, torch.ones(2, 6)))

    logits.clear()
    with torch.no_grad(), InFloat64():
        expected = model(**WHOLE).loss + router_losses(logits, config, IDS > 0)

    assert abs(torch.stack(of_parts).mean() - expected) > 1e-4, "routers are too even for this test"
    layout = EP2 | {"pipeline_config": {"num_microbatches": 2}}
    for loss, *_ in run_ranks(one_rank, 2, layout, make_mixtral, config, WHOLE):
        torch.testing.assert_close(loss, expected, **EXACT)


def loss_with_padding_on_rank_0_only():
    """The mean of the ranks' losses, where rank 1 passes no mask."""
    model, _ = balanced_model({}, make_mixtral, GLOBAL)
    own = {name: it.chunk(2)[get_data_parallel_rank()] for name, it in PADDED.items()}
    if get_data_parallel_rank() == 1:
        del own["attention_mask"]
    with InFloat64():
        loss = model.run_train(**own)
    return torch.stack(all_gather_object(loss, get_world_group())).mean()


def test_all_tokens_of_a_replica_without_a_mask_count(run_ranks):
    mask = torch.cat([MASK[:4], torch.ones_like(MASK[4:])])
    torch.manual_seed(0)
    model, logits = make_mixtral(), []
    for name in find_routers(model):
        model.get_submodule(name).register_forward_hook(lambda *given: logits.append(given[2][0].view(8, 6, EXPERTS)))
    with torch.no_grad(), InFloat64():
        expected = model(**PADDED | {"attention_mask": mask}).loss + router_losses(logits, GLOBAL, mask)

    for loss in run_ranks(loss_with_padding_on_rank_0_only, 2):
        torch.testing.assert_close(loss, expected, **EXACT)


def test_auxiliary_loss_is_that_which_transformers_computes(run_ranks):
    config = BalanceConfig(aux_loss_coef=0.7)
    torch.manual_seed(0)
    model = make_mixtral()
    model.router_aux_loss_coef = config.aux_loss_coef
    with torch.no_grad(), InFloat64():
        expected = model(**PADDED, output_router_logits=True).loss

    for loss, *_ in run_ranks(one_rank, 2, EP2, make_mixtral, config):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # transformers adds up in float32


RATE = 0.03


def biases_after_steps(layout):
    model, optimizer = balanced_model(layout, make_deepseek, BalanceConfig(bias_update_rate=RATE))
    for _ in range(3):
        step(model, optimizer)
        model.router_balance.update_biases()
    return {name: it.clone() for name, it in model.named_buffers() if name.endswith("e_score_correction_bias")}


def biases_of_one_process():
    torch.manual_seed(0)
    model = make_deepseek()
    routers = [model.get_submodule(name) for name in find_routers(model)]
    tokens = {}
    for router in routers:
        router.register_forward_hook(
            lambda it, _, output: tokens.update({it: output[2].flatten().bincount(minlength=4)})
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(3):
        optimizer.zero_grad()
        with InFloat64():
            model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        for router in routers:
            counts = tokens[router].double()
            router.e_score_correction_bias += RATE * (counts.mean() - counts).sign()
    return {name: it for name, it in model.named_buffers() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("layout", ["EP 2", pytest.param("EP 2 x PP 2, recomputed", marks=pytest.mark.slow)])
def test_biases_follow_the_loads_of_the_global_batch_alike_on_all_ranks(run_ranks, layout):
    ranks, nxd_config = LAYOUTS[layout]
    expected = biases_of_one_process()
    assert any(bias.any() for bias in expected.values())

    found = {}
    for biases in run_ranks(biases_after_steps, ranks, nxd_config, timeout=300):
        for name, bias in biases.items():
            torch.testing.assert_close(bias, expected[name], rtol=0, atol=1e-15)
            found[name] = bias
    assert found.keys() == expected.keys()


def test_what_the_routers_cannot_do_is_refused(run_ranks):
    def job():
        with pytest.raises(ValueError, match=r"bias_update_rate=0.1 needs routers with an e_score_corr"):
            balanced_model({}, make_mixtral, BalanceConfig(bias_update_rate=0.1))
        llama = transformers.LlamaConfig(**{name: it for name, it in SIZES.items() if "expert" not in name})
        with pytest.raises(ValueError, match=r"aux_loss_coef=0.1, z_loss_coef=0.2 needs a model with supported"):
            balanced_model(
                {}, lambda: transformers.LlamaForCausalLM(llama), BalanceConfig(aux_loss_coef=0.1, z_loss_coef=0.2)
            )

    run_ranks(job, 1)


def test_tokens_of_a_router_with_a_class_for_no_expert_are_counted():
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 8, "moe_intermediate_size": 16}
    config = transformers.AutoConfig.for_model("zaya", **sizes, **experts, num_key_value_heads=2, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    routers = find_routers(model)
    balance = RouterBalance(dict(model.named_modules()), routers, BalanceConfig())

    ids = torch.arange(20).view(2, 10)
    balance.train(lambda: model(input_ids=ids), count=None, num_microbatches=1, num_sequences=2)

    assert [it.num_experts for it in routers.values()] == [5, 5]
    assert balance.statistics.tokens_per_expert.sum(dim=1).tolist() == [20, 20]
