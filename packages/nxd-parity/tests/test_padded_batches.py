"""Batches that are padded to their own longest row, as most collators do: ranks then have shorter tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

LENGTHS = (3, 5, 4, 3, 7, 6, 2, 5)
TOKENS, HIDDEN, MICROBATCHES = 20, 6, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(TOKENS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens).cumsum(1))))


def rows_of(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(1, TOKENS, (length,), generator=generator) for length in LENGTHS]


def train(fault=""):
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in range(2):
        rows = rows_of(step)
        for number in range(MICROBATCHES):
            batch = rows[number * 4 : number * 4 + 4][rank::ranks]
            if fault == "rows" and number == 1:
                batch = rows[4:][::ranks]
            tokens = nn.utils.rnn.pad_sequence(batch, batch_first=True)
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0, reduction="sum")
            (loss / sum(LENGTHS)).backward()
        for parameter in model.parameters():
            if ranks > 1 and not (fault == "sum" and parameter is model.mix.weight):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def test_shorter_rows_of_ranks_are_found(compared):
    report = compared(train)

    assert report.agrees, str(report)
    assert report.not_compared == {}
    assert report.agree["activation"] == 2 * 4


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("rows", (1, "input", "", "different data")),
        ("sum", (1, "gradient", "mix.weight", "missing sum")),
    ],
)
def test_fault_is_located(compared, fault, found):
    first = compared(train, fault).first

    assert first is not None
    assert (first.step, first.kind, first.name, first.fault) == found
