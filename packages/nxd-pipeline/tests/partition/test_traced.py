"""A traced model's stages compute what the model does, hold only what they use, and send only what they must."""

import pytest
import torch
from nxd_pipeline.partition import Wiring, trace_model, traced_partition
from torch import nn
from torch.nn import functional as F


def cut(model, cuts, **options):
    return traced_partition(model, trace_model(model, leaf_names=cuts, **options), cuts)


def run(stages, **values):
    """Plays the stages one after the other in this process."""
    for stage in stages:
        output = stage.module(*(values[name] for name in stage.inputs))
        values.update(zip(stage.outputs, output if len(stage.outputs) > 1 else (output,), strict=False))
    return output


class Layer(nn.Linear):
    """Returns more than the next layer uses."""

    def forward(self, hidden, mask=None):
        if mask is not None:  # a branch on an argument: not to be traced
            hidden = hidden * mask
        return super().forward(hidden), {"unused": hidden}


class Model(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(num_layers))
        self.unused = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("causal", torch.tril(torch.ones(8, 4)))

    def forward(self, x, flag=None, scale=2.0):
        assert flag is None
        mask = self.causal[: x.shape[0]] * (x > 0)
        skipped = x * self.gain
        hidden = skipped
        for layer in self.layers:
            hidden = layer(hidden, mask)[0]
        return {"hidden": hidden * self.gain, "parts": (skipped, hidden.shape[0] * scale)}


CUTS = ["layers.0", "layers.1"]


def test_stages_in_order_give_the_output_and_gradients_of_the_model():
    model = Model()
    x = torch.randn(5, 4)
    expected = model(x)
    wanted = torch.autograd.grad(expected["hidden"].sum(), model.gain)

    output = run(cut(model, CUTS), x=x)

    assert torch.equal(output["hidden"], expected["hidden"])
    assert torch.equal(output["parts"][0], expected["parts"][0])
    assert output["parts"][1] == 10.0
    torch.testing.assert_close(torch.autograd.grad(output["hidden"].sum(), model.gain), wanted)


def test_stages_hold_only_what_they_use_under_its_names():
    names = [{name for name, _ in stage.named_parameters()} for stage in cut(Model(), CUTS)]

    layer = [{f"layers.{index}.weight", f"layers.{index}.bias"} for index in range(3)]
    assert names == [layer[0] | {"gain"}, layer[1], layer[2] | {"gain", "unused.weight", "unused.bias"}]


class PartlyUsed(nn.Module):
    """Forward leaves out a tree of modules, a parameter beside a layer, a buffer, and another name of a weight."""

    def __init__(self):
        super().__init__()
        self.block = nn.Module()
        self.block.first, self.block.unused = nn.Linear(4, 4), nn.ModuleList([nn.BatchNorm1d(4)])
        self.block.gain = nn.Parameter(torch.ones(4))
        self.other_name = self.block.first.weight
        self.last = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        return self.last(self.block.first(x))


def test_stages_together_have_the_state_of_the_model_also_what_forward_does_not_use():
    model = PartlyUsed()

    first, last = cut(model, ["block.first"])

    assert set(first.state_dict()) == {"block.first.weight", "block.first.bias", "other_name"}
    assert set(last.state_dict()) == set(model.state_dict()) - set(first.state_dict())
    assert dict(last.named_modules())["block.unused.0"] is model.block.unused[0]
    assert dict(first.named_parameters(remove_duplicate=False))["other_name"] is model.other_name
    x = torch.randn(2, 4)
    assert torch.equal(run([first, last], x=x), model(x))


def test_values_skip_stages_and_what_follows_from_inputs_is_not_sent():
    wiring = Wiring(cut(Model(), CUTS))

    sent = {(edge.producer, edge.consumer): len(wiring.carried(edge.producer, edge.consumer)) for edge in wiring.edges}
    assert sent == {(0, 1): 1, (0, 2): 1, (1, 2): 1}  # hidden states, the skip; no mask, nothing unused
    assert all("x" in inputs for inputs in wiring.inputs)  # of which each stage computes its mask
    assert wiring.model_inputs == {"x"}


class Buffered(nn.Sequential):
    """Buffers of its own, saved and not, one in a module that is traced into, and a tensor made in the trace."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), Scaled())
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("derived", torch.full((4,), 2.0), persistent=False)

    def forward(self, x):
        return self[1](self[2](self[0](x * self.saved) * self.derived)) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(4), persistent=False)

    def forward(self, x):
        return x * self.factor


def test_stages_save_what_the_model_saves():
    model = Buffered()
    x = torch.randn(2, 4)
    saved = set(model.state_dict())

    stages = cut(model, ["0"])

    assert [set(stage.state_dict()) for stage in stages] == [
        {name for name in saved if name.startswith(("0.", "saved"))},
        {name for name in saved if name.startswith("1.")},
    ]
    assert torch.equal(run(stages, x=x), model(x))


class Noisy(nn.Sequential):
    def forward(self, x):
        noise = F.dropout(x, 0.5)
        return self[1](self[0](x) * noise) * noise


def test_random_values_are_made_once_and_sent():
    stages = cut(Noisy(nn.Linear(4, 4), nn.Linear(4, 4)), ["0"])

    assert [[node.target for node in stage.module.graph.nodes].count(F.dropout) for stage in stages] == [1, 0]
    assert len(stages[0].outputs) == 2


def branching(x):
    return x if x.sum() > 0 else -x


class Branching(nn.Sequential):
    def forward(self, x):
        return self[1](branching(self[0](x)))


def test_function_that_branches_needs_autowrap():
    model = Branching(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)

    with pytest.raises(ValueError, match=r"(?s)Branching cannot be traced in its own forward.*autowrap_functions"):
        cut(model, ["0"])
    assert torch.equal(run(cut(model, ["0"], autowrap_functions=[branching]), x=x), model(x))


class Gate(nn.Module):
    def forward(self, x):
        return branching(x)


class Gated(nn.Sequential):
    def forward(self, x):
        x = self[2](self[0](x)).view(x.shape[0], -1)
        return self[1](x + torch.arange(x.shape[1], device=x.device)), {"rows": x.dim(), "shape": x.shape[0]}


def test_module_that_branches_is_named_and_kept_whole_as_a_leaf():
    model = Gated(nn.Linear(4, 4), nn.Linear(4, 4), Gate())
    x = torch.randn(2, 4)

    with pytest.raises(ValueError, match=r"(?s)forward of '2', a Gate: TraceError.*leaf_module_cls=\['Gate'\]"):
        cut(model, ["0"])
    for leaf in ("Gate", Gate):
        output, sizes = run(cut(model, ["0"], leaf_classes=[leaf]), x=x)
        assert torch.equal(output, model(x)[0])
        assert sizes == {"rows": 2, "shape": 2}


class WithExtras(nn.Sequential):
    def forward(self, x, *, factor, **extras):
        return self[1](self[0](x) * factor) + extras["shift"]


def test_inputs_may_be_keywords_that_forward_does_not_name():
    model = WithExtras(nn.Linear(4, 4), nn.Linear(4, 4))
    x, shift = torch.randn(2, 4), torch.ones(4)

    stages = cut(model, ["0"], input_names=["x", "factor", "shift"])

    assert torch.equal(run(stages, x=x, factor=2.0, shift=shift), model(x, factor=2.0, shift=shift))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [(["layers.1", "layers.0"], "called earlier; swap them"), (["unused"], "never calls the layer 'unused'")],
)
def test_cuts_that_the_model_does_not_call_in_order_raise(cuts, message):
    with pytest.raises(ValueError, match=message):
        cut(Model(), cuts)


class WithHelper(Model):
    """Calls a method that a trace cannot follow."""

    def halve(self, hidden):
        return hidden / 2 if int(hidden.shape[-1]) == 4 else hidden

    def forward(self, x):
        for layer in self.layers:
            x = self.halve(layer(x)[0])
        return x


def test_method_of_an_object_stays_whole_in_every_stage():
    model, x = WithHelper(), torch.randn(2, 4)

    stages = cut(model, ["layers.0"], autowrap_obj_methods={model: ["halve"]})

    assert torch.equal(run(stages, x=x), model(x))
    assert "halve" not in vars(model)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("halve", "^autowrap_obj_methods .* pass a list of names"),
        (["quarter"], "^autowrap_obj_methods: WithHelper has no method quarter"),
    ],
)
def test_method_that_an_object_lacks_is_named(names, message):
    model = WithHelper()

    with pytest.raises(ValueError, match=message):
        cut(model, ["layers.0"], autowrap_obj_methods={model: names})
