"""`fully_shard` of units whose inputs, outputs and backwards are not those of a chain of layers."""

import pytest
import torch
from nxd_optim import NeuronZero1Optimizer, fully_shard
from nxd_optim.zero.flat_parameters import FlatParameters
from nxd_state import active_group, initialize_model_parallel, whole_parameters
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES = 5, 4


class Unit(nn.Module):
    """A weight is computed from parameters, so that backward needs these after it has left the layer."""

    def __init__(self):
        super().__init__()
        self.first = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.last(self.first(hidden).tanh())


class Chain(nn.Module):
    def __init__(self, units=3, unit_class=Unit):
        super().__init__()
        self.units = nn.ModuleList(unit_class() for _ in range(units))

    def forward(self, hidden):
        for unit in self.units:
            hidden = unit(hidden)
        return hidden.square().mean()


class ReturnsItsWeight(Unit):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        return super().forward(hidden), self.scale[:2], self.scale.expand(3, WIDTH)


class OfWeights(Chain):
    """Reads parts of parameters after the unit that returned them."""

    def __init__(self):
        super().__init__(unit_class=ReturnsItsWeight)

    def forward(self, hidden):
        extra = 0
        for unit in self.units:
            hidden, part, rows = unit(hidden)
            extra = extra + (part * hidden[:, :2]).mean() + (rows * rows).mean()
        return hidden.square().mean() + extra


class ChangesItsInput(Unit):
    def forward(self, hidden):
        out = super().forward(hidden * 1)
        return hidden.mul_(2).add_(out)


class OfChanged(Chain):
    def __init__(self):
        super().__init__(unit_class=ChangesItsInput)

    def forward(self, hidden):
        return super().forward(hidden * 1)


class Decoder(Unit):
    def __init__(self):
        super().__init__()
        self.of_memory = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, *, memory, bias, unused):
        return super().forward(hidden + self.of_memory(memory[0]).sigmoid() + bias)


class EncoderDecoder(nn.Module):
    """All decoder units take the encoder's output, in a tuple, a bias, and an input that gets no gradient."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.encoder = nn.ModuleList(Unit() for _ in range(3))
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.decoder = nn.ModuleList(Decoder() for _ in range(4))
        self._recomputes = recomputes

    def forward(self, inputs):
        memory = inputs
        for unit in self.encoder:
            memory = unit(memory)
        hidden, bias = inputs, self.bias * 2
        for unit in self.decoder:
            shared = {"memory": (memory,), "bias": bias, "unused": inputs}
            if self._recomputes:
                hidden = checkpoint(unit, hidden, use_reentrant=False, **shared)
            else:
                hidden = unit(hidden, **shared)
        return hidden.square().mean()


class EncoderDecoderThatRecomputes(EncoderDecoder):
    def __init__(self):
        super().__init__(recomputes=True)


def make(model_class, **arguments):
    torch.manual_seed(0)
    return model_class(**arguments).double()


def units_of(model):
    return [module for module in model.modules() if isinstance(module, Unit)]


def inputs_of_all():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def my_inputs():
    group = active_group("dp", "cp")
    return inputs_of_all().chunk(group.size)[group.rank].clone()


def by_one_process(model_class, backward):
    """The weights after a step, on the mean loss of both replicas."""
    model = make(model_class)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in inputs_of_all().chunk(2):
        backward(model, inputs.clone(), 2)
    optimizer.step()
    return {name: it.detach().clone() for name, it in model.named_parameters()}


def sharded_step(model_class, backward, **arguments):
    """The weights after a step of two replicas."""
    initialize_model_parallel()
    model = make(model_class)
    fully_shard([model], units_of(model), **arguments)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, grad_clipping=False, lr=0.1)
    with torch.no_grad():
        assert model(my_inputs()).isfinite()
    backward(model, my_inputs(), 1)
    optimizer.step()
    optimizer.zero_grad()
    with whole_parameters(model.parameters()):
        return {name: it.detach().clone() for name, it in model.named_parameters()}


def backward_once(model, inputs, parts):
    (model(inputs) / parts).backward()


def backward_of_inputs(model, inputs, parts):
    inputs.requires_grad_()
    (model(inputs) / parts).backward()
    assert inputs.grad.isfinite().all()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(
    "model_class",
    [Chain, OfWeights, OfChanged, EncoderDecoder, EncoderDecoderThatRecomputes],
    ids=lambda it: it.__name__,
)
@pytest.mark.parametrize("backward", [backward_once, backward_of_inputs])
def test_a_step_equals_one_process(run_ranks, model_class, backward):
    expected = by_one_process(model_class, backward)

    for of_rank in run_ranks(lambda: sharded_step(model_class, backward), 2):
        assert_equal(of_rank, expected)


class UsedSometimes(Unit):
    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.is_used = True

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return hidden + self.sometimes(hidden) if self.is_used else hidden


class OfDifferentParts(Chain):
    """Uses parameters for the inputs of one replica only, as experts without tokens on the other."""

    def __init__(self, units=5):
        super().__init__(units, UsedSometimes)

    def forward(self, hidden):
        for unit in self.units:
            unit.is_used = bool(hidden[0, 0] > inputs_of_all()[::SAMPLES, 0].mean())
        return super().forward(hidden)


class ReturnsFeatures(Chain):
    """Returns what its units start from as well, for the inputs of one replica only, as features of images."""

    def __init__(self):
        super().__init__(5)
        self.encoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        has_images = bool(hidden[0, 0] > inputs_of_all()[::SAMPLES, 0].mean())
        features = self.encoder(hidden) if has_images else None
        return super().forward(hidden if features is None else features), features


def backward_of_loss(model, inputs, parts):
    output = model(inputs)
    loss = output if isinstance(output, torch.Tensor) else output[0]
    (loss / parts).backward()


@pytest.mark.parametrize("model_class", [OfDifferentParts, ReturnsFeatures], ids=lambda it: it.__name__)
@pytest.mark.parametrize("reshard", [True, False])
def test_what_one_replica_lacks_does_not_change_the_order_of_messages(run_ranks, model_class, reshard):
    def train_it():
        initialize_model_parallel()
        model = make(model_class)
        fully_shard([model], units_of(model), reshard_after_forward=reshard)
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.SGD, grad_clipping=False, shard_gradients=True, lr=0.1
        )
        with torch.no_grad():
            model(my_inputs())
        with optimizer.each_backward(list(model.parameters())):
            backward_of_loss(model, my_inputs(), 1)
        optimizer.step()
        with whole_parameters(model.parameters()):
            return {name: it.detach().clone() for name, it in model.named_parameters()}

    for of_rank in run_ranks(train_it, 2):
        assert_equal(of_rank, by_one_process(model_class, backward_of_loss))


class KeepsALoss(Unit):
    def forward(self, hidden):
        self.loss = self.last(hidden).square().mean()
        return super().forward(hidden)


class OfLosses(Chain):
    def __init__(self):
        super().__init__(unit_class=KeepsALoss)


def backward_of_a_kept_loss(model, inputs, parts):
    model(inputs)
    (model.units[1].loss / parts).backward()


def second_derivative(model, inputs, parts):
    inputs.requires_grad_()
    [slope] = torch.autograd.grad(model(inputs), inputs, create_graph=True)
    (slope.square().sum() / parts).backward()


BEYOND_OUTPUTS = [(OfLosses, backward_of_a_kept_loss), (Chain, second_derivative)]


@pytest.mark.parametrize(("model_class", "backward"), BEYOND_OUTPUTS)
def test_a_backward_that_bypasses_outputs_is_refused(run_ranks, model_class, backward):
    def shard():
        initialize_model_parallel()
        model = make(model_class)
        fully_shard([model], units_of(model))
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, grad_clipping=False, lr=0.1)
        refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with refused as raised, optimizer.each_backward(model.parameters()):
            backward(model, my_inputs(), 1)
        return raised.value.__notes__

    for notes in run_ranks(shard, 2):
        assert "reshard_after_forward=False" in notes[0]


@pytest.mark.parametrize(("model_class", "backward"), BEYOND_OUTPUTS)
def test_a_backward_that_bypasses_outputs_works_if_units_are_kept(run_ranks, model_class, backward):
    expected = by_one_process(model_class, backward)

    for of_rank in run_ranks(lambda: sharded_step(model_class, backward, reshard_after_forward=False), 2):
        assert_equal(of_rank, expected)


@pytest.mark.parametrize("model_class", [Chain, EncoderDecoder, EncoderDecoderThatRecomputes])
def test_no_more_than_two_units_are_whole(run_ranks, model_class):
    def count():
        initialize_model_parallel()
        model = make(model_class)
        fully_shard([model], units_of(model))
        gathered, most = {}, [0]
        gather = FlatParameters.gather

        def noted(flat):
            gather(flat)
            if all(it is not outside for it in flat.parameters):
                gathered[id(flat)] = flat
            most[0] = max(most[0], sum(it.is_whole for it in gathered.values()))

        outside = getattr(model, "bias", None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FlatParameters, "gather", noted)
            model(my_inputs()).backward()
        return most[0]

    assert run_ranks(count, 2) == [2, 2]


@pytest.mark.parametrize("change", [lambda it: it.float(), lambda it: it.to(torch.float32), lambda it: it.half()])
def test_a_model_that_is_converted_later_is_refused(run_ranks, change):
    def convert():
        initialize_model_parallel()
        model = make(Chain)
        fully_shard([model], units_of(model))
        change(model)
        with pytest.raises(RuntimeError, match="moved or converted after fully_shard"):
            model(my_inputs())

    run_ranks(convert, 2)
