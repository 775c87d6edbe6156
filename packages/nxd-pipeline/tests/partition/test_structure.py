"""Stages cut by structure run the model's own forward, hold only their layers, and refuse what they cannot know."""

import copy

import pytest
import torch
from nxd_pipeline.partition import ModelStructure, Wiring, structural_partition
from torch import nn


class Layer(nn.Module):
    """Scales by its number, which the model reads, and returns a tuple."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden, mask, extra=None):
        hidden = torch.tanh(self.linear(hidden)) * mask
        return hidden if extra is None else hidden + extra, hidden.sum()


class Model(nn.Module):
    def __init__(self, *, passes_on=None):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.positions = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer(number) for number in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.passes_on = passes_on

    def forward(self, tokens, scale=1.0):
        embedded = self.embed(tokens).to(self.embed.weight.dtype)
        hidden = embedded + self.positions(torch.arange(tokens.shape[1]))
        mask = (tokens > 0).unsqueeze(-1).to(hidden.dtype)
        extra = {None: None, "embedding": embedded, "positions": self.positions(tokens)}[self.passes_on]
        for layer in self.layers:
            hidden, total = layer(hidden, mask, extra=extra)
            hidden = hidden + layer.number * total  # between the layers, by their plain attributes
        hidden = self.norm(hidden)
        if self.passes_on == "embedding":
            hidden = hidden + embedded
        return self.head(hidden) * scale


NAMES = tuple(f"layers.{index}" for index in range(4))
STRUCTURE = ModelStructure(NAMES, first=frozenset({"embed"}), last=frozenset({"norm", "head"}))
TOKENS = torch.tensor([[1, 2, 0], [3, 4, 5]])


def run(stages, **values):
    """Plays the stages one after the other in this process."""
    for stage in stages:
        output = stage.module(*(values[name] for name in stage.inputs))
        values.update(zip(stage.outputs, (output,), strict=False))
    return output


def cut(model, cuts, structure=STRUCTURE):
    return structural_partition(model, structure, cuts, ["tokens", "scale"])


@pytest.mark.parametrize("cuts", [["layers.1"], ["layers.0", "layers.1", "layers.2"], ["layers.2"], []])
@pytest.mark.parametrize("passes_on", [None, "positions"])
def test_stages_in_order_give_output_and_gradients_of_the_model(cuts, passes_on):
    model = Model(passes_on=passes_on).double()
    reference = copy.deepcopy(model)

    output = run(cut(model, cuts), tokens=TOKENS, scale=3.0)
    output.square().sum().backward()

    expected = reference(TOKENS, scale=3.0)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_stages_hold_their_layers_and_modules_of_unknown_place():
    stages = cut(Model(), ["layers.0", "layers.1"])

    names = [{name.split(".")[0] for name, _ in stage.named_parameters()} for stage in stages]
    assert names == [{"embed", "positions", "layers"}, {"positions", "layers"}, {"positions", "layers", "norm", "head"}]
    layers = [{name for name, _ in stage.named_parameters() if "layers" in name} for stage in stages]
    assert [len(it) for it in layers] == [2, 2, 4]
    assert {"layers.0", "embed", ""} <= {name for name, _ in stages[0].named_modules()}
    assert sum(not name for name, _ in stages[0].named_modules()) == 1
    assert Wiring(stages).model_inputs == {"tokens", "scale"}


def test_model_still_runs_whole_after_it_was_cut():
    model = Model()
    expected = model(TOKENS)

    stages = cut(model, ["layers.1"])

    assert torch.equal(model(TOKENS), expected)
    assert torch.equal(run(stages, tokens=TOKENS, scale=1.0), expected)


def test_layers_that_use_the_embedding_directly_are_refused():
    with pytest.raises(ValueError, match="uses more of the embeddings than the previous layer returns"):
        run(cut(Model(passes_on="embedding"), ["layers.1"]), tokens=TOKENS, scale=1.0)


class ReadsEmbedding(Model):
    def forward(self, tokens, scale=1.0):
        return super().forward(tokens, scale) @ self.embed.weight


def test_embedding_used_behind_the_layers_is_refused():
    stages = cut(ReadsEmbedding(), ["layers.1"])
    with pytest.raises(AttributeError, match="'weight' of 'embed', which is on another stage"):
        run(stages, tokens=TOKENS, scale=1.0)


class Shuffled(Model):
    def forward(self, tokens, scale=1.0):
        self.layers = nn.ModuleList([self.layers[2], self.layers[1], self.layers[0]])
        return super().forward(tokens, scale)


class Skipping(Model):
    def forward(self, tokens, scale=1.0):
        self.layers = self.layers[:1]
        return super().forward(tokens, scale)


def test_layers_that_are_never_called_are_refused():
    with pytest.raises(RuntimeError, match="did not call its layers in order on the stage of layers 0 to 1"):
        run(cut(Skipping(), ["layers.1"], ModelStructure(NAMES)), tokens=TOKENS, scale=1.0)


def test_layers_in_another_order_are_refused():
    stages = cut(Shuffled(), ["layers.1"])
    with pytest.raises(RuntimeError, match="calls a layer of a later stage before the layers of this stage"):
        run(stages, tokens=TOKENS, scale=1.0)


class Looped(Model):
    """Runs all layers twice, as models of recurrent depth do."""

    def forward(self, tokens, scale=1.0):
        hidden = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in [*self.layers] * 2:
            hidden, _ = layer(hidden, (tokens > 0).unsqueeze(-1))
        return self.head(hidden) * scale


def test_layers_that_the_model_loops_over_are_refused():
    stages = cut(Looped(), ["layers.1"])
    with pytest.raises(RuntimeError, match="calls a layer twice in one forward"):
        run(stages, tokens=TOKENS, scale=1.0)


@pytest.mark.parametrize("cuts", [["layers.2", "layers.0"], ["layers.3"], ["layers.1", "layers.1"]])
def test_cuts_out_of_order_are_refused(cuts):
    with pytest.raises(ValueError, match="must be in the order of the layers"):
        cut(Model(), cuts)


class Routed(nn.Module):
    """A layer whose router's output the loss uses, through a hook as models of transformers have them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2)

    def forward(self, hidden):
        return hidden * self.router(hidden).softmax(-1).sum(-1, keepdim=True) + hidden


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(3))

    def forward(self, tokens, scale=1.0):
        logits = []
        routers = [module for name, module in self.named_modules() if name.endswith("router")]
        hooks = [it.register_forward_hook(lambda _m, _a, out: logits.append(out)) for it in routers]
        for layer in self.layers:
            tokens = layer(tokens)
        for hook in hooks:
            hook.remove()
        return tokens.sum() + sum(index * it.square().sum() for index, it in enumerate(logits, 1)) * scale


def test_recorded_outputs_of_earlier_stages_come_to_the_last_in_order():
    model = Mixture().double()
    reference = copy.deepcopy(model)
    tokens = torch.randn(5, 4).double()
    structure = ModelStructure(NAMES[:3], recorded={name: ["router"] for name in NAMES[:3]})

    output = run(cut(model, ["layers.0", "layers.1"], structure), tokens=tokens, scale=2.0)
    output.backward()

    expected = reference(tokens, scale=2.0)
    expected.backward()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12)
