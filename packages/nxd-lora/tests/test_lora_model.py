"""`LoraModel`: which layers a target names, what trains, and that training equals one process."""

import copy
import pickle

import nxd_state
import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RMSNorm, RowParallelLinear
from nxd_layers import gather_from_sequence_parallel_region as from_sequence
from nxd_lora import (
    LoraConfig,
    LoraModel,
    adapter_config,
    find_target_layers,
    gather_adapter,
    load_adapter,
)
from nxd_state import all_reduce_, get_group
from torch import nn


class Block(nn.Module):
    """A feed-forward block; one tensor-parallel degree and sequence-parallel choice, the same numbers at each."""

    def __init__(self, sequence_parallel):
        super().__init__()
        common = {"sequence_parallel_enabled": sequence_parallel, "dtype": torch.float64}
        self.norm = RMSNorm(6, **common)
        self.up_proj = ColumnParallelLinear(6, 8, gather_output=False, **common)
        self.down_proj = RowParallelLinear(8, 6, input_is_parallel=True, **common)

    def forward(self, hidden):
        return hidden + self.down_proj(torch.tanh(self.up_proj(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self, sequence_parallel=False):
        super().__init__()
        torch.manual_seed(0)
        self.sequence_parallel = sequence_parallel
        self.embed_tokens = ParallelEmbedding(
            12,
            6,
            dtype=torch.float64,
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=0,
            padding_idx=0,
        )
        self.layers = nn.ModuleList([Block(sequence_parallel) for _ in range(2)])

    def forward(self, ids, *, shift=0.0):
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.sequence_parallel:
            hidden = from_sequence(hidden, to_model_parallel=False)
        return (hidden + shift).square().mean()


TARGETS = ["embed_tokens", "up_proj", "down_proj"]


def config(**settings):
    return LoraConfig(**{"lora_rank": 2, "target_modules": TARGETS, **settings})


def train(sequence_parallel, steps, **settings):
    """Losses, and the adapter at the end, of some steps of AdamW."""
    model = LoraModel(Model(sequence_parallel), config(**settings))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        ids = torch.randint(12, (4, 2))
        loss = model(ids=ids)
        loss.backward()
        for parameter in trained:
            if getattr(parameter, "sequence_parallel_enabled", False) and get_group("tp").size > 1:
                all_reduce_(parameter.grad, get_group("tp"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    return losses, gather_adapter(model)


@pytest.mark.pairs
@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_training_at_any_layout_equals_one_process_and_changes_only_what_trains(
    on_tp, assert_same, tp, sequence_parallel, bias
):
    settings = {"bias": bias, "lora_dropout": 0.25, "use_rslora": True}
    losses, adapter = on_tp(1, lambda: train(False, 5, **settings))[0]

    for found, parts in on_tp(tp, lambda: train(sequence_parallel, 5, **settings)):
        assert found == pytest.approx(losses, rel=1e-9)
        assert parts.keys() == adapter.keys()
        for name, part in parts.items():
            assert_same(part, adapter[name], rtol=1e-6, atol=1e-8)  # AdamW divides by small numbers
    assert len(set(losses)) == 5


def trained_names(model):
    return {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}


def test_only_factors_train_and_chosen_biases():
    factors = {"layers.0.up_proj.lora_A", "layers.0.up_proj.lora_B"}
    modes = ("none", "all", "lora_only")
    models = {bias: LoraModel(Model(), config(bias=bias, target_modules=["0.up_proj"])) for bias in modes}

    assert trained_names(models["none"]) == factors
    assert trained_names(models["lora_only"]) == factors | {"layers.0.up_proj.bias"}
    biases = {f"layers.{i}.{name}_proj.bias" for i in range(2) for name in ("up", "down")}
    assert trained_names(models["all"]) == factors | biases
    for model in models.values():
        assert set(model.adapter_parameters()) == trained_names(model)


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (["up_proj"], ["layers.0.up_proj", "layers.1.up_proj"]),
        (["0.up_proj", "embed_tokens"], ["embed_tokens", "layers.0.up_proj"]),
        (["1"], ["layers.1.up_proj", "layers.1.down_proj"]),
        (r"layers\.\d\.(up|down)_proj", [f"layers.{i}.{name}_proj" for i in range(2) for name in ("up", "down")]),
    ],
)
def test_targets_name_layers_exactly_by_their_end_or_by_whole_parts(targets, adapted):
    model = LoraModel(Model(), config(target_modules=targets))

    names = [name.removesuffix(".lora_A").removesuffix(".lora_embedding_A") for name in model.adapter_parameters()]
    assert [name for name in names if not name.endswith("_B")] == adapted


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["up_pro"], r"'up_pro' matches nothing \(did you mean 'up_proj'.*\?\)\. Layers that can be adapted"),
        (["proj"], "'proj' matches nothing.*can be adapted: embed_tokens, up_proj, down_proj"),
        (["norm", "x_proj"], "'norm' names only RMSNorm, which LoRA cannot adapt; 'x_proj' matches nothing"),
        ("up_proj", "the regular expression 'up_proj' matches no whole name"),
        (None, "target_modules is not set; this model has these layers that can be adapted: embed_tokens"),
    ],
)
def test_targets_that_name_nothing_raise_and_leave_the_model_alone(targets, message):
    module = Model()

    with pytest.raises(ValueError, match=message):
        LoraModel(module, config(target_modules=targets))

    assert all(parameter.requires_grad for parameter in module.parameters())


def test_model_with_adapters_already_is_refused():
    model = LoraModel(Model(), config())

    with pytest.raises(ValueError, match=r"already has adapters; unload\(\) them first"):
        LoraModel(model.module, config())


def test_output_of_multi_head_attention_cannot_be_adapted():
    with pytest.raises(ValueError, match="names only NonDynamicallyQuantizableLinear"):
        LoraModel(nn.MultiheadAttention(4, 2), LoraConfig(target_modules=["out_proj"]))


def test_disabled_lora_leaves_the_model_as_it_is():
    model = LoraModel(Model(), LoraConfig(enable_lora=False))

    assert not model.adapter_parameters()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_inputs_pass_by_position_and_by_name_to_model_and_layers():
    torch.manual_seed(0)
    layer = LoraModel(nn.Sequential(nn.Linear(3, 2)), LoraConfig(target_modules=["0"])).module[0]
    nn.init.ones_(layer.lora_B)
    model, ids = LoraModel(Model(), config()), torch.arange(4)

    assert model(ids, shift=1.0) == model(ids=ids, shift=1.0)
    assert torch.equal(layer(torch.ones(3)), layer(input=torch.ones(3)))


def test_attributes_of_the_wrapped_model_are_reachable():
    model = LoraModel(Model(), config())

    assert model.sequence_parallel is False
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = model.no_such_name


def test_summary_counts_what_trains(capsys):
    LoraModel(Model(), config(target_modules=["up_proj"], lora_verbose=True))

    assert capsys.readouterr().out == "LoRA: 2 layers adapted (up_proj); 56 of 360 parameters train\n"


def test_copied_and_pickled_model_gives_the_same_numbers(fill_adapter):
    model, ids = LoraModel(Model(), config()), torch.arange(4)
    fill_adapter(model)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids), model(ids))
        nn.init.zeros_(other.module.layers[0].up_proj.lora_B)
        assert not torch.equal(other(ids), model(ids))


def test_compiled_model_with_adapters_gives_the_same_numbers(on_tp, fill_adapter, assert_same):
    def job():
        model, ids = LoraModel(Model(), config()), torch.arange(4)
        fill_adapter(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same(compiled(ids), model(ids))

    on_tp(2, job)


def test_adapter_loads_at_another_degree(on_tp, fill_adapter, assert_same):
    def job(adapter=None):
        model = LoraModel(Model(), config(bias="all"))
        if adapter is None:
            fill_adapter(model)
        else:
            load_adapter(model, adapter)
        return gather_adapter(model), model(torch.arange(4))

    adapter, loss = on_tp(4, job)[0]
    for found, other_loss in on_tp(2, job, adapter):
        assert all(torch.equal(found[name], adapter[name]) for name in adapter)
        assert_same(other_loss, loss)


def test_adapter_that_does_not_fit_is_refused_with_every_difference(on_tp):
    def job():
        model = LoraModel(Model(), config())
        adapter = gather_adapter(model)
        adapter["layers.0.up_proj.lora_C"] = adapter.pop("layers.0.up_proj.lora_A")
        adapter["layers.1.up_proj.lora_B"] = torch.ones(3, 3)
        with pytest.raises(ValueError, match="does not fit") as raised:
            load_adapter(model, adapter)
        return str(raised.value).splitlines()[1:]

    assert (
        on_tp(2, job)
        == [
            [
                "  layers.0.up_proj.lora_A is missing",
                "  layers.1.up_proj.lora_B has shape (3, 3), expected (8, 2)",
                "  the model has no layers.0.up_proj.lora_C",
            ]
        ]
        * 2
    )


def test_adapter_is_not_loaded_into_a_merged_model():
    model = LoraModel(Model(), config())
    adapter = gather_adapter(model)
    model.merge()

    with pytest.raises(RuntimeError, match=r"unmerge\(\) before"):
        load_adapter(model, adapter)


def test_adapter_of_several_pipeline_stages_is_gathered_from_all_and_loaded_by_each(run_ranks):
    def job():
        nxd_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        stage = nxd_state.get_group("pp").rank
        torch.manual_seed(stage)
        module = nn.ModuleDict({f"layer_{stage}": nn.Linear(3, 2)})
        model = LoraModel(module, LoraConfig(lora_rank=2, target_modules=[f"layer_{stage}"]))
        adapter = gather_adapter(model)
        load_adapter(model, {name: tensor + 1 for name, tensor in adapter.items()})
        targets = adapter_config(model)["target_modules"]
        with pytest.raises(ValueError, match="the model has no layer_2"):
            load_adapter(model, adapter | {"layer_2.lora_A": torch.ones(2, 3)})
        return adapter, gather_adapter(model), targets

    results = run_ranks(job, 2)

    for before, after, targets in results:
        assert set(before) == {f"layer_{stage}.lora_{name}" for stage in (0, 1) for name in "AB"}
        assert all(torch.equal(after[name], before[name] + 1) for name in before)
        assert targets == ["layer_0", "layer_1"]


class Part(nn.Module):
    """The second block of a model, under its name in the whole."""

    def __init__(self, whole):
        super().__init__()
        self.layers = nn.ModuleDict({"1": whole.layers[1]})


def test_part_of_a_model_gets_the_adapters_that_the_whole_has_there():
    whole = LoraModel(Model(), config(init_lora_weights="gaussian"))
    module = Model()
    layers = find_target_layers(module, config())

    part = LoraModel(Part(module), config(init_lora_weights="gaussian"), layers=layers)

    expected = {name: factor for name, factor in whole.factors().items() if name.startswith("layers.1.")}
    assert part.factors().keys() == expected.keys()
    assert all(torch.equal(factor, expected[name]) for name, factor in part.factors().items())
    assert {name for name, p in part.module.named_parameters() if p.requires_grad} == set(expected)


def test_reset_lets_adapters_add_nothing_and_train_again():
    plain = Model()
    model = LoraModel(Model(), config())
    ids = torch.arange(8).view(2, 4)
    for factor in model.factors().values():
        nn.init.normal_(factor)
    assert model(ids) != plain(ids)
    model.merge()

    model.reset()

    assert torch.equal(model(ids), plain(ids))
    model(ids).backward()
    trained = {name.rpartition(".")[2] for name, factor in model.factors().items() if factor.grad.count_nonzero()}
    assert trained == {"lora_embedding_A", "lora_B"}


def test_factors_of_ranks_that_were_not_seeded_alike_are_those_of_one_model(run_ranks):
    def factors():
        nxd_state.initialize_model_parallel(2)
        model = Model()
        torch.manual_seed(10 * get_group("dp").rank + get_group("tp").rank)
        return gather_adapter(LoraModel(model, config()))

    model = Model()
    torch.manual_seed(0)  # as rank 0
    of_one_process = gather_adapter(LoraModel(model, config()))
    for found in run_ranks(factors, 4):
        torch.testing.assert_close(found, of_one_process, rtol=0, atol=0)
