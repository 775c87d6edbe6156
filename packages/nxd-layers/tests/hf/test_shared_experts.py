"""Shared experts that are computed early: once, with the numbers that they have when they are called."""

import pytest
import torch
from nxd_layers.hf.experts import compute_shared_experts_early
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 4


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.inputs: list[torch.Tensor] = []

    def forward(self, hidden):
        self.inputs.append(hidden)
        return self.linear(hidden)


class Block(nn.Module):
    """As most of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.shared_experts = Counted(), Counted()

    def forward(self, hidden_states):
        residuals = hidden_states
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        hidden_states = self.experts(hidden_states).view(*shape)
        return hidden_states + self.shared_experts(residuals)


class OfItsInput(Block):
    def forward(self, hidden_states):
        routed = self.experts(hidden_states)
        return routed + self.shared_experts(hidden_states)


class SharedFirst(Block):
    def forward(self, hidden_states):
        shared = self.shared_experts(hidden_states)
        return self.experts(hidden_states) + shared


class OfTheRouted(Block):
    def forward(self, hidden_states):
        hidden_states = self.experts(hidden_states)
        return hidden_states + self.shared_experts(hidden_states)


class Twice(Block):
    def forward(self, hidden_states):
        routed = self.experts(hidden_states)
        return routed + self.shared_experts(hidden_states) + self.shared_experts(hidden_states)


def with_early_shared_experts(block):
    compute = compute_shared_experts_early(block)
    assert compute is not None
    order = []
    routed = block.experts.forward

    def forward(hidden):
        compute()
        order.append(len(block.shared_experts.inputs))  # already called when the experts are
        return routed(hidden)

    block.experts.forward = forward
    return order


def gradients_of(block, hidden, *, recomputes=False):
    hidden = hidden.clone().requires_grad_()
    output = checkpoint(block, hidden, use_reentrant=False) if recomputes else block(hidden)
    (output * torch.arange(1.0, HIDDEN + 1, dtype=torch.float64)).sum().backward()
    return [output.detach(), hidden.grad, *(it.grad for it in block.parameters())]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", [Block, OfItsInput])
def test_shared_experts_are_computed_once_and_early_with_the_same_numbers(kind, recomputes):
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    expected = gradients_of(kind(), hidden)
    block = kind()
    order = with_early_shared_experts(block)

    found = gradients_of(block, hidden, recomputes=recomputes)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    passes = 2 if recomputes else 1
    assert order == [*range(1, passes + 1)]
    assert len(block.shared_experts.inputs) == passes


@pytest.mark.parametrize("kind", [SharedFirst, OfTheRouted, Twice])
def test_shared_experts_called_in_another_order_or_with_another_input_keep_their_numbers(kind):
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    expected = gradients_of(kind(), hidden)
    block = kind()
    with_early_shared_experts(block)

    found = gradients_of(block, hidden)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_block_without_shared_experts_computes_nothing_early():
    block = Block()
    del block.shared_experts

    assert compute_shared_experts_early(block) is None


def test_shared_experts_that_a_hook_gives_another_input_are_not_computed_early():
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    plain, block = Block(), Block()
    for it in (plain, block):
        it.shared_experts.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    order = with_early_shared_experts(block)

    torch.testing.assert_close(block(hidden), plain(hidden), rtol=0, atol=0)
    assert order == [0]
    assert len(block.shared_experts.inputs) == 1


def test_shared_experts_take_nothing_of_a_call_before_that_failed():
    block = Block()
    with_early_shared_experts(block)
    plain = Block()
    with pytest.raises(RuntimeError):
        block(torch.randn(2, 3, HIDDEN + 1, dtype=torch.float64))

    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(block(hidden), plain(hidden), rtol=0, atol=0)
