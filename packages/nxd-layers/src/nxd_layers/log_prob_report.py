"""How far a trainer's log-probabilities are from those of the engine that generated the tokens."""

from dataclasses import dataclass

import torch
from nxd_state import Group, active_group, all_gather_object, at_least_float32, on_every_rank
from torch import Tensor


@dataclass(frozen=True)
class LogProbReport:
    """Differences between the log-probabilities of the same tokens, over all ranks; zeros if there are no tokens.

    Attributes:
        num_tokens: number of tokens that were compared.
        logp_difference_mean: mean of the absolute differences.
        logp_difference_max: the largest of them.
        k3_kl: estimate of the divergence KL(rollout || trainer), the mean of `ratio - 1 - log(ratio)`, which is never
            negative (Schulman 2020).
        clip_fraction: share of ratios outside `[1 - epsilon, 1 + epsilon]`, those that PPO and GRPO clip.
    """

    num_tokens: int = 0
    logp_difference_mean: float = 0.0
    logp_difference_max: float = 0.0
    k3_kl: float = 0.0
    clip_fraction: float = 0.0


@torch.no_grad()
def compare_log_probs(
    trainer: Tensor, rollout: Tensor, mask: Tensor, *, epsilon: float = 0.2, group: Group | None = None
) -> LogProbReport:
    """Compare a trainer's log-probabilities with the rollout's. Called by all ranks of the group.

    The ratio of a token is its probability in the trainer by that in the rollout. Large differences right after an
    update of the rollout engine mean that it has other weights, or computes something else.

    Args:
        trainer: `[...]`, this rank's log-probabilities, from `token_log_probs`.
        rollout: the same shape: what the rollout engine returned for these tokens.
        mask: the same shape: which tokens to compare, such as those of the completions. Other values may be anything.
        epsilon: how far a ratio may be from 1 without being clipped.
        group: the ranks with different tokens; default: the data- and context-parallel ones.

    Returns:
        The report over the tokens of all ranks of the group, the same on each.

    Raises:
        RuntimeError: shapes differ or epsilon is not positive, on some rank; on every rank.
    """
    group = active_group("dp", "cp") if group is None else group
    own = on_every_rank("comparing log-probabilities", lambda: _sums(trainer, rollout, mask, epsilon), group)
    counts, totals, largest, divergences, clipped = zip(*all_gather_object(own, group), strict=True)
    count = int(sum(counts))
    if not count:
        return LogProbReport()
    return LogProbReport(count, sum(totals) / count, max(largest), sum(divergences) / count, sum(clipped) / count)


def _sums(trainer: Tensor, rollout: Tensor, mask: Tensor, epsilon: float) -> list[float]:
    """Return this rank's number of tokens, sum and maximum of differences, sum of k3, and number of clipped ratios."""
    if not trainer.shape == rollout.shape == mask.shape:
        raise ValueError(
            f"log-probabilities of shapes {list(trainer.shape)} and {list(rollout.shape)} and a mask of shape "
            f"{list(mask.shape)} do not match; pass three tensors of one shape"
        )
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon} is not positive; use the clipping range of the loss, such as 0.2")
    kept = mask.bool()
    log_ratio = (at_least_float32(trainer) - at_least_float32(rollout)).masked_fill(~kept, 0.0).flatten()
    if not log_ratio.numel():
        return [0.0] * 5
    difference, excess = log_ratio.abs(), log_ratio.expm1()  # the ratio less 1, precise for small differences
    is_clipped = excess.abs() > epsilon
    sums = [kept.sum(), difference.sum(), difference.max(), (excess - log_ratio).sum(), is_clipped.sum()]
    return [float(it) for it in sums]
