"""`generate` of a transformers model whose parameters are sharded over the replicas (ZeRO-3)."""

import pytest
import torch
from nxd_optim import fully_shard
from nxd_state import active_group, initialize_model_parallel

transformers = pytest.importorskip("transformers", reason="the models are of transformers: pip install transformers")

VOCABULARY, NEW = 24, 8


def make_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


PROMPTS = [[[5, 6, 7]], [[8, 9]]]


@pytest.mark.parametrize("beams", [1, 2])
def test_replicas_that_stop_at_different_lengths_generate_what_one_process_does(run_ranks, beams):
    model = make_model()

    def tokens_of(prompt, **arguments):
        return model.generate(
            torch.tensor(prompt), do_sample=False, num_beams=beams, max_new_tokens=NEW, **arguments
        ).tolist()

    # The first prompt ends at its second token, so that its replica would leave the other one alone.
    end = tokens_of(PROMPTS[0])[0][len(PROMPTS[0][0]) + 1]
    expected = [tokens_of(prompt, eos_token_id=end) for prompt in PROMPTS]
    lengths = [len(found[0]) - len(prompt[0]) for found, prompt in zip(expected, PROMPTS, strict=True)]
    assert lengths[0] != lengths[1]

    def generate():
        nonlocal model
        initialize_model_parallel()
        model = make_model()
        fully_shard([model], model.model.layers)
        return tokens_of(PROMPTS[active_group("dp").rank], eos_token_id=end)

    assert run_ranks(generate, 2) == expected
