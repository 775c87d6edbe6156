"""Chooses the next token from logits: penalties, then the most likely token or a sample."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's log-probabilities at one token, before temperature and penalties.

    Attributes:
        token: token id.
        logprob: natural log of the token's probability; None for a prompt's first token.
        top: the most likely tokens with their log-probabilities, in descending order.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, token: int, logits: Tensor, num_top: int) -> Self:
        """Compute them from `[vocab]` logits."""
        logprobs = logits.double().log_softmax(0)
        values, tokens = logprobs.topk(min(num_top, logprobs.numel()))
        return cls(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


@dataclass(frozen=True)
class SamplingSettings:
    """How a prompt is continued.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        temperature: sampling temperature; 0 takes the most likely token.
        top_k: number of most likely tokens to sample from; 0 for all.
        top_p: sample from the smallest set of most likely tokens with this total probability (Holtzman et al. 2020);
            0 keeps only the most likely token.
        min_p: minimum probability of a sampled token, as a fraction of the most likely token's (Nguyen et al. 2024).
        repetition_penalty: divisor of positive logits, and factor of negative logits, of tokens in the prompt or the
            new text (Keskar et al. 2019), from 0.01 to 100; 1 for none.
        presence_penalty: value subtracted from the logit of each token in the new text, from -2 to 2.
        frequency_penalty: value subtracted once per occurrence of the token in the new text, from -2 to 2.
        logit_bias: pairs of a token and the value added to its logit.
        stop_tokens: tokens that end the text.
        min_new_tokens: number of new tokens before which stop tokens are not chosen.
        seed: random seed, from -2**63 to 2**63 - 1; samples do not depend on the rest of the batch.
        num_logprobs: number of most likely tokens to return log-probabilities of, besides each new token's own; None
            for no log-probabilities.
        prompt_logprobs: whether to return log-probabilities of the prompt's tokens, which are then processed one by
            one.

    Raises:
        ValueError: a setting is out of range or has the wrong type.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    seed: int = 0
    num_logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        mistakes = [
            f"{name}={getattr(self, name)!r} must be {expected}"
            for name, expected, holds in (
                ("max_new_tokens", "an integer, 1 or more", _is_whole(self.max_new_tokens, 1)),
                ("temperature", "0 or more, and finite", _is_within(self.temperature, 0, float("inf"))),
                ("top_k", "an integer, 0 (all tokens) or more", _is_whole(self.top_k, 0)),
                ("top_p", "from 0 to 1", _is_within(self.top_p, 0, 1)),
                ("min_p", "from 0 to 1", _is_within(self.min_p, 0, 1)),
                ("repetition_penalty", "from 0.01 to 100", _is_within(self.repetition_penalty, 0.01, 100)),
                ("presence_penalty", "from -2 to 2", _is_within(self.presence_penalty, -2, 2)),
                ("frequency_penalty", "from -2 to 2", _is_within(self.frequency_penalty, -2, 2)),
                (
                    "stop_tokens",
                    "a tuple of token ids",
                    isinstance(self.stop_tokens, Iterable) and all(_is_whole(token, 0) for token in self.stop_tokens),
                ),
                (
                    "min_new_tokens",
                    f"an integer from 0 to max_new_tokens={self.max_new_tokens!r}",
                    _is_whole(self.min_new_tokens, 0)
                    and not (_is_whole(self.max_new_tokens, 1) and self.min_new_tokens > self.max_new_tokens),
                ),
                ("seed", "an integer from -2**63 to 2**63 - 1", _is_whole(self.seed, -(2**63), 2**63)),
                (
                    "num_logprobs",
                    "an integer, 0 or more, or None",
                    self.num_logprobs is None or _is_whole(self.num_logprobs, 0),
                ),
            )
            if not holds
        ]
        if mistakes:
            raise ValueError("; ".join(mistakes))

    @property
    def changes_logits(self) -> bool:
        """Whether there are penalties, biases, or a minimum number of tokens."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or self.min_new_tokens > 0 or any(penalties)

    def for_prompt(self, index: int) -> Self:
        """Return the settings of one prompt of several, whose seed is `seed + index`, modulo 2**64."""
        return replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)


def _is_whole(value: Any, least: int, end: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def _is_within(value: Any, least: float, most: float) -> bool:
    try:
        is_finite = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
    return is_finite and least <= value <= most


def choose_token(
    logits: Tensor,
    settings: SamplingSettings,
    generator: torch.Generator,
    *,
    prompt: Sequence[int] = (),
    written: Sequence[int] = (),
) -> int:
    """Return the next token.

    Args:
        logits: `[vocab]`, on the CPU.
        settings: sampling settings.
        generator: random generator, used only with a temperature.
        prompt: tokens of the prompt, for penalties.
        written: tokens after the prompt, for penalties.

    Raises:
        FloatingPointError: the largest logit is infinite, or a logit is NaN.
    """
    largest = float(logits.max())
    if not isfinite(largest):
        raise FloatingPointError(
            f"the largest of the model's logits is {largest}; check its weights, or use a wider dtype"
        )
    if settings.changes_logits:
        logits = penalized_logits(logits, settings, prompt, written)
    if settings.temperature == 0:
        return int(logits.argmax())
    probabilities = next_token_probabilities(logits, settings)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def penalized_logits(
    logits: Tensor, settings: SamplingSettings, prompt: Sequence[int], written: Sequence[int]
) -> Tensor:
    """Return the logits with the repetition penalty, the presence and frequency penalties, and the bias, in this order.

    Stop tokens get minus infinity while there are fewer than `min_new_tokens`.

    Args:
        logits: `[vocab]`.
        settings: sampling settings.
        prompt: tokens of the prompt; they count only for the repetition penalty.
        written: tokens after the prompt.

    Returns:
        float64 `[vocab]`.
    """
    changed = logits.double()
    vocab = changed.numel()
    counts = torch.bincount(torch.tensor(written, dtype=torch.long), minlength=vocab)
    seen = (counts + torch.bincount(torch.tensor(prompt, dtype=torch.long), minlength=vocab)) > 0
    factor = settings.repetition_penalty
    changed = torch.where(seen, torch.where(changed > 0, changed / factor, changed * factor), changed)
    changed = changed - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)
    for token, bias in settings.logit_bias:
        changed[token] += bias
    if len(written) < settings.min_new_tokens:
        changed[[token for token in settings.stop_tokens if token < vocab]] = -torch.inf
    return changed


def next_token_probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Return each token's probability after temperature, top-k, top-p and min-p, in this order.

    Args:
        logits: `[vocab]`.
        settings: sampling settings with a temperature above 0.

    Returns:
        float64 `[vocab]`; zeros for excluded tokens. The most likely token is never excluded.
    """
    scores = logits.double()  # so that every Python float works as a temperature or top_p
    scores = (scores - scores.max()) / float(settings.temperature)  # torch refuses integers above 2**63
    if 0 < settings.top_k < scores.numel():
        kept = scores.topk(settings.top_k)
        scores = torch.full_like(scores, -torch.inf).scatter(0, kept.indices, kept.values)
    probabilities = scores.softmax(0)
    if settings.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # total probability of the more likely tokens
        before[0] = -1  # keeps the most likely token, even with top_p=0
        probabilities[tokens[before >= settings.top_p]] = 0
        probabilities /= probabilities.sum()
    if settings.min_p > 0:
        probabilities[probabilities < settings.min_p * probabilities.max()] = 0
        probabilities /= probabilities.sum()
    return probabilities
