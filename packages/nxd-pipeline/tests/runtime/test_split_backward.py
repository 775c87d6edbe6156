"""Both halves of a backward together are a plain one: the same gradients, hooks and work, each part in its half."""

import pytest
import torch
from nxd_pipeline.runtime.split_backward import SplitBackward
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

EXACT = {"rtol": 1e-12, "atol": 1e-14}


class Scale(torch.autograd.Function):
    """`x * weight`, which notes for what it was asked."""

    @staticmethod
    def forward(ctx, x, note, weight):
        ctx.save_for_backward(x, weight)
        ctx.note = note
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        needs_x, _, needs_weight = ctx.needs_input_grad
        ctx.note.append((needs_x, needs_weight))
        return gradient * weight if needs_x else None, None, (gradient * x).sum(0) if needs_weight else None


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.asked = []

    def forward(self, x):
        return torch.tanh(Scale.apply(torch.tanh(x), self.asked, self.weight))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.twice, self.table = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return self.twice(torch.relu(self.first(self.twice(x)) + self.table.exp())) * self.table


class SeveralOutputs(nn.Module):
    """One output depends on no input, one is an input as it came, and one a weight as it is."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x), self.table(torch.arange(4)) @ self.layer.weight, x, self.table.weight


def frozen_norm():
    module = Attention()
    module.norm.requires_grad_(False)
    module.qkv.bias.requires_grad_(False)
    return module


def hook_on_activation():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[0].register_forward_hook(lambda _, __, output: output.register_hook(lambda it: 3 * it) and None)
    module[1].register_full_backward_hook(lambda _, inputs, outputs: (2 * inputs[0],))
    return module


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6, bias=False)),
    "attention": lambda: nn.Sequential(Attention(), Attention()),
    "custom": lambda: nn.Sequential(Custom(), nn.Linear(6, 6), Custom()),
    "frozen": frozen_norm,
    "used twice": UsedTwice,
    "several outputs": SeveralOutputs,
    "weight made of weights": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "hook on an activation": hook_on_activation,
    "no weights": nn.Tanh,
}


def make(kind, *, needs_gradient=True):
    torch.manual_seed(0)
    module = MODULES[kind]().double()
    x = torch.randn(4, 6).double().requires_grad_(needs_gradient)
    return module, x


def run_forward(module, x):
    outputs = module(x)
    outputs = [it for it in (outputs if isinstance(outputs, tuple) else (outputs,)) if it.requires_grad]
    gradients = [torch.linspace(-1, 1, it.numel()).view_as(it).double() for it in outputs]
    return [get_gradient_edge(output) for output in outputs], gradients


def plain(module, x):
    roots, gradients = run_forward(module, x)
    if roots:
        torch.autograd.backward(roots, gradients)


def split(module, x):
    roots, gradients = run_forward(module, x)
    halves = SplitBackward(roots, gradients, [x] if x.requires_grad else [])
    halves.compute_weights()


def gradients_of(module, x):
    return {"input": x.grad} | {name: it.grad for name, it in module.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        if gradient is None:
            assert other[name] is None, name
        else:
            torch.testing.assert_close(other[name], gradient, msg=name, **EXACT)


@pytest.mark.parametrize("needs_gradient", [True, False], ids=["inner stage", "first stage"])
@pytest.mark.parametrize("kind", MODULES)
def test_both_halves_give_the_gradients_of_a_plain_backward(kind, needs_gradient):
    (module, x), (reference, other) = (make(kind, needs_gradient=needs_gradient) for _ in range(2))

    for _ in range(2):  # the second adds to what is there
        split(module, x)
        plain(reference, other)

    assert_same(gradients_of(reference, other), gradients_of(module, x))


@pytest.mark.parametrize("kind", ["mlp", "attention", "custom"])
def test_first_half_makes_gradients_of_inputs_and_second_half_those_of_weights(kind):
    (module, x), (reference, other) = make(kind), make(kind)
    plain(reference, other)
    roots, gradients = run_forward(module, x)

    halves = SplitBackward(roots, gradients, [x])

    torch.testing.assert_close(x.grad, other.grad, **EXACT)
    assert all(parameter.grad is None for parameter in module.parameters())
    x.grad = None
    halves.compute_weights()
    assert x.grad is None
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("kind", ["mlp", "attention", "used twice", "frozen", "weight made of weights"])
def test_both_halves_do_the_work_of_a_plain_backward(kind):
    flops = []
    for backward in (plain, split):
        module, x = make(kind)
        with FlopCounterMode(display=False) as counter:
            backward(module, x)
        flops.append(counter.get_total_flops())

    assert flops[0] == flops[1] > 0


def test_custom_function_learns_which_gradients_each_half_needs():
    module, x = make("custom")
    first, _, second = module

    split(module, x)

    assert first.asked == second.asked == [(True, False), (False, True)]


@pytest.mark.parametrize("kind", ["attention", "used twice", "custom"])
def test_hooks_on_parameters_are_called_once_per_backward(kind):
    module, x = make(kind)
    calls = {name: [] for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls[name].append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls[name].append("accumulated"))

    split(module, x)

    assert all(of_one == ["gradient", "accumulated"] for of_one in calls.values()), calls


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_backward_that_runs_a_module_again_is_exact_and_found_indivisible(use_reentrant):
    module, x = make("attention")
    reference, other = make("attention")
    plain(reference, other)

    def forward(values):
        return module[1](checkpoint(module[0], values, use_reentrant=use_reentrant))

    for _ in range(2):
        module.zero_grad()
        x.grad = None
        output = forward(x)
        halves = SplitBackward([get_gradient_edge(output)], [torch.linspace(-1, 1, 24).view(4, 6).double()], [x])
        assert halves.is_indivisible
        halves.compute_weights()
        assert_same(gradients_of(reference, other), gradients_of(module, x))
