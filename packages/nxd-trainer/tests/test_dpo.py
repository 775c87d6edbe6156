"""Each loss of preferences is the formula of its paper, on logits of one process."""

from math import exp, log, log1p

import pytest
import torch
from nxd_trainer.dpo import DpoLoss
from nxd_trainer.recipe.sections import DpoSection

BETA, SWAPPED = 0.3, 0.2
LENGTHS = [5, 2, 1, 6]  # of the answers: chosen, rejected, chosen, rejected


def sigmoid(value: float) -> float:
    return 1 / (1 + exp(-value))


# Of the log-ratios of a pair, and of these per token.
FORMULAS = {
    "sigmoid": lambda c, r, *_: (1 - SWAPPED) * log1p(exp(BETA * (r - c))) + SWAPPED * log1p(exp(BETA * (c - r))),
    "robust": lambda c, r, *_: (
        (SWAPPED * log(sigmoid(BETA * (r - c))) - (1 - SWAPPED) * log(sigmoid(BETA * (c - r)))) / (1 - 2 * SWAPPED)
    ),
    "hinge": lambda c, r, *_: max(0.0, 1 - BETA * (c - r)),
    "ipo": lambda _, __, c, r: (c - r - 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, *_: 1 - sigmoid(BETA * c) + sigmoid(BETA * r),
    "apo_down": lambda c, r, *_: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_of_a_name_is_its_formula(name):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 6, 11, generator=generator, dtype=torch.float64)
    tokens = torch.randint(11, (4, 6), generator=generator)
    reference = torch.randn(4, generator=generator, dtype=torch.float64) - 10
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = -100
    smoothing = SWAPPED if name in ("sigmoid", "robust") else 0.0

    loss = DpoLoss(DpoSection(beta=BETA, loss=name, label_smoothing=smoothing))(
        logits, tokens, reference_log_probs=reference
    )

    probabilities = logits.log_softmax(-1)
    ratios = [
        sum(float(probabilities[row, place, tokens[row, place]]) for place in range(length)) - float(reference[row])
        for row, length in enumerate(LENGTHS)
    ]
    each = [ratio / length for ratio, length in zip(ratios, LENGTHS, strict=True)]
    pairs = [(ratios[0], ratios[1], each[0], each[1]), (ratios[2], ratios[3], each[2], each[3])]
    assert float(loss) == pytest.approx(sum(FORMULAS[name](*pair) for pair in pairs) / 2, rel=1e-12)
