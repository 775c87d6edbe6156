"""Choosing the next token from logits: greedy, or drawn with a temperature, from the top k, from the top p."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """How one prompt is gone on with.

    Attributes:
        max_new_tokens: stop after this many.
        temperature: 0 takes the likeliest token; higher is bolder.
        top_k: draw from the k likeliest tokens; 0 for all.
        top_p: draw from the fewest likeliest tokens that have this probability together (Holtzman et al. 2020).
        stop_tokens: stop after one of these.
        seed: of the draws; they do not depend on what else is in the batch.

    Raises:
        ValueError: a setting outside its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        mistakes = [
            f"{name}={getattr(self, name)} must be {expected}"
            for name, expected, holds in (
                ("max_new_tokens", "1 or more", self.max_new_tokens >= 1),
                ("temperature", "0 or more, and finite", 0 <= self.temperature < float("inf")),
                ("top_k", "0 (all tokens) or more", self.top_k >= 0),
                ("top_p", "more than 0 and at most 1", 0 < self.top_p <= 1),
            )
            if not holds
        ]
        if mistakes:
            raise ValueError("; ".join(mistakes))


def choose_token(logits: Tensor, settings: SamplingSettings, generator: torch.Generator) -> int:
    """The next token.

    Args:
        logits: `[vocab]`, on the CPU.
        settings: how to choose.
        generator: for the draw; not used without temperature.

    Raises:
        FloatingPointError: the logits have NaNs.
    """
    if bool(logits.isnan().any()):
        raise FloatingPointError("the model's logits have NaNs; check its weights, or use a wider dtype")
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
        float32 `[vocab]`, zeros for what is cut off.
    """
    scores = logits.float()
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
