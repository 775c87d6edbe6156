"""A list of layers as a model: how stages are made of it, and what its stage function may say."""

import pytest
import torch
from nxd_pipeline import NxDPPModel
from nxd_pipeline.partition import sequence_partition
from nxd_state import initialize_model_parallel
from torch import nn


def make_layers():
    torch.manual_seed(0)
    return [nn.Linear(4, 4).double() for _ in range(5)]


def uneven(layers, num_stages):
    return {layer: 0 if index < 4 else num_stages - 1 for index, layer in enumerate(layers)}


@pytest.mark.parametrize(("function", "first_names"), [(None, ["0", "1"]), (uneven, ["0", "1", "2", "3"])])
def test_layers_on_two_ranks_equal_one_process(run_ranks, function, first_names):
    x, y = torch.randn(4, 4).double(), torch.randn(4, 4).double()

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(
            make_layers(),
            num_microbatches=2,
            manual_pp_partition=True,
            manual_pp_stage_partition_fn=function,
            manual_pp_loss_fn=nn.MSELoss(),
        )
        loss = pipeline.run_train(inputs=x, labels=y)
        gradients = {name: it.grad for name, it in pipeline.local_named_parameters()}
        return loss, gradients, pipeline.run_eval(inputs=x)

    (_, first, _), (loss, last, outputs) = run_ranks(train, 2)

    whole = nn.Sequential(*make_layers())
    expected = nn.functional.mse_loss(whole(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    assert list(first) == [f"{name}.{kind}" for name in first_names for kind in ("weight", "bias")]
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close((first | last)[name], parameter.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat(outputs), whole(x).detach(), rtol=1e-10, atol=1e-12)


def test_list_without_model_parallelism_trains_as_one_stage():
    pipeline = NxDPPModel(make_layers(), manual_pp_partition=True, manual_pp_loss_fn=nn.MSELoss())

    loss = pipeline.run_train(inputs=torch.ones(2, 4).double(), labels=torch.zeros(2, 4).double())

    torch.testing.assert_close(loss, nn.Sequential(*make_layers())(torch.ones(2, 4).double()).square().mean().detach())


class Listed(nn.Linear):
    def forward(self, x):
        return [super().forward(x[0] if isinstance(x, list) else x)]


def test_layers_that_return_lists_give_the_first_to_the_loss(run_ranks):
    def train(num_stages):
        initialize_model_parallel(pipeline_model_parallel_size=num_stages)
        torch.manual_seed(0)
        layers = [Listed(4, 4).double() for _ in range(4)]
        pipeline = NxDPPModel(layers, num_microbatches=2, manual_pp_partition=True, manual_pp_loss_fn=nn.MSELoss())
        return pipeline.run_train(inputs=torch.ones(4, 4).double(), labels=torch.zeros(4, 4).double())

    torch.testing.assert_close(run_ranks(train, 2, 2)[1], run_ranks(train, 1, 1)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stages", [[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 2]])
def test_stage_function_without_order_is_refused(stages):
    with pytest.raises(ValueError, match="the stage function assigns the 5 layers to stages"):
        sequence_partition(make_layers(), 2, stage_of_layers=lambda layers, _: dict(zip(layers, stages, strict=True)))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ValueError, match="5 layers cannot fill 6 stages"):
        sequence_partition(make_layers(), 6)


@pytest.mark.parametrize("arguments", [{"module": [nn.Tanh()]}, {"module": nn.Tanh(), "manual_pp_partition": True}])
def test_list_goes_with_manual_partition_only(arguments):
    with pytest.raises(ValueError, match="pass a list of layers with manual_pp_partition=True"):
        NxDPPModel(**arguments)
