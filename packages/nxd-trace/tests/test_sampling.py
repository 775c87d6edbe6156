"""Tokens are drawn with the probabilities that the settings say."""

import pytest
import torch
from nxd_trace.generation import SamplingSettings, choose_token, next_token_probabilities, penalized_logits

LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.1, 0.25, 0.15]),
        ({"temperature": 0.5}, [0.25, 0.01, 0.0625, 0.0225]),
        ({"temperature": 1.0, "top_k": 2}, [0.5, 0, 0.25, 0]),
        ({"temperature": 1.0, "top_k": 9}, [0.5, 0.1, 0.25, 0.15]),
        ({"temperature": 1.0, "top_p": 0.4}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.6}, [0.5, 0, 0.25, 0]),
        ({"temperature": 1.0, "top_p": 0.8}, [0.5, 0, 0.25, 0.15]),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),  # the first of two has 2/3
        ({"temperature": 1.0, "min_p": 0.4}, [0.5, 0, 0.25, 0]),
        ({"temperature": 1.0, "min_p": 1.0}, [1, 0, 0, 0]),
    ],
)
def test_probabilities_are_restricted_to_top_k_then_top_p(settings, expected):
    found = next_token_probabilities(LOGITS, SamplingSettings(**settings))

    torch.testing.assert_close(found, torch.tensor(expected).double() / sum(expected), rtol=1e-6, atol=1e-7)


def test_samples_have_these_probabilities():
    settings = SamplingSettings(temperature=1.0, top_k=3)
    generator = torch.Generator().manual_seed(0)

    counts = torch.bincount(torch.tensor([choose_token(LOGITS, settings, generator) for _ in range(4000)]))

    torch.testing.assert_close(counts / 4000, next_token_probabilities(LOGITS, settings).float(), atol=0.03, rtol=0)


def test_temperature_0_takes_the_most_likely_token():
    assert choose_token(LOGITS, SamplingSettings(), torch.Generator()) == 0


@pytest.mark.parametrize("settings", [{"temperature": 5e-324}, {"temperature": 1.0, "top_p": 5e-324}])
def test_the_smallest_float_settings_take_the_most_likely_token(settings):
    assert choose_token(LOGITS, SamplingSettings(**settings), torch.Generator()) == 0


def test_the_highest_temperature_draws_no_token_that_the_model_rules_out():
    probabilities = next_token_probabilities(torch.tensor([1.0, -torch.inf]), SamplingSettings(temperature=1e308))

    assert probabilities.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_logits_are_refused(value):
    with pytest.raises(FloatingPointError, match=f"the largest of the model's logits is {value}"):
        choose_token(torch.tensor([0.0, value]), SamplingSettings(), torch.Generator())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"repetition_penalty": 2.0}, [0.5, -2.0, 1.0, 4.0]),  # of the prompt and of what is written
        ({"presence_penalty": 1.5}, [1.0, -1.0, 0.5, 4.0]),
        ({"frequency_penalty": 1.5}, [1.0, -1.0, -1.0, 4.0]),
        ({"logit_bias": ((3, -5.0), (0, 1.0))}, [2.0, -1.0, 2.0, -1.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": ((2, 9.0),)}, [0.5, -2.0, 9.0, 4.0]),
    ],
)
def test_penalties_and_biases_change_the_logits(settings, expected):
    logits = torch.tensor([1.0, -1.0, 2.0, 4.0])

    found = penalized_logits(logits, SamplingSettings(**settings), prompt=[0, 1], written=[2, 2])

    assert found.tolist() == expected
    assert logits.tolist() == [1.0, -1.0, 2.0, 4.0]


def test_settings_outside_their_range_are_all_named():
    with pytest.raises(ValueError, match=r"max_new_tokens=0 must be .*1 or more; temperature=-1.*top_k=-2.*top_p=1.5"):
        SamplingSettings(max_new_tokens=0, temperature=-1.0, top_k=-2, top_p=1.5)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_new_tokens": 2.5},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"stop_tokens": 3},
        {"stop_tokens": "a"},
        {"seed": 2**63},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": "much"},
        {"num_logprobs": -1},
    ],
)
def test_settings_of_other_types_are_named(setting):
    ((name, _),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}=.* must be"):
        SamplingSettings(**setting)


def test_prompts_have_seeds_of_their_own_beyond_the_largest_too():
    assert [SamplingSettings(seed=2**63 - 1).for_prompt(index).seed for index in (0, 1)] == [2**63 - 1, -(2**63)]
