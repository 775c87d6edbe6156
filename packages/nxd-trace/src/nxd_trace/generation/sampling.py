"""Choosing the next token from logits: greedy, or drawn with a temperature, from the top k, from the top p."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """How one prompt is continued.

    Attributes:
        max_new_tokens: stop after this many.
        temperature: 0 takes the likeliest token; higher is bolder.
        top_k: draw from the k likeliest tokens; 0 for all.
        top_p: draw from the fewest likeliest tokens that have this probability together (Holtzman et al. 2020).
        stop_tokens: stop after one of these.
        seed: of the draws, which do not depend on what else is in the batch; from -2**63 to 2**63 - 1.

    Raises:
        ValueError: a setting outside its range, or of another type.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        mistakes = [
            f"{name}={getattr(self, name)!r} must be {expected}"
            for name, expected, holds in (
                ("max_new_tokens", "a whole number, 1 or more", _is_whole(self.max_new_tokens, 1)),
                ("temperature", "0 or more, and finite", _is_finite(self.temperature) and self.temperature >= 0),
                ("top_k", "a whole number, 0 (all tokens) or more", _is_whole(self.top_k, 0)),
                ("top_p", "more than 0 and at most 1", _is_finite(self.top_p) and 0 < self.top_p <= 1),
                ("stop_tokens", "a tuple of token ids", _are_whole(self.stop_tokens)),
                ("seed", "a whole number from -2**63 to 2**63 - 1", _is_whole(self.seed, -(2**63), 2**63)),
            )
            if not holds
        ]
        if mistakes:
            raise ValueError("; ".join(mistakes))

    def of_prompt(self, index: int) -> Self:
        """For the prompt of this number: with its own seed, `seed + index` (after the largest comes the smallest)."""
        return replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)


def _is_whole(value: Any, least: int, end: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def _are_whole(values: Any) -> bool:
    return isinstance(values, Iterable) and all(_is_whole(value, 0) for value in values)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def choose_token(logits: Tensor, settings: SamplingSettings, generator: torch.Generator) -> int:
    """The next token.

    Args:
        logits: `[vocab]`, on the CPU.
        settings: how to choose.
        generator: for the draw; not used without temperature.

    Raises:
        FloatingPointError: the logits have NaNs, or infinities that are not negative.
    """
    largest = float(logits.max())
    if not isfinite(largest):
        raise FloatingPointError(
            f"the largest of the model's logits is {largest}; check its weights, or use a wider dtype"
        )
    if settings.temperature == 0:
        return int(logits.argmax())
    probabilities = next_token_probabilities(logits, settings)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def next_token_probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Probability of each token being drawn: temperature first, then the top k, then the top p of those.

    Args:
        logits: `[vocab]`.
        settings: with a temperature above 0.

    Returns:
        float64 `[vocab]`, zeros for what is cut off; the likeliest token always stays.
    """
    scores = logits.double()  # which has room for every temperature and top_p that Python has
    scores = (scores - scores.max()) / settings.temperature
    if 0 < settings.top_k < scores.numel():
        kept = scores.topk(settings.top_k)
        scores = torch.full_like(scores, -torch.inf).scatter(0, kept.indices, kept.values)
    probabilities = scores.softmax(0)
    if settings.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # what likelier tokens have together: 0 for the first, which stays
        probabilities[tokens[before >= settings.top_p]] = 0
        probabilities /= probabilities.sum()
    return probabilities
