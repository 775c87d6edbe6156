"""Looking at training steps on replicas, and holding them against those over gloo."""

from collections.abc import Callable

import pytest
import torch
from nxd_testing import assemble_logical
from nxd_testing.replicas import executed_graphs
from torch import nn
from training_steps import Layout, Outcome, make_llama, train

RTOL = 1e-5


def train_and_look(
    layout: Layout, steps: int, make_model: Callable[[Layout], nn.Module] = make_llama
) -> tuple[Outcome, list[bool], str]:
    """What `train` gives; of the graph of each step, whether it was compiled for it; and the last one's text."""
    outcome = train(layout, steps, make_model)
    graphs = executed_graphs()[-steps:]
    return outcome, [graph.is_new for graph in graphs], graphs[-1].text


def assert_same_outcomes(on_xla: list[Outcome], over_gloo: list[Outcome]) -> None:
    """Losses, norms, gradients and weights, of all ranks."""
    for found, expected in zip(on_xla, over_gloo, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=RTOL)
        assert found.norms == pytest.approx(expected.norms, rel=RTOL)
    assert_same_tensors([it.gradients for it in on_xla], [it.gradients for it in over_gloo], rtol=RTOL)
    # Adam divides by the gradient's own size, so that what is rounded in a small gradient is not small in the update.
    assert_same_tensors([it.weights for it in on_xla], [it.weights for it in over_gloo], rtol=1e-4)


def assert_same_tensors(found, expected, *, rtol: float) -> None:
    """Elements near zero are compared to their tensor's scale; nothing must be missing."""
    wholes, wanted = (assemble_logical(pieces, rtol=1e-4) for pieces in (found, expected))
    assert wholes.keys() == wanted.keys()
    for name, tensor in wanted.items():
        atol = rtol * tensor.abs().max().item()
        torch.testing.assert_close(wholes[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
