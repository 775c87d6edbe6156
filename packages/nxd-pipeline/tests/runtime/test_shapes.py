"""What goes between stages may have any structure, and other shapes in the next step or the next microbatch."""

import pytest
import torch
from nxd_pipeline.model import NxDPPModel
from nxd_pipeline.partition import Stage, Wiring
from nxd_pipeline.runtime import Executor, P2PCommunicator
from nxd_pipeline.schedules import insert_communication, make_schedule
from nxd_state import get_group, initialize_model_parallel
from torch import nn

EXACT = {"rtol": 1e-10, "atol": 1e-12}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64)


def value_of_everything(seed):
    """Small and large tensors, empty ones and scalars, of odd sizes and any layout, in a structure of everything."""
    generator = torch.Generator().manual_seed(seed)
    small = [torch.rand(3, 5, generator=generator).mul(5).to(dtype).t() for dtype in DTYPES]
    large = torch.rand(40000, generator=generator)
    return {
        "small": small,
        "large": (large, large.view(200, 200).t()),
        "rest": [torch.empty(0, 3), seed * 0, None, "text"],
    }


def tensors_in(value):
    return [*value["small"], *value["large"], value["rest"][0]]


@pytest.mark.parametrize("env", [{}, {"NXD_DEBUG_COLLECTIVES": "1"}], ids=["plain", "debug"])
def test_value_of_any_structure_arrives_as_it_was_sent(run_ranks, env):
    def exchange():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        group = get_group("pp")
        p2p = P2PCommunicator(group)
        values = [value_of_everything(seed) for seed in range(3)]
        if group.rank == 0:
            for seed, value in enumerate(values):
                p2p.send_value(value, 1, (0, 1, "inputs"), seed)
            p2p.finish()
            return True
        incoming = [p2p.receive_value(0, (0, 1, "inputs")) for _ in values]
        received = [layout.fill(tensors.wait()) for layout, tensors in incoming]
        for one, other in zip(received, values, strict=True):
            assert one["rest"][1:] == other["rest"][1:]
            for tensor, expected in zip(tensors_in(one), tensors_in(other), strict=True):
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected)
        return True

    assert run_ranks(exchange, 2, env=env) == [True, True]


class Pooled(nn.Module):
    """Two outputs, one of a size of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x):
        return Last(self)(*First(self)(x))


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.first = model.first

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return hidden, hidden.mean(dim=1)


class Last(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.last = model.last

    def forward(self, hidden, mean):
        return (self.last(hidden) * self.last(mean).unsqueeze(1)).mean()


def make_pooled():
    torch.manual_seed(2)
    return Pooled()


def microbatches_of_lengths(lengths):
    return [{"x": torch.linspace(-1, 1, 2 * length * 4).view(2, length, 4).double()} for length in lengths]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_microbatches_of_several_lengths_give_the_gradients_of_one_process(run_ranks, name):
    lengths = [3, 7, 3, 1, 7]

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        group, model = get_group("pp"), make_pooled()
        wiring = Wiring([Stage(First(model), ("x",), ("hidden", "mean")), Stage(Last(model), ("hidden", "mean"))])
        stage = [First(model), Last(model)][group.rank]
        schedule = insert_communication(make_schedule(name, 2, len(lengths)), wiring.edges)
        executor = Executor({group.rank: stage}, wiring, schedule, P2PCommunicator(group))
        losses = [executor.run(group.rank, microbatches_of_lengths(lengths), lambda loss: loss) for _ in range(2)]
        return losses, {name: it.grad for name, it in stage.named_parameters()}

    (_, first), (losses, last) = run_ranks(train, 2)

    model = make_pooled()
    expected = [model(**inputs) for inputs in microbatches_of_lengths(lengths)]
    (2 * torch.stack(expected).mean()).backward()
    torch.testing.assert_close(losses, [[it.detach() for it in expected]] * 2, **EXACT)
    for path, parameter in model.named_parameters():
        torch.testing.assert_close((first | last)[path], parameter.grad, msg=path, **EXACT)


def test_parameters_frozen_between_steps_get_no_gradients_and_others_those_of_one_process(
    run_ranks, make_model, make_batch, layer_class
):
    def freeze(parameters):
        for name, parameter in parameters:
            parameter.requires_grad_("layers.3" in name)

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(), layer_class, 2, auto_partition=True)
        pipeline.run_train(**make_batch())
        for parameter in pipeline.local_parameters():
            parameter.grad = None
        freeze(pipeline.local_named_parameters())
        pipeline.run_train(**make_batch())
        return {name: it.grad for name, it in pipeline.local_named_parameters()}

    first, last = run_ranks(train, 2)

    reference = make_model()
    freeze(reference.named_parameters())
    reference(**make_batch()).backward()
    for name, parameter in reference.named_parameters():
        gradient = (first | last)[name]
        if parameter.grad is None:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, parameter.grad, msg=name, **EXACT)


def test_parameters_unfrozen_between_steps_raise_on_all_ranks_saying_what_to_do(
    run_ranks, make_model, make_batch, layer_class
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        model = make_model()
        model.embedding.requires_grad_(False)
        model.layers[:2].requires_grad_(False)
        pipeline = NxDPPModel(model, layer_class, 2, auto_partition=True)
        pipeline.run_train(**make_batch())
        for parameter in pipeline.local_parameters():
            parameter.requires_grad_(True)
        with pytest.raises(RuntimeError, match="after unfreezing parameters, create the pipeline again"):
            pipeline.run_train(**make_batch())

    run_ranks(train, 2)


class Opaque:
    """An object that nobody can look into."""

    def __init__(self, hidden):
        self.hidden = hidden


class ReturnsOpaque(First):
    def forward(self, x):
        return Opaque(self.first(x))


class TakesOpaque(Last):
    def forward(self, received):
        return self.last(received.hidden).mean()


def test_tensor_in_an_object_raises_on_all_ranks_rather_than_losing_its_gradient(run_ranks):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        model = make_pooled()
        pipeline = NxDPPModel(model, stages=[ReturnsOpaque(model), TakesOpaque(model)])
        with pytest.raises((TypeError, RuntimeError), match="a tensor inside an unknown class"):
            pipeline.run_train(x=torch.ones(2, 4).double())

    run_ranks(train, 2, timeout=60.0)


def test_autocast_may_change_between_steps(run_ranks):
    x = torch.linspace(-1, 1, 4 * 3 * 4).view(4, 3, 4)

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        model = make_pooled().float()
        values = ("hidden", "mean")
        stages = [Stage(First(model), ("x",), values), Stage(Last(model), values)]
        pipeline = NxDPPModel(model, num_microbatches=2, stages=stages)
        losses = []
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                losses.append(pipeline.run_train(x=x))
        return losses

    _, losses = run_ranks(train, 2)

    for enabled, loss in zip((True, False, True), losses, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            expected = torch.stack([make_pooled().float()(part) for part in x.chunk(2)])
        torch.testing.assert_close(loss, expected.detach().mean())


def test_dtype_of_a_pipeline_that_has_run_can_be_changed(run_ranks, make_model, make_batch, layer_class):
    def change_dtype():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(
            make_model(),
            layer_class,
            num_microbatches=2,
            auto_partition=True,
            input_names=["input_ids", "labels"],
            broadcast_and_average_loss=True,
        )
        pipeline.run_train(**make_batch())
        pipeline.float().zero_grad()
        return pipeline.run_train(**make_batch()), {p.grad.dtype for p in pipeline.local_parameters()}

    expected = make_model().float()(**make_batch()).detach()
    for loss, dtypes in run_ranks(change_dtype, 2):
        torch.testing.assert_close(loss, expected, check_dtype=False)
        assert dtypes == {torch.float32}
