"""Weights that several ranks hold are one weight."""

import pytest
import torch
from nxd_pipeline.model import NxDPPModel
from nxd_state import initialize_model_parallel
from torch import nn


@pytest.mark.parametrize("call", ["run_train", "run_eval"])
def test_tied_weight_frozen_under_one_of_its_names_raises_on_all_ranks(
    run_ranks, make_model, make_batch, layer_class, call
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(tied=True), layer_class, 2, auto_partition=True)
        for name, parameter in pipeline.local_named_parameters():
            parameter.requires_grad_("embedding" not in name)
        with pytest.raises((ValueError, RuntimeError), match="set requires_grad to the same value on both"):
            getattr(pipeline, call)(**make_batch())

    run_ranks(train, 2, timeout=60.0)


def test_tied_weight_frozen_under_all_its_names_stays_without_gradient(run_ranks, make_model, make_batch, layer_class):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(tied=True), layer_class, 2, auto_partition=True)
        for name, parameter in pipeline.local_named_parameters():
            parameter.requires_grad_(name not in ("embedding.weight", "head.weight"))
        pipeline.run_train(**make_batch())
        return {name: it.grad for name, it in pipeline.local_named_parameters()}

    first, last = run_ranks(train, 2)

    assert first["embedding.weight"] is None
    assert last["head.weight"] is None
    assert last["layers.3.linear.weight"] is not None


class LayerWithSide(nn.Module):
    """A layer that adds the output of a module of all layers, if the batch asks for it."""

    def __init__(self, side):
        super().__init__()
        self.linear, self.side = nn.Linear(4, 4), side

    def forward(self, hidden, wants_side):
        out = self.linear(hidden)
        return out + self.side(hidden) if wants_side.any() else out


class ModelWithSide(nn.Module):
    def __init__(self):
        super().__init__()
        side = nn.Linear(4, 4)
        self.layers = nn.ModuleList(LayerWithSide(side) for _ in range(2))

    def forward(self, hidden, wants_side):
        for layer in self.layers:
            hidden = layer(hidden, wants_side)
        return hidden.square().mean()


def test_tied_weight_that_no_rank_uses_has_no_gradient_and_later_that_of_one_process(run_ranks):
    steps = (False, True, False)

    def make():
        torch.manual_seed(0)
        return ModelWithSide().double()

    def batch(wants_side):
        return {"hidden": torch.arange(8.0, dtype=torch.float64).view(2, 4), "wants_side": torch.full((2,), wants_side)}

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make(), LayerWithSide, 2, auto_partition=True)
        (side,) = [it for name, it in pipeline.local_named_parameters() if name.endswith("side.weight")]
        gradients = []
        for wants_side in steps:
            pipeline.run_train(**batch(wants_side))
            gradients.append(None if side.grad is None else side.grad.clone())
        return gradients

    reference = make()
    expected = []
    for wants_side in steps:
        reference(**batch(wants_side)).backward()
        gradient = reference.layers[0].side.weight.grad
        expected.append(None if gradient is None else gradient.clone())

    for gradients in run_ranks(train, 2):
        assert gradients[0] is expected[0] is None
        for found, wanted in zip(gradients[1:], expected[1:], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
