"""Choosing the next token from logits: penalties, then the likeliest, or a draw by temperature, top k, top p, min p."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model found a token, before temperature and penalties.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability; None of a prompt's first token.
        top: the likeliest tokens and theirs, the likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, token: int, logits: Tensor, num_top: int) -> Self:
        """Of `[vocab]` logits."""
        logprobs = logits.double().log_softmax(0)
        values, tokens = logprobs.topk(min(num_top, logprobs.numel()))
        return cls(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


@dataclass(frozen=True)
class SamplingSettings:
    """How one prompt is continued.

    Attributes:
        max_new_tokens: stop after this many.
        temperature: 0 takes the likeliest token; higher is bolder.
        top_k: draw from the k likeliest tokens; 0 for all.
        top_p: draw from the fewest likeliest tokens that have this probability together (Holtzman et al. 2020); 0
            leaves the likeliest token alone.
        min_p: draw from tokens that have at least this part of the likeliest one's probability (Nguyen et al. 2024).
        repetition_penalty: divides the positive logits of tokens in the prompt or written, and multiplies the negative
            ones (Keskar et al. 2019), from 0.01 to 100; 1 changes nothing.
        presence_penalty: is taken off the logit of each token that has been written, from -2 to 2.
        frequency_penalty: is taken off as often as the token has been written, from -2 to 2.
        logit_bias: pairs of a token and what is added to its logit.
        stop_tokens: stop after one of these.
        min_new_tokens: stop tokens are not chosen before this many others.
        seed: random seed; samples do not depend on the rest of the batch; from -2**63 to 2**63 - 1.
        num_logprobs: give the log-probability of each written token and this many of the likeliest; None gives none.
        prompt_logprobs: give them for the prompt's tokens, too, which are then fed one by one.

    Raises:
        ValueError: a setting outside its range, or of another type.
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
                ("max_new_tokens", "a whole number, 1 or more", _is_whole(self.max_new_tokens, 1)),
                ("temperature", "0 or more, and finite", _is_within(self.temperature, 0, float("inf"))),
                ("top_k", "a whole number, 0 (all tokens) or more", _is_whole(self.top_k, 0)),
                ("top_p", "from 0 to 1", _is_within(self.top_p, 0, 1)),
                ("min_p", "from 0 to 1", _is_within(self.min_p, 0, 1)),
                ("repetition_penalty", "from 0.01 to 100", _is_within(self.repetition_penalty, 0.01, 100)),
                ("presence_penalty", "from -2 to 2", _is_within(self.presence_penalty, -2, 2)),
                ("frequency_penalty", "from -2 to 2", _is_within(self.frequency_penalty, -2, 2)),
                ("stop_tokens", "a tuple of token ids", _are_whole(self.stop_tokens)),
                (
                    "min_new_tokens",
                    f"a whole number from 0 to max_new_tokens={self.max_new_tokens!r}",
                    _is_whole(self.min_new_tokens, 0)
                    and not (_is_whole(self.max_new_tokens, 1) and self.min_new_tokens > self.max_new_tokens),
                ),
                ("seed", "a whole number from -2**63 to 2**63 - 1", _is_whole(self.seed, -(2**63), 2**63)),
                ("num_logprobs", "a whole number, 0 or more, or None", _is_whole_or_none(self.num_logprobs)),
            )
            if not holds
        ]
        if mistakes:
            raise ValueError("; ".join(mistakes))

    @property
    def changes_logits(self) -> bool:
        """Whether there is a penalty, a bias, or a least number of tokens."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or self.min_new_tokens > 0 or any(penalties)

    def of_prompt(self, index: int) -> Self:
        """For the prompt of this number: with its own seed, `seed + index` (after the largest comes the smallest)."""
        return replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)


def _is_whole(value: Any, least: int, end: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def _are_whole(values: Any) -> bool:
    return isinstance(values, Iterable) and all(_is_whole(value, 0) for value in values)


def _is_whole_or_none(value: Any) -> bool:
    return value is None or _is_whole(value, 0)


def _is_within(value: Any, least: float, most: float) -> bool:
    return _is_finite(value) and least <= value <= most


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def choose_token(
    logits: Tensor,
    settings: SamplingSettings,
    generator: torch.Generator,
    *,
    prompt: Sequence[int] = (),
    written: Sequence[int] = (),
) -> int:
    """The next token.

    Args:
        logits: `[vocab]`, on the CPU.
        settings: sampling settings.
        generator: for the draw; not used without temperature.
        prompt: its tokens, for the penalties.
        written: the tokens after it, for the penalties.

    Raises:
        FloatingPointError: the logits have NaNs, or infinities that are not negative.
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
    """The logits after the repetition penalty, the penalties of presence and frequency, and the bias, in this order.

    Stop tokens get minus infinity while there are fewer than `min_new_tokens`.

    Args:
        logits: `[vocab]`.
        settings: with the penalties.
        prompt: counts for the repetition penalty only.
        written: counts for all.

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
    """Probability of each token being drawn: temperature first, then the top k, the top p of those, then the min p.

    Args:
        logits: `[vocab]`.
        settings: with a temperature above 0.

    Returns:
        float64 `[vocab]`, zeros for what is cut off; the likeliest token always stays.
    """
    scores = logits.double()  # which has room for every temperature and top_p that Python has
    scores = (scores - scores.max()) / float(settings.temperature)  # torch takes no whole numbers above 2**63
    if 0 < settings.top_k < scores.numel():
        kept = scores.topk(settings.top_k)
        scores = torch.full_like(scores, -torch.inf).scatter(0, kept.indices, kept.values)
    probabilities = scores.softmax(0)
    if settings.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # what likelier tokens have together
        before[0] = -1  # the likeliest token stays, also with top_p=0
        probabilities[tokens[before >= settings.top_p]] = 0
        probabilities /= probabilities.sum()
    if settings.min_p > 0:
        probabilities[probabilities < settings.min_p * probabilities.max()] = 0
        probabilities /= probabilities.sum()
    return probabilities
