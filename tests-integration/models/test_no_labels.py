"""A batch without labels has a loss of 0 and gradients of 0, at every layout."""

import pytest
import torch
import transformers
from nxd_engine import initialize_parallel_model, neuronx_distributed_config
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_pipeline import NxDPPModel
from nxd_state import initialize_model_parallel

SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def ours():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def of_transformers():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def losses(make, degrees):
    initialize_model_parallel(degrees.get("tp", 1), degrees.get("pp", 1), context_parallel_size=degrees.get("cp", 1))
    pipeline = {"input_names": ["input_ids", "labels"], "broadcast_and_average_loss": True, "auto_partition": True}
    config = neuronx_distributed_config(
        tensor_parallel_size=degrees.get("tp", 1),
        pipeline_parallel_size=degrees.get("pp", 1),
        context_parallel_size=degrees.get("cp", 1),
        pipeline_config=pipeline | ({"transformer_layer_cls": LlamaDecoderLayer} if make is ours else {}),
    )
    torch.manual_seed(0)
    model = initialize_parallel_model(config, make)
    ids = torch.arange(8).view(1, 8)
    none = torch.full_like(ids, -100)
    found = [float(model.run_train(input_ids=ids, labels=none))]
    assert all(it.grad is None or not it.grad.any() for it in model.parameters())
    found.append(float(model.run_train(input_ids=ids, labels=torch.where(ids < 4, ids, none))))
    return found


def losses_of_a_bare_pipeline(pp):
    initialize_model_parallel(pipeline_model_parallel_size=pp)
    torch.manual_seed(0)
    model = NxDPPModel(of_transformers(), num_microbatches=2, auto_partition=True, broadcast_and_average_loss=True)
    ids = torch.arange(16).view(2, 8)
    none = torch.full_like(ids, -100)
    found = [float(model.run_train(input_ids=ids, labels=none))]
    assert all(it.grad is None or not it.grad.any() for it in model.parameters())
    one_microbatch = torch.where(ids < 8, ids, none)
    return [*found, float(model.run_train(input_ids=ids, labels=one_microbatch))]


@pytest.mark.parametrize("pp", [1, 2])
def test_loss_without_labels_is_zero_in_a_bare_pipeline(run_ranks, pp):
    torch.manual_seed(0)
    ids = torch.arange(8).view(1, 8)
    of_one_microbatch = of_transformers()(input_ids=ids, labels=ids).loss.item()

    for found in run_ranks(losses_of_a_bare_pipeline, pp, pp):
        assert found == [0.0, pytest.approx(of_one_microbatch / 2, rel=1e-5)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", [ours, of_transformers])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_loss_without_labels_is_zero_at_every_layout(run_ranks, make, degrees):
    (expected,) = run_ranks(losses, 1, make, {})
    for found in run_ranks(losses, 2 if degrees else 1, make, degrees):
        assert found[0] == 0.0
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
