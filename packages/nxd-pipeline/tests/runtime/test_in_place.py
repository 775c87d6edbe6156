"""What a model changes in place is changed for all stages that use it afterwards, and for no others."""

import pytest
import torch
from nxd_pipeline.model import NxDPPModel
from nxd_state import initialize_model_parallel
from torch import nn
from torch.nn import functional as F

EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Layer(nn.Module):
    """Changes what the layer before returned."""

    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU(inplace=True)
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden):
        return self.linear(self.activation(hidden))


class Model(nn.Module):
    """Changes, between the layers, a value of another stage and one that every stage computes for itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x, mask):
        mask = mask.clone()
        skipped = 0.5 * x + self.layers[0].linear.bias
        hidden = x * 1.0
        for layer in self.layers:
            hidden = layer(hidden) + mask
            mask.mul_(0.5)
        skipped.add_(1.0)
        self.activation(skipped)
        return (hidden * skipped).square().mean()


class Early(Model):
    """Changes a value of the first stage on the second, for the last."""

    def forward(self, x, mask):
        hidden = self.layers[0](x * 1.0)
        skipped = hidden * 1.0
        hidden = self.layers[1](hidden)
        skipped.add_(mask)
        hidden = self.layers[2](hidden)
        F.relu(skipped, inplace=True)
        return (self.layers[3](hidden) + skipped).square().mean()


def make(model_class):
    torch.manual_seed(4)
    return model_class().double(), {"x": torch.randn(8, 6).double(), "mask": torch.rand(8, 6).double()}


@pytest.mark.parametrize("model_class", [Model, Early])
def test_changes_in_place_give_loss_and_gradients_of_one_process(run_ranks, model_class):
    schedules = {"1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        results = []
        for schedule, virtual in schedules.items():
            model, batch = make(model_class)
            pipeline = NxDPPModel(
                model, Layer, 4, auto_partition=True, schedule=schedule, virtual_pipeline_size=virtual
            )
            loss = pipeline.run_train(**batch)
            results.append((loss, {name: it.grad for name, it in pipeline.local_named_parameters()}))
        return results

    by_rank = run_ranks(train, 2)

    model, batch = make(model_class)
    expected = model(**batch)
    expected.backward()
    for results in zip(*by_rank, strict=True):
        torch.testing.assert_close(next(loss for loss, _ in results if loss is not None), expected.detach(), **EXACT)
        for _, gradients in results:
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, msg=name, **EXACT)
