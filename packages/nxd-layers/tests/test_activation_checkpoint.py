"""Activation checkpointing: the same numbers bitwise, dropout included, at every layout; what it leaves as it was; and
which modules it takes.
"""

import copy
import gc
import pickle
import weakref

import nxd_state
import pytest
import torch
from nxd_layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from nxd_layers.activation_checkpoint import (
    apply_activation_checkpointing,
    matmul_outputs,
    remove_activation_checkpointing,
)
from nxd_testing import run_on_neuron
from torch import nn
from torch.nn import functional as F

HIDDEN, SEQUENCE = 8, 4


class Core(nn.Module):
    """What lies between the linear layers: split over the ranks, so it drops by this rank's own stream."""

    def forward(self, inner, *, scale=1.0):
        with nxd_state.rng_stream("tp"):
            return F.dropout(F.gelu(inner) * scale, 0.3)


class Block(nn.Module):
    def __init__(self, sequence_parallel):
        super().__init__()
        on = {"sequence_parallel_enabled": sequence_parallel}
        self.norm = RMSNorm(HIDDEN, **on)
        self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **on)
        self.core = Core()
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **on)
        self.last_norm = RMSNorm(HIDDEN, **on)

    def forward(self, hidden, debug, *, calls=None, bias=None):
        """`debug` is a name that torch's checkpoint has, too; `calls` is no tensor, and `bias` one by keyword."""
        calls.append(debug)
        hidden = F.dropout(hidden, 0.2) + bias
        return hidden + self.last_norm(self.down(self.core(self.up(self.norm(hidden)), scale=2.0)))


class Model(nn.Module):
    def __init__(self, sequence_parallel=False, layers=2):
        super().__init__()
        self.layers = nn.ModuleList([Block(sequence_parallel) for _ in range(layers)])
        self.bias = nn.Parameter(torch.ones(HIDDEN))
        self.calls = []

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden, debug=True, calls=self.calls, bias=self.bias)
        return hidden


def make_model(sequence_parallel=False):
    torch.manual_seed(0)
    return Model(sequence_parallel)


def train_once(model, *, autocast=False, backwards=1):
    """Output, gradients and random state of a step from the same seed; and how often a block ran."""
    torch.manual_seed(1)
    hidden = torch.randn(SEQUENCE, 2, HIDDEN, requires_grad=True)
    nxd_state.seed_model_parallel(5)
    model.zero_grad()
    model.calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(hidden)
    for number in range(backwards):
        output.square().sum().backward(retain_graph=number < backwards - 1)
    state = nxd_state.get_rng_state()
    tensors = {"output": output.detach(), "input": hidden.grad}
    tensors |= {name: parameter.grad for name, parameter in model.named_parameters()}
    tensors |= {f"stream {name}": states["cpu"] for name, states in state.items()}
    return tensors, len(model.calls)


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


CONFIGS = {
    "full": ("full", None),
    "full, matmuls kept": ("full", matmul_outputs),
    "class": (Core, None),
    "classes nested in each other": ([Block, "Core"], None),
    "classes nested in each other, matmuls kept": ([Block, Core], matmul_outputs),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_checkpointed_step_with_dropout_equals_the_plain_one_bitwise(on_tp, tp, sequence_parallel):
    def check():
        for autocast in (False, True):
            expected, calls = train_once(make_model(sequence_parallel), autocast=autocast)
            assert calls == 2
            for name, (config, keep) in CONFIGS.items():
                model = make_model(sequence_parallel)
                apply_activation_checkpointing(model, config, keep=keep)
                found, calls = train_once(model, autocast=autocast)
                assert differing(found, expected) == [], (name, autocast)
                assert calls == (2 if config is Core else 4), name

    on_tp(tp, check)


class Normed(nn.Module):
    """Reads, writes and replaces buffers in forward, also one that two modules share."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("first", None)
        self.inner = nn.Module()
        self.inner.register_buffer("seen", self.seen)

    def forward(self, hidden):
        if self.first is None:
            self.first = hidden.detach().mean()
        hidden = self.norm(self.linear(hidden)).tanh() * (1 + self.inner.seen + self.mean * self.first)
        self.mean = 0.9 * self.mean + hidden.detach().mean(0)
        self.seen += 1
        return hidden


@pytest.mark.parametrize("config", [[Normed], [Normed, nn.BatchNorm1d]])
def test_buffers_that_forward_changes_are_those_without_checkpointing_bitwise(config):
    def step(config):
        torch.manual_seed(0)
        model = nn.Sequential(Normed(), Normed())
        model.append(model[0])  # called a second time before its first backward
        apply_activation_checkpointing(model, config)
        outputs = [model(torch.randn(6, HIDDEN)).square().sum() for _ in range(2)]
        outputs[0].backward(retain_graph=True)
        (outputs[0] + outputs[1]).backward()
        assert model[0].inner.seen is model[0].seen
        gradients = {f"gradient of {name}": it.grad for name, it in model.named_parameters()}
        return gradients | dict(model.named_buffers())

    assert differing(step(config), step(None)) == []


class Broken(nn.Module):
    """Breaks the compiler's graph, in a forward that changes a buffer and drops by a stream of this repository."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("mean", torch.ones(HIDDEN))

    def forward(self, hidden):
        hidden = self.linear(hidden).tanh() * self.mean
        self.mean = 0.9 * self.mean + hidden.detach().mean(0)
        torch._dynamo.graph_break()
        with nxd_state.rng_stream("tp"):
            return F.dropout(hidden, 0.5).exp() * hidden


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [None, matmul_outputs])
def test_compiled_forward_whose_graph_breaks_is_that_without_checkpointing(keep):
    def steps(config, backend):
        torch.compiler.reset()
        torch.manual_seed(0)
        nxd_state.seed_model_parallel(0)
        model = nn.Sequential(Broken(), Broken())
        apply_activation_checkpointing(model, config, keep=keep)
        forward = torch.compile(model, backend=backend)
        for _ in range(2):
            forward(torch.randn(6, HIDDEN)).square().sum().backward()
        gradients = {f"gradient of {name}": it.grad for name, it in model.named_parameters()}
        return gradients | dict(model.named_buffers())

    assert differing(steps([Broken], "aot_eager"), steps(None, "eager")) == []


def test_changed_buffer_that_is_too_large_to_copy_is_refused_by_name():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("memory", torch.zeros(2**18 + 1))

        def forward(self, hidden):
            self.memory[0] += 1
            return hidden.exp()

    model = nn.Sequential(Remembering())
    apply_activation_checkpointing(model, Remembering)
    output = model(torch.randn(2, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"'memory' of a Remembering, \(262145,\), has changed since the forward"):
        output.backward()


def test_second_backward_through_a_kept_graph_equals_the_plain_one_bitwise(on_tp):
    def check():
        expected, _ = train_once(make_model(), backwards=2)
        model = make_model()
        apply_activation_checkpointing(model, [Block, Core])
        found, _ = train_once(model, backwards=2)
        assert differing(found, expected) == []

    on_tp(2, check)


@pytest.mark.parametrize("keep", [None, matmul_outputs])
def test_recomputation_runs_the_collectives_of_forward_again_on_every_rank(on_tp, collectives, keep):
    def count():
        counts = {}
        for sequence_parallel in (False, True):
            for config in (None, "full"):
                model = make_model(sequence_parallel)
                apply_activation_checkpointing(model, config, keep=keep)
                names = collectives(lambda model=model: train_once(model))
                counts[sequence_parallel, config] = {name: names.count(name) for name in names}
        return counts

    gather, scatter = "c10d::_allgather_base_", "c10d::alltoall_base_"
    for counts in on_tp(2, count):
        # Of each of two blocks: a sum forward and one backward, and the one forward again.
        assert counts[False, None] == {"c10d::allreduce_": 4}
        assert counts[False, "full"] == {"c10d::allreduce_": 6}
        assert counts[True, None] == {gather: 4, scatter: 4}
        assert counts[True, "full"] == {gather: 6, scatter: 6}


def test_checkpointing_leaves_names_metadata_and_tied_weights_as_they_were(on_tp):
    def check():
        model = make_model()
        model.layers[1].up.weight = model.layers[0].up.weight
        specs = {name: nxd_state.get_shard_spec(p) for name, p in model.named_parameters()}
        identities = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        keys, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]

        apply_activation_checkpointing(model, [Block, Core])

        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_modules()] == modules
        assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == identities
        assert {name: nxd_state.get_shard_spec(p) for name, p in model.named_parameters()} == specs
        assert isinstance(model.layers[0], Block)

    on_tp(2, check)


def test_checkpointing_twice_recomputes_once():
    model = make_model()
    first = apply_activation_checkpointing(model, "full")
    second = apply_activation_checkpointing(model, "full")

    assert first == second == ["layers.0", "layers.1"]
    assert train_once(model)[1] == 4


@pytest.mark.parametrize("remove", [remove_activation_checkpointing, lambda m: apply_activation_checkpointing(m, None)])
def test_removed_checkpointing_leaves_nothing_behind(remove):
    model = make_model()
    own_forward = model.layers[1].core.forward = lambda inner, scale: inner
    before = [dict(vars(module)) for module in model.modules()]

    apply_activation_checkpointing(model, [Block, Core])
    remove(model)

    assert [dict(vars(module)) for module in model.modules()] == before
    assert model.layers[1].core.forward is own_forward
    assert train_once(model)[1] == 2


def test_another_config_replaces_the_one_before():
    model = make_model()
    apply_activation_checkpointing(model, "full")

    assert apply_activation_checkpointing(model, Core) == ["layers.0.core", "layers.1.core"]
    assert train_once(model)[1] == 2


@pytest.mark.parametrize("keep", [None, matmul_outputs])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_a_checkpointed_model_computes_with_its_own_weights(duplicate, keep):
    model = make_model()
    apply_activation_checkpointing(model, "full", keep=keep)
    expected, _ = train_once(model)

    copied = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    found, calls = train_once(copied)
    assert differing(found, expected) == []
    assert calls == 4


def test_checkpointed_model_without_gradients_runs_once_and_alike():
    plain, model = make_model(), make_model()
    apply_activation_checkpointing(model, "full")
    outputs = []
    for each in (plain, model):
        nxd_state.seed_model_parallel(5)
        with torch.no_grad():
            outputs.append(each(torch.ones(SEQUENCE, 2, HIDDEN)))

    assert torch.equal(*outputs)
    assert len(model.calls) == 2


class Encoder(nn.Module):
    """Two stacks, experts inside one, and a list of heads that are no layers."""

    def __init__(self):
        super().__init__()

        def layer():
            return nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]))

        self.encoder = nn.ModuleList([layer(), layer()])
        self.decoder = nn.ModuleList([layer()])
        self.mixed = nn.ModuleList([layer(), nn.TransformerEncoderLayer(4, 1)])
        self.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_full_takes_the_outermost_lists_of_blocks_of_one_class():
    assert apply_activation_checkpointing(Encoder(), "full") == ["encoder.0", "encoder.1", "decoder.0"]


def test_full_takes_the_elements_of_a_list_itself():
    assert apply_activation_checkpointing(Encoder().encoder, "full") == ["0", "1"]


def test_full_takes_the_classes_that_a_hugging_face_model_names():
    model = Encoder()
    model._no_split_modules = ["TransformerEncoderLayer", "BlockOfAnotherVariant"]

    assert apply_activation_checkpointing(model, "full") == ["mixed.1"]


def test_full_takes_the_given_layer_class_before_anything_else():
    model = Encoder()
    model._no_split_modules = ["TransformerEncoderLayer"]

    assert apply_activation_checkpointing(model, "full", transformer_layer_cls=nn.Linear)[-2:] == ["heads.0", "heads.1"]


def test_full_without_layers_says_what_to_pass():
    with pytest.raises(ValueError, match=r"no transformer layers in Sequential.*pass their class as transformer_"):
        apply_activation_checkpointing(nn.Sequential(nn.Linear(2, 2)), "full")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("Blok", "Model has no module of class 'Blok'; did you mean Block"),
        ([Core, nn.LSTM], "Model has no module of class 'LSTM'; it has Block, ColumnParallelLinear"),
        (type("Block", (nn.Module,), {}), "modules of another class named Block"),
        (int, "<class 'int'> is neither a module class nor the name of one"),
        ([], "no module class is given"),
    ],
)
def test_class_that_matches_nothing_raises_and_changes_nothing(config, message):
    model = make_model()
    apply_activation_checkpointing(model, "full")

    with pytest.raises(ValueError, match=message):
        apply_activation_checkpointing(model, config)

    assert train_once(model)[1] == 4


@pytest.mark.parametrize("config", [ColumnParallelLinear, "ColumnParallelLinear", [Core, ColumnParallelLinear]])
def test_column_parallel_linear_whose_forward_others_bypass_is_refused(config):
    model = make_model()

    with pytest.raises(
        ValueError, match=r"layers\.0\.up is a ColumnParallelLinear, .* checkpoint the module around it"
    ):
        apply_activation_checkpointing(model, config)

    assert not any("forward" in vars(module) for module in model.modules())


def test_a_function_chooses_modules_one_by_one():
    model = make_model()
    second = model.layers[1]

    assert apply_activation_checkpointing(model, lambda module: module is second) == ["layers.1"]
    with pytest.raises(
        ValueError, match=r"accepts no module of Model; it is called with each one, of the classes Block"
    ):
        apply_activation_checkpointing(model, lambda module: False)


def inputs_that_live_on_the_device(offload):
    """Of three layers on the stand-in for `neuron`, between forward and backward; and the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 1))
    model.to(nxd_state.get_device())
    seen = []
    for layer in model[1:3]:
        layer.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0].untyped_storage())))
    apply_activation_checkpointing(model, lambda module: module in list(model[:3]), offload=offload)
    hidden = torch.ones(2, 4, device=nxd_state.get_device(), requires_grad=True)
    output = model(hidden).sum()
    gc.collect()
    alive = sum(it() is not None for it in seen)
    output.backward()
    return alive, [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the stand-in needs torch 2.13")
def test_inputs_kept_on_the_host_take_no_memory_of_the_device():
    ((kept, expected),) = run_on_neuron(inputs_that_live_on_the_device, 1, False)
    ((offloaded, found),) = run_on_neuron(inputs_that_live_on_the_device, 1, True)

    assert (kept, offloaded) == (2, 0)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
