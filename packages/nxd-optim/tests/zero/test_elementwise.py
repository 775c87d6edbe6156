"""Optimizers that are not elementwise are refused with the reason; the others are taken, whatever their names."""

import pytest
import torch
from nxd_optim import check_parameterwise
from nxd_optim.zero import NeuronZero1Optimizer
from torch import nn

ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class LargeBatchSGD(torch.optim.SGD):
    """Scales each tensor's update by the norms of weight and gradient, as LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] * parameter.norm() / parameter.grad.norm()))


class NormalizedSGD(torch.optim.SGD):
    """Divides by the norm of all gradients together, as methods that find their own learning rate do."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm)


class SignSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def one_parameter():
    return [nn.Parameter(torch.ones(3, 4))]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_of_torch_update_as_without_zero1(name):
    optimizer_class = getattr(torch.optim, name)
    plain, sharded = one_parameter(), one_parameter()
    expected = optimizer_class(plain)
    found = NeuronZero1Optimizer(sharded, optimizer_class, grad_clipping=False)
    for step in range(3):
        for (parameter,) in (plain, sharded):
            parameter.grad = torch.linspace(-1, 1, 12).view(3, 4) + step
        expected.step()
        found.step()

    torch.testing.assert_close(sharded[0], plain[0], rtol=1e-6, atol=0)
    assert {key: group for key, group in found.param_groups[0].items() if key != "params"} == {
        key: group for key, group in expected.param_groups[0].items() if key != "params"
    }


def test_own_elementwise_optimizer_is_taken():
    (parameter,) = one_parameter()
    optimizer = NeuronZero1Optimizer([parameter], SignSGD, lr=0.5)
    parameter.grad = torch.full((3, 4), 7.0)

    optimizer.step()

    assert torch.equal(parameter.detach(), torch.full((3, 4), 0.5))


@pytest.mark.parametrize(
    ("optimizer_class", "reason"),
    [
        (LargeBatchSGD, "LargeBatchSGD is not elementwise: it updates two parts of a matrix differently"),
        (NormalizedSGD, "NormalizedSGD is not elementwise"),
        (torch.optim.Adafactor, "Adafactor is not elementwise"),
        (torch.optim.LBFGS, "LBFGS cannot update flat parts of parameters: ValueError: LBFGS doesn't support"),
        (torch.optim.SparseAdam, "SparseAdam cannot update flat parts of parameters: RuntimeError"),
        (torch.optim.Muon, "Muon cannot update flat parts of parameters: ValueError: Muon only supports 2D"),
    ],
)
def test_other_optimizers_are_refused_with_the_reason(optimizer_class, reason):
    with pytest.raises(ValueError, match=rf"{reason}.*such as AdamW, or use this one without it"):
        NeuronZero1Optimizer(one_parameter(), optimizer_class)


def test_other_optimizers_are_refused_although_they_start_with_no_learning_rate():
    with pytest.raises(ValueError, match="LargeBatchSGD is not elementwise"):
        NeuronZero1Optimizer(one_parameter(), LargeBatchSGD, lr=0.0)


def test_arguments_that_the_optimizer_refuses_raise_its_own_error():
    with pytest.raises(ValueError, match="Invalid beta parameter at index 0"):
        NeuronZero1Optimizer(one_parameter(), torch.optim.AdamW, betas=(2.0, 0.9))
    with pytest.raises(TypeError, match="momentun"):
        NeuronZero1Optimizer(one_parameter(), torch.optim.SGD, momentun=0.9)


def test_optimizer_that_looks_at_each_matrix_alone_may_be_given_some_of_them():
    check_parameterwise(LargeBatchSGD, {}, advice="")
    check_parameterwise(torch.optim.Adafactor, {}, advice="")

    with pytest.raises(ValueError, match=r"NormalizedSGD combines all parameters, .*; use SGD"):
        check_parameterwise(NormalizedSGD, {}, advice="use SGD")


def test_trying_the_optimizer_leaves_the_random_state_alone():
    before = torch.get_rng_state()

    NeuronZero1Optimizer(one_parameter(), torch.optim.AdamW)

    assert torch.equal(torch.get_rng_state(), before)
