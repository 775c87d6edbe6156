"""A model of parallel layers that calls functions of nxd_layers between them is cut without naming them anywhere."""

import neuronx_distributed.parallel_layers
import nxd_layers
import pytest
import torch
from nxd_pipeline import NxDPPModel
from nxd_state import active_group, initialize_model_parallel
from torch import nn

WIDTH, VOCABULARY = 8, 12


class Layer(nn.Linear):
    def forward(self, hidden):
        return hidden + torch.tanh(super().forward(hidden))


class Model(nn.Module):
    def __init__(self, loss, embedding, column_linear):
        super().__init__()
        self.table = embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))
        self.head = column_linear(WIDTH, VOCABULARY, bias=False, gather_output=False, dtype=torch.float64)
        self.loss = loss

    def forward(self, input_ids, labels):
        hidden = nxd_layers.scatter_to_tensor_model_parallel_region(self.table(input_ids))
        hidden = nxd_layers.gather_from_tensor_model_parallel_region(hidden * 2)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.loss == "linear_cross_entropy":
            return nxd_layers.linear_cross_entropy(hidden, self.head, labels)
        return nxd_layers.parallel_cross_entropy(self.head(hidden), labels).mean()


OF_NXD_LAYERS = (nxd_layers.ParallelEmbedding, nxd_layers.ColumnParallelLinear)
OF_NEURONX = (
    neuronx_distributed.parallel_layers.ParallelEmbedding,
    neuronx_distributed.parallel_layers.ColumnParallelLinear,
)


def train(loss, tp, pp, classes=OF_NXD_LAYERS):
    initialize_model_parallel(tp, pp)
    torch.manual_seed(0)
    pipeline = NxDPPModel(Model(loss, *classes), Layer, 2, auto_partition=True, broadcast_and_average_loss=True)
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCABULARY, (2, 4, 6), generator=generator)
    value = pipeline.run_train(input_ids=ids, labels=labels)
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in pipeline.local_parameters():
        whole = getattr(parameter, "tensor_model_parallel", False)
        squares += parameter.grad.square().sum() / (1 if whole else active_group("tp").size)
    return value, squares


@pytest.mark.sample(3)
@pytest.mark.parametrize("loss", ["parallel_cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2)])
def test_functions_in_a_cut_model_give_the_loss_and_gradients_of_one_process(run_ranks, loss, tp, pp):
    ((expected, expected_squares),) = run_ranks(train, 1, loss, 1, 1)

    results = run_ranks(train, tp * pp, loss, tp, pp)

    for value, _ in results:
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(sum(it for _, it in results), expected_squares, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2)])
def test_layers_of_neuronx_distributed_stay_whole_without_being_named(run_ranks, tp, pp):
    expected = run_ranks(train, tp * pp, "parallel_cross_entropy", tp, pp)

    results = run_ranks(train, tp * pp, "parallel_cross_entropy", tp, pp, OF_NEURONX)

    torch.testing.assert_close(results, expected, rtol=0, atol=0)
