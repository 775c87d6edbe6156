"""A mixture of experts under expert parallelism by all-to-all, on 2 ranks that hold different rows and experts.

Two microbatches make a step. The router has an auxiliary loss over tokens that are no padding; probabilities weight
what the experts return, biases included. Before the second step a checkpoint of the experts is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silent_bugs.programs.axis import Axis, all_to_all, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import VOCABULARY, Shard, batch, default_dtype, fill, whole_parameters

RANKS = 2
HIDDEN = 8
EXPERTS = 6
CHOSEN = 2
MICROBATCHES = 2
COEFFICIENT = 0.5

SHARDS = {"experts.*": Shard(0)}


class Experts(nn.Module):
    """This rank's experts, stacked: down(tanh(up(x))) with a bias, times the probability of a token."""

    def __init__(self, ep: Axis, faults: Faults) -> None:
        super().__init__()
        self.number, self.faults = EXPERTS // ep.size, faults
        self.up = nn.Parameter(torch.empty(self.number, HIDDEN, HIDDEN))
        self.down = nn.Parameter(torch.empty(self.number, HIDDEN, HIDDEN))
        self.bias = nn.Parameter(torch.empty(self.number, 1, HIDDEN))

    def forward(self, x: Tensor, expert: Tensor, probability: Tensor) -> Tensor:
        """Return [tokens, hidden] of tokens, the local numbers of their experts, and their probabilities."""
        result = x.new_zeros(x.shape) + 0 * (self.up.sum() + self.down.sum() + self.bias.sum())
        for index in range(self.number):
            (own,) = (expert == index).nonzero(as_tuple=True)
            hidden = torch.tanh(x[own] @ self.up[index])
            if "bias_not_weighted_by_probability" in self.faults:
                y = hidden @ self.down[index] * probability[own, None] + self.bias[index]
            else:
                y = (hidden @ self.down[index] + self.bias[index]) * probability[own, None]
            result = result.index_add(0, own, y)
        return result


class Model(nn.Module):
    """An embedding, a router, experts and a head."""

    def __init__(self, ep: Axis, faults: Faults) -> None:
        super().__init__()
        self.ep, self.faults = ep, faults
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(ep, faults)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.chosen = torch.zeros(EXPERTS)  # how often each expert was chosen in this step
        self.counted = torch.zeros(())  # and of how many tokens

    def forward(self, tokens: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the auxiliary loss of this rank's rows [rows, length]."""
        x = self.embedding(tokens).flatten(0, 1)
        probabilities = self.router(x).softmax(-1)
        picked, expert = probabilities.topk(CHOSEN, -1)
        auxiliary = self._auxiliary(probabilities, expert, is_token.flatten())
        if "router_detached_by_the_exchange" in self.faults:
            picked = picked.detach()
        mixed = self._mixed(x.repeat_interleave(CHOSEN, 0), expert.flatten(), picked.flatten())
        return self.head(torch.tanh(x + mixed.view(-1, CHOSEN, HIDDEN).sum(1))), auxiliary

    def _mixed(self, x: Tensor, expert: Tensor, probability: Tensor) -> Tensor:
        """Send tokens to the ranks of their experts, and return what comes back, in the order of the tokens."""
        ep, own = self.ep, EXPERTS // self.ep.size
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert // own, minlength=ep.size)
        received = torch.stack([counts[ep.rank] for counts in ep.gather_list(sent)])
        splits = sent.tolist(), received.tolist()
        arrived = [
            all_to_all(part[order], *splits, ep)
            for part in (x, (expert % own).to(x.dtype)[:, None], probability[:, None])
        ]
        y = self.experts(arrived[0], arrived[1][:, 0].round().long(), arrived[2][:, 0])
        returned = all_to_all(y, splits[1], splits[0], ep)
        return torch.zeros_like(returned).index_copy(0, order, returned)

    def _auxiliary(self, probabilities: Tensor, expert: Tensor, is_token: Tensor) -> Tensor:
        """Return this rank's share of the balance loss: how often experts are chosen, times their probability."""
        if "padding_in_the_auxiliary_loss" in self.faults:
            is_token = torch.ones_like(is_token)
        local = torch.zeros(EXPERTS).index_add(
            0, expert.flatten(), is_token.repeat_interleave(CHOSEN).to(torch.get_default_dtype())
        )
        everyone = self.ep.sum(local)
        tokens, count = everyone.sum() / CHOSEN, is_token.sum()
        self.chosen, self.counted = self.chosen + everyone.double(), self.counted + tokens.double()
        denominator = self.counted
        if "counts_of_earlier_microbatches_by_tokens_of_this_one" in self.faults:
            denominator = tokens.double() * (1 + (self.counted > tokens.double()).double())
        fractions = (self.chosen / denominator).to(probabilities.dtype)
        mean = (probabilities * is_token[:, None]).sum(0) / tokens
        loss = (fractions * mean).sum() * self.ep.size
        if "local_count_overwritten_by_its_sum" in self.faults:
            loss = loss * tokens / count
        return loss


def sync_gradients(model: Model, ep: Axis) -> None:
    """Average over ranks; an expert's gradient has the tokens of all ranks already."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if not name.startswith("experts."):
            parameter.grad.copy_(ep.sum(parameter.grad) / ep.size)
        elif "expert_gradients_not_divided" not in model.faults:
            parameter.grad /= ep.size


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model, Axis]:
    """Train; return this rank's model and the axis of the experts."""
    ep = world()
    with default_dtype(dtype):
        model = Model(ep, faults)
        fill(model, SHARDS, ep)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for step in range(1, steps + 1):
            if step == 2 and "every_rank_loads_the_experts_of_the_first" in faults:
                with torch.no_grad():
                    for parameter in model.experts.parameters():
                        parameter.copy_(ep.gather_list(parameter)[0])
            _step(model, optimizer, step, ep)
    return model, ep


def _step(model: Model, optimizer: torch.optim.Optimizer, step: int, ep: Axis) -> None:
    faults = model.faults
    tokens, labels = (part.chunk(MICROBATCHES) for part in batch(step, rows=8))
    total = sum((part >= 0).sum() for part in labels)
    optimizer.zero_grad()
    model.chosen, model.counted = torch.zeros(EXPERTS, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for index in range(MICROBATCHES):
        targets = ep.part(labels[index], 0)
        logits, auxiliary = model(ep.part(tokens[index], 0), targets >= 0)
        loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / total * ep.size
        if "auxiliary_loss_averaged_over_ranks_again" in faults:
            auxiliary = auxiliary / ep.size
        if "auxiliary_loss_not_averaged_over_microbatches" not in faults:
            auxiliary = auxiliary / MICROBATCHES
        if "auxiliary_loss_has_no_gradient" in faults:
            auxiliary = auxiliary.detach()
        (loss + COEFFICIENT * auxiliary).backward()
        if "expert_gradients_doubled_in_each_microbatch" in faults and ep.size > 1:
            for parameter in model.experts.parameters():
                assert parameter.grad is not None
                parameter.grad *= 2
    sync_gradients(model, ep)
    optimizer.step()


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    model, ep = run(faults, dtype, steps)
    return whole_parameters(model, SHARDS, ep)
