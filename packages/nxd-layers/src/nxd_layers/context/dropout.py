"""Dropout of attention weights by their place in the whole sequence.

Each weight's random number is a hash of its row of the batch, its head, its query and its key, and of one seed for all
(Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). So the same weights are dropped however a sequence
is cut and whatever travels, and backward finds them without keeping them.
"""

from dataclasses import dataclass, replace

import torch
from nxd_state import active_group, broadcast
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # of SplitMix64 (Steele et al. 2014), as signed numbers
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BITS = 31  # of a random number


@dataclass(frozen=True)
class Dropout:
    """Which weights of some queries and keys are dropped.

    Attributes:
        rate: probability of each.
        seed: random seed.
        first_head: number of the first head that is here.
        first_query: position of the first query.
        first_key: position of the first key.
    """

    rate: float
    seed: int
    first_head: int = 0
    first_query: int = 0
    first_key: int = 0

    def from_query(self, rows: int) -> "Dropout":
        """Of queries this many positions further on."""
        return replace(self, first_query=self.first_query + rows)

    def factors(self, weights: Tensor) -> Tensor:
        """What weights `[batch, kv_heads, heads / kv_heads, queries, keys]` are multiplied by: 0, or 1 / (1 - rate)."""
        batch, groups, heads, queries, keys = weights.shape
        numbers = torch.full((1,), self.seed, dtype=torch.int64, device=weights.device)
        for first, count in (
            (0, batch),
            (self.first_head, groups * heads),
            (self.first_query, queries),
            (self.first_key, keys),
        ):
            place = torch.arange(first + 1, first + count + 1, device=weights.device)
            numbers = _mixed(numbers.unsqueeze(-1) + place * _GOLDEN)
        kept = _shifted(numbers, 64 - _BITS) >= int(self.rate * (1 << _BITS))
        return kept.to(weights.dtype).div_(1.0 - self.rate).view(weights.shape)


def draw_dropout(rate: float, num_heads: int, device: torch.device) -> Dropout | None:
    """A seed of torch's generator, that of the first context-parallel rank. By all ranks of the group.

    Args:
        rate: probability of each weight; None is drawn for 0.
        num_heads: number of heads of each tensor-parallel rank.
        device: device of the generator.

    Raises:
        ValueError: `rate` is outside [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout={rate} must be at least 0 and below 1")
    if not rate:
        return None
    seed = torch.randint(1 << 62, (1,), device=device)
    if active_group("cp").size > 1:
        seed = broadcast(seed, active_group("cp"), source=0)
    return Dropout(rate, int(seed), first_head=active_group("tp").rank * num_heads)


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _MIX[0]
    numbers = (numbers ^ _shifted(numbers, 27)) * _MIX[1]
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
