"""Dropout in split models of transformers: masks of heads are independent, masks of what is whole are the same."""

import pytest
import torch
from nxd_layers.hf import parallelize
from nxd_state import initialize_model_parallel

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

IDS = torch.arange(1, 17).view(2, 8)
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "n_positions": 16},
    "bloom": {"attention_dropout": 0.5, "hidden_dropout": 0.3},
    "opt": {"attention_dropout": 0.5, "dropout": 0.3, "ffn_dim": 32, "word_embed_proj_dim": 16},
}


def dropped(model_type):
    """Masks of the heads here, logits, and gradients with and without checkpointing of transformers' own."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **CONFIGS[model_type], attn_implementation="eager")
    model = parallelize(transformers.AutoModelForCausalLM.from_config(config)).train()
    torch.manual_seed(1)
    output = model(IDS, output_attentions=True)
    masks = [it == 0 for it in output.attentions[1].transpose(0, 1)]
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(1)
        model(IDS, use_cache=False).logits.square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    same = all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    return masks, output.logits.detach(), torch.rand(3), same


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_heads_of_all_ranks_have_masks_of_their_own_and_whole_activations_one(run_ranks, model_type):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        return dropped(model_type)

    first, second = run_ranks(job, 2)

    masks = [*first[0], *second[0]]
    assert len(masks) == 4
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    torch.testing.assert_close(first[1], second[1])
    assert torch.equal(first[2], second[2])
    assert first[3]
    assert second[3]


def test_bloom_that_multiplies_slices_of_weights_is_refused(run_ranks):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        config = transformers.BloomConfig(**SIZES, pretraining_tp=2, slow_but_exact=True)
        with pytest.raises(ValueError, match=r"set config\.slow_but_exact=False before the model is built"):
            parallelize(transformers.BloomForCausalLM(config))

    run_ranks(job, 2)
