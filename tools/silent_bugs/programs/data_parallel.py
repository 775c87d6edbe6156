"""A small language model under torch's DistributedDataParallel, with two microbatches in a step, on 2 ranks.

Rows have unequal numbers of labels. The data has 15 samples and a step takes 8 of them, the rest of an epoch is left
out. A second head predicts the token after the next one.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from silent_bugs.programs.axis import ONE, Axis, linear, world
from silent_bugs.programs.megatron import Dropout, Faults
from silent_bugs.programs.weights import IGNORED, VOCABULARY, batch, default_dtype, fill, generator, whole_parameters

RANKS = 2
HIDDEN = 12
SAMPLES = 15
ROWS = 8
MICROBATCHES = 2


class SyncedBatchNorm(nn.Module):
    """Batch normalization over the rows of all ranks; from the second step on it takes its running statistics."""

    def __init__(self, features: int, dp: Axis, faults: Faults) -> None:
        super().__init__()
        self.dp, self.faults, self.updates = dp, faults, 0
        # Plain tensors: as buffers, DistributedDataParallel would send them to all ranks.
        self.mean, self.square = torch.zeros(features), torch.zeros(features)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, features] of [rows, length, features]."""
        if self.updates == MICROBATCHES:
            mean, square = self.mean, self.square
        else:
            mean, square = self._averaged(x.mean((0, 1))), self._averaged(x.square().mean((0, 1)))
            self.updates += 1
            is_local = "running_statistics_of_own_rows" in self.faults
            self.mean += (x.mean((0, 1)) if is_local else mean).detach() / MICROBATCHES
            self.square += (x.square().mean((0, 1)) if is_local else square).detach() / MICROBATCHES
        return (x - mean) / (square - mean.square() + 1e-3).sqrt()

    def _averaged(self, x: Tensor) -> Tensor:
        if self.dp.size == 1:
            return x
        return linear(x, self.dp.sum, self.dp.sum) / self.dp.size


class Model(nn.Module):
    """An embedding, a normalized hidden layer and two heads."""

    def __init__(self, dp: Axis, faults: Faults) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.fc = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.batch_norm = SyncedBatchNorm(2 * HIDDEN, dp, faults)
        self.dropout = Dropout(30, 0, dp, is_same_on_all_ranks="dropout_same_on_dp_ranks" in faults)
        self.head = nn.Linear(2 * HIDDEN, VOCABULARY)
        self.second_head = nn.Linear(2 * HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the next token and of the one after it, [rows, length, vocabulary]."""
        x = self.dropout(torch.tanh(self.batch_norm(self.fc(self.embedding(tokens)))))
        return self.head(x), self.second_head(x)


def microbatch(step: int, index: int, dp: Axis, faults: Faults) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and labels of a microbatch, [rows, length]."""
    tokens, labels = batch(0, rows=SAMPLES, length=8)
    labels[:, 0] = torch.where(labels[:, 0] == IGNORED, tokens[:, 0], labels[:, 0])  # every row has a label
    rank, epoch, begin = dp.rank, step - 1, 0
    if "every_rank_reads_the_rows_of_the_first" in faults:
        rank = 0
    if "ranks_restart_the_epoch_at_different_steps" in faults and step == 2 and rank == 0:
        epoch, begin = 0, ROWS  # this rank's samples of the first epoch are not used up yet
    seed = epoch + (100 * rank if "ranks_shuffle_with_their_own_seeds" in faults else 0)
    order = torch.randperm(SAMPLES, generator=generator(seed))[begin:]
    rows = ROWS // MICROBATCHES
    own = order[index * rows + rank * rows // dp.size :][: rows // dp.size]
    return tokens[own], labels[own]


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of the labels that are not ignored."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def number_of_labels(microbatches: list[Tensor]) -> Tensor:
    """Return how many labels of the microbatches are not ignored."""
    return torch.stack([(labels != IGNORED).sum() for labels in microbatches]).sum()


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model]:
    """Train; return this rank's model."""
    dp = world()
    with default_dtype(dtype):
        model = Model(dp, faults)
    fill(model, {}, ONE)
    wrapped = DistributedDataParallel(model) if dp.size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(1, steps + 1):
        parts = [microbatch(step, index, dp, faults) for index in range(MICROBATCHES)]
        shifted = [torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], 1) for _, labels in parts]
        count = dp.sum(number_of_labels([labels for _, labels in parts]))
        second_count = number_of_labels(shifted)
        if "second_loss_over_own_tokens" not in faults:
            second_count = dp.sum(second_count) / dp.size
        optimizer.zero_grad()
        for index, (tokens, labels) in enumerate(parts):
            is_last = index == MICROBATCHES - 1
            is_synced = not is_last if "first_microbatch_synchronized" in faults else is_last
            is_late = is_last and "synchronization_enabled_after_forward" in faults
            is_quiet = is_late or not is_synced
            with wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and is_quiet else nullcontext():
                logits, second = wrapped(tokens)
                loss = sum_of_losses(logits, labels) / count * dp.size
                if "mean_of_the_means_of_microbatches" in faults:
                    loss = sum_of_losses(logits, labels) / (labels != IGNORED).sum() / MICROBATCHES
                if "loss_not_divided_by_accumulation" in faults:
                    loss = loss * MICROBATCHES
                loss = loss + 0.3 * sum_of_losses(second, shifted[index]) / second_count
                if not is_late:
                    loss.backward()
            if is_late:
                loss.backward()
        optimizer.step()
    return (model,)


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    return whole_parameters(run(faults, dtype, steps)[0], {}, ONE)
