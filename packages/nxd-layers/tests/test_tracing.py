"""Functions of this package in a model that torch.fx traces: each is one call, without `torch.fx.wrap`."""

import nxd_layers
import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, linear_cross_entropy, parallel_cross_entropy
from torch import fx, nn

LEAVES = (
    "parallel_cross_entropy",
    "parallel_argmax",
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
)


class Calls(nn.Module):
    """Calls a function by an attribute of its package, where a list of a module's names does not reach."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x, labels):
        more = (labels,) if self.name == "parallel_cross_entropy" else ()
        return getattr(nxd_layers, self.name)(x * 2, *more) + 1


@pytest.mark.parametrize("name", LEAVES)
def test_function_of_the_package_is_one_call_in_a_trace(on_tp, name):
    def job():
        model = Calls(name)
        traced = fx.symbolic_trace(model)
        calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
        assert getattr(nxd_layers, name) in calls
        torch.manual_seed(0)
        inputs = torch.randn(4, 6), torch.randint(6, (4,))
        assert torch.equal(traced(*inputs), model(*inputs))

    on_tp(2, job)


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, ColumnParallelLinear | ParallelEmbedding)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = ParallelEmbedding(8, 6)
        self.head = ColumnParallelLinear(6, 8, bias=False, gather_output=False)

    def forward(self, ids, labels):
        return linear_cross_entropy(self.embedding(ids), self.head, labels)


def test_head_given_to_a_loss_is_an_attribute_of_the_graph(on_tp):
    def job():
        model = Decoder()
        traced = fx.GraphModule(model, LeafTracer().trace(model))
        batch = torch.arange(8).view(2, 4), torch.arange(8).flip(0).view(2, 4)
        losses = [module(*batch) for module in (model, traced)]
        assert torch.equal(*losses)
        assert torch.allclose(losses[0], parallel_cross_entropy(model.head(model.embedding(batch[0])), batch[1]).mean())

    on_tp(2, job)
