"""Models made on the meta device: right values on every rank, and memory for a rank's own part only."""

import pytest
import torch
from nxd_pipeline import NxDPPModel
from nxd_pipeline.partition import materialize
from nxd_state import initialize_model_parallel
from torch import nn


class Layer(nn.Linear):
    def forward(self, hidden):
        return hidden + torch.tanh(super().forward(hidden))


class Model(nn.Module):
    def __init__(self, width=6, *, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width, width) for _ in range(4))
        self.head = nn.Linear(width, 10, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).logsumexp(-1).mean()


def on_meta(*args, **kwargs):
    with torch.device("meta"):
        model = Model(*args, **kwargs)
    model.layers[0].weight.tensor_model_parallel = True  # attributes must survive
    return model


def fill(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        module.reset_parameters()
    if isinstance(module, Model):
        module.scale.fill_(2.0)


def with_device(module, device):
    assert device == torch.device("cpu")
    fill(module)


def test_weights_do_not_depend_on_the_number_of_stages(run_ranks):
    def weights():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        torch.manual_seed(5)
        states = []
        for options in ({}, {"virtual_pipeline_size": 2}):
            pipeline = NxDPPModel(on_meta(), Layer, auto_partition=True, param_init_fn=with_device, **options)
            marked = [name for name, it in pipeline.local_named_parameters() if hasattr(it, "tensor_model_parallel")]
            pipeline.run_train(tokens=torch.arange(8).view(2, 4))
            states.append((pipeline.local_state_dict(), marked))
        return states

    by_rank = run_ranks(weights, 2)

    torch.manual_seed(5)
    whole = NxDPPModel(on_meta(), param_init_fn=fill)
    expected = whole.local_state_dict()
    for first, last in zip(*by_rank, strict=True):
        assert first[1] == ["layers.0.weight"]
        assert (first[0] | last[0]).keys() == expected.keys()
        for name, value in [*first[0].items(), *last[0].items()]:
            assert torch.equal(value, expected[name]), name
    assert torch.equal(expected["head.weight"], expected["embedding.weight"])
    assert not torch.equal(expected["layers.0.weight"], expected["layers.1.weight"])


def test_rank_takes_memory_for_its_own_part_only(run_ranks):
    width = 1536
    whole = 4 * 4 * width**2  # bytes of four layers; all else is small

    def peak():
        import resource

        initialize_model_parallel(pipeline_model_parallel_size=2)
        NxDPPModel(on_meta(8), Layer, auto_partition=True, param_init_fn=fill)  # whatever comes with the first one
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pipeline = NxDPPModel(on_meta(width), Layer, auto_partition=True, param_init_fn=fill)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return (after - before) * 1024, sum(it.nbytes for it in pipeline.local_parameters())

    for grown, held in run_ranks(peak, 2):
        assert held < 0.51 * whole
        assert grown < 0.75 * whole


def test_meta_parameters_without_a_function_are_refused():
    with pytest.raises(
        ValueError, match=r"parameters or buffers of '' \(Model\) are on the meta device; pass param_init_fn"
    ):
        materialize(on_meta(), None)


def test_function_that_leaves_a_parameter_unset_is_refused():
    with pytest.raises(ValueError, match=r"left 'weight' of 'layers\.0' .*unset"):
        materialize(on_meta(), lambda module: isinstance(module, Layer) or fill(module))


def test_modules_with_memory_are_left_alone():
    model = Model()
    before = {name: it.clone() for name, it in model.state_dict().items()}

    materialize(model, fill)

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
