"""Experts of transformers in fixed shapes: the numbers of their own way, on one process and over ranks."""

import pytest
import torch
from nxd_layers.hf import parallelize, use_static_shapes
from nxd_state import active_group, all_reduce, initialize_model_parallel, static_shapes
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="models are those of transformers: pip install transformers")

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "use_cache": False,
}
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4}),  # transposed, with biases
    "nemotron_h": (  # without gates
        "NemotronHConfig",
        {
            "layers_block_type": ["moe", "attention"],
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 12,
            "mlp_hidden_act": "relu2",
            "n_groups": 1,
            "mamba_num_heads": 2,
            "mamba_head_dim": 8,
        },
    ),
}


def make_model(name):
    config_class, further = MODELS[name]
    config = getattr(transformers, config_class)(**SIZES | further)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def step(model, rows):
    ids = (torch.arange(4 * 9).view(4, 9) * 7 % 41 + 2)[rows]
    logits = model(input_ids=ids).logits  # the model's own loss is in float32
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: it.grad for name, it in model.named_parameters() if it.grad is not None}


def ways_of(model):
    configs = (module.config for module in model.modules() if hasattr(module, "is_transposed"))
    return {config._experts_implementation for config in configs}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_in_fixed_shapes_are_those_of_the_models_own_way(name):
    loss, gradients = step(make_model(name), slice(None))
    model = make_model(name)

    with static_shapes():
        use_static_shapes(model)
        static_loss, static_gradients = step(model, slice(None))

    assert ways_of(model) == {"nxd_every_expert"}
    bound = 1e-7 if name == "nemotron_h" else 1e-12  # of which parts are in float32
    torch.testing.assert_close(static_loss, loss, rtol=0, atol=bound)
    torch.testing.assert_close(static_gradients, gradients, rtol=0, atol=bound)


def test_token_that_would_overflow_in_an_expert_of_others_stays_a_number_in_float16():
    model = make_model("mixtral").half()
    experts = next(it for it in model.modules() if hasattr(it, "is_transposed"))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.fill_(0.1)
            parameter[1] = 40.0
    tokens = torch.full((1, SIZES["hidden_size"]), 10.0, dtype=torch.float16, requires_grad=True)
    index, weights = torch.tensor([[0, 0]]), torch.tensor([[1.0, 0.0]], dtype=torch.float16)
    expected = experts(tokens, index, weights).detach()

    with static_shapes():
        use_static_shapes(model)
    found = experts(tokens, index, weights)
    found.sum().backward()

    torch.testing.assert_close(found.detach(), expected)
    assert tokens.grad.isfinite().all()


def test_models_keep_their_way_where_shapes_may_depend_on_values_or_another_is_named():
    model = make_model("mixtral")
    use_static_shapes(model)
    assert ways_of(model) == {"eager"}

    model.config._experts_implementation = "batched_mm"
    with static_shapes():
        use_static_shapes(model)
    assert ways_of(model) == {"batched_mm"}


def part_of_step(name):
    """This rank's loss and gradients, averaged over the ranks where they are not of its own experts."""
    initialize_model_parallel(1, 1, 2)
    group = active_group("ep")
    with static_shapes():
        model = parallelize(make_model(name), expert_parallel=True)
        loss, gradients = step(model, slice(group.rank * 2, group.rank * 2 + 2))
    assert ways_of(model) == {"nxd_every_expert"}
    own = {key: it for key, it in gradients.items() if ".experts." in key}
    others = {key: all_reduce(it, group) / 2 for key, it in gradients.items() if key not in own}
    return all_reduce(loss, group) / 2, {key: it / 2 for key, it in own.items()} | others


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_over_ranks_in_fixed_shapes_compute_the_step_of_one_process(run_ranks, name):
    loss, gradients = step(make_model(name), slice(None))

    parts = run_ranks(part_of_step, 2, name)

    for rank, (part_loss, part) in enumerate(parts):
        torch.testing.assert_close(part_loss, loss, rtol=1e-10, atol=0)
        for key, gradient in part.items():
            whole = gradients[key]
            expected = whole.chunk(2)[rank] if len(gradient) < len(whole) else whole
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("window", [None, 4])
def test_documents_of_a_row_are_kept_apart_without_a_look_at_positions(window):
    config = transformers.MistralConfig(**SIZES, sliding_window=window)
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).double()
    ids = (torch.arange(18).view(2, 9) * 7 % 41) + 2
    one, several = torch.arange(9).expand(2, -1), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [*range(8), 0]])
    expected = [model(input_ids=ids, position_ids=it).logits for it in (one, several)]

    with static_shapes():
        use_static_shapes(model)
        found = [model(input_ids=ids, position_ids=it).logits for it in (one, several)]
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda it: model(input_ids=it).logits)(ids)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not any("local_scalar_dense" in str(node.target) for node in traced.graph.nodes)
