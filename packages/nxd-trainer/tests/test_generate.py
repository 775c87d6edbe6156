"""Choosing tokens: greedy, sampled, stopped."""

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_trainer.generate import generate


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config, dtype=torch.float64)


PROMPT = torch.tensor([3, 1, 4])


def test_generate_greedy_takes_the_likeliest_token_each_time(model):
    found = list(generate(model, PROMPT, max_new_tokens=6, temperature=0))

    tokens = PROMPT.tolist()
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert found == tokens[3:]


def test_generate_same_seed_gives_the_same_tokens(model):
    first, again, other = (list(generate(model, PROMPT, max_new_tokens=12, seed=seed)) for seed in (1, 1, 2))

    assert first == again != other


def test_generate_top_1_is_greedy(model):
    greedy = list(generate(model, PROMPT, max_new_tokens=6, temperature=0))

    assert list(generate(model, PROMPT, max_new_tokens=6, temperature=5.0, top_k=1)) == greedy


def test_generate_near_temperature_0_is_greedy(model):
    greedy = list(generate(model, PROMPT, max_new_tokens=6, temperature=0))

    assert list(generate(model, PROMPT, max_new_tokens=6, temperature=1e-4)) == greedy


def test_generate_top_k_draws_each_of_the_k_likeliest_tokens_and_no_other(model):
    likeliest = model(PROMPT.unsqueeze(0))[0, -1].topk(3).indices

    drawn = [list(generate(model, PROMPT, max_new_tokens=1, temperature=9.0, top_k=3, seed=s)) for s in range(40)]

    assert {token for [token] in drawn} == set(likeliest.tolist())


def test_generate_ends_after_the_end_token(model):
    greedy = list(generate(model, PROMPT, max_new_tokens=6, temperature=0))

    found = list(generate(model, PROMPT, max_new_tokens=6, temperature=0, end_token=greedy[2]))

    assert found == greedy[: greedy.index(greedy[2]) + 1]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (torch.tensor([], dtype=torch.int64), {}, "the prompt is empty"),
        (PROMPT, {"temperature": -1.0}, "temperature=-1.0"),
        (PROMPT, {"temperature": float("nan")}, "temperature=nan"),
        (PROMPT, {"top_k": -1}, "top_k=-1"),
        (PROMPT, {"max_new_tokens": 5000}, r"more than the model's 4096 positions .* use max_new_tokens=4093 "),
        (torch.ones(4096, dtype=torch.int64), {}, "4096 prompt tokens plus 1 new ones .* give a shorter prompt"),
    ],
)
def test_generate_bad_arguments_are_named(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        next(generate(model, prompt, **{"max_new_tokens": 1} | options))
