"""Models of recipes beside their losses: weights that no layout changes, resuming, adapters, checkpoints, factories."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import nxd_ckpt
import pytest
import torch
from nxd_engine.checkpoints.model_description import description_of
from nxd_state import get_world_group, initialize_model_parallel, is_transformers_model
from nxd_trainer.from_recipe import build_model, recipe_model
from nxd_trainer.generate import load_for_generation
from nxd_trainer.parity import compare
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import initial_weights, prepare_run, train
from nxd_trainer.training.parity_case import case_of_recipe

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

pytestmark = pytest.mark.sample(10)  # each takes its time

QWEN3 = ["model.type=qwen3", "model.config.head_dim=8", "model.tie_word_embeddings=true", "model.num_key_value_heads=2"]
ADAPTERS = ["lora.rank=2", "lora.target_modules=q_proj,up_proj"]
FACTORY = """
from types import SimpleNamespace

import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_cross_entropy
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.up = ColumnParallelLinear(width, 5 * heads, gather_output=False, pad=True)
        self.down = RowParallelLinear(5 * heads, width, input_is_parallel=True, pad=True)

    def forward(self, hidden):
        by_head = self.up(hidden).unflatten(-1, (-1, 5))  # fails where a rank has a part of a head
        return hidden + self.down(torch.relu(by_head).flatten(-2))


class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads)
        self.table = ParallelEmbedding(320, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(2)])
        self.head = ColumnParallelLinear(width, 320, bias=False, gather_output=False)

    def forward(self, input_ids, labels):
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return parallel_cross_entropy(self.head(hidden), labels).mean()
"""


def initialized(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    return recipe


def run(settings):
    train(initialized(settings))


def without_sizes(settings):
    return [it for it in settings if not it.startswith("model.")]


@pytest.fixture
def losses_of(run_ranks, settings, tmp_path):
    """`losses_of("one", 2, ...)`: of a run of four steps on two ranks, in a folder of that name."""

    def losses(name: str, ranks: int, *more: str) -> list[float]:
        shared = ["train.steps=4", "train.eval_every=0", "train.gradient_accumulation_steps=2"]
        own = settings if QWEN3[0] in more else without_sizes(settings)
        run_ranks(run, ranks, [*own, *shared, f"output={tmp_path / name}", *more])
        return [record.loss for record in read_records(tmp_path / name / "metrics.jsonl")]

    return losses


PIPELINE = ["parallel.pipeline_parallel_size=2", "train.gradient_accumulation_steps=2"]
FOUR_RANKS = ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"]


def test_random_weights_of_an_architecture_are_the_same_at_every_layout(losses_of):
    one = losses_of("one", 1, *QWEN3)

    assert losses_of("four", 4, *QWEN3, *FOUR_RANKS) == pytest.approx(one, rel=1e-6)  # norms are in float32


def test_no_rank_makes_more_than_its_part_of_a_random_model(run_ranks, settings):
    def made():
        recipe = initialized([*settings, *QWEN3, *FOUR_RANKS])
        model = recipe_model(recipe)
        built = build_model(recipe, model)
        in_memory = [name for name, it in model.make().named_parameters(remove_duplicate=False) if not it.is_meta]
        return in_memory, {name: tuple(it.shape) for name, it in built.named_parameters()}

    (names, shapes), _, (other_names, _), _ = run_ranks(made, 4)

    assert not {name for name in names if "layers.1." in name}
    assert not {name for name in other_names if "layers.0." in name}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (24, 32)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_our_llama_have_its_weights_and_are_all_that_a_rank_makes(run_ranks, settings, tied):
    def weights(*layout):
        recipe = initialized([*settings, f"model.tie_word_embeddings={tied}", *layout])
        model, outlines = recipe_model(recipe), []

        def make():
            outlines.append(model.make())
            return outlines[0]

        build_model(recipe, replace(model, make=make))
        parameters = dict(outlines[0].named_parameters(remove_duplicate=False))
        return {name: it.detach() for name, it in parameters.items() if not it.is_meta}

    [whole] = run_ranks(weights, 1)
    stages = run_ranks(weights, 2, *PIPELINE)

    assert [sorted({name.split(".")[2] for name in stage if "layers" in name}) for stage in stages] == [["0"], ["1"]]
    assert stages[0].keys() | stages[1].keys() == whole.keys()
    assert all(torch.equal(it, whole[name]) for stage in stages for name, it in stage.items())


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(QWEN3, id="whole"),
        pytest.param([*QWEN3, *ADAPTERS, "lora.dropout=0.1"], id="adapters", marks=pytest.mark.slow),
    ],
)
def test_run_goes_on_bitwise(losses_of, model):
    layout = [*model, "parallel.tensor_parallel_size=2", "parallel.zero_stage=1"]
    uninterrupted = losses_of("whole", 2, *layout)

    losses_of("parts", 2, *layout, "train.stop_after=2")

    assert losses_of("parts", 2, *layout) == uninterrupted


def test_adapters_on_the_weights_of_a_folder_are_alone_trained_and_saved(losses_of, settings, tmp_path):
    content = recipe_model(load_recipe(None, [*settings, *QWEN3])).description.config
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(dict(content)))
    model.double().save_pretrained(tmp_path / "folder")
    config = "model.config.max_position_embeddings=64"  # otherwise than in the folder
    lora = [f"model.path={tmp_path / 'folder'}", config, *ADAPTERS]

    one = losses_of("one", 1, *lora)
    two = losses_of("two", 2, *lora, "parallel.pipeline_parallel_size=2")

    assert two == pytest.approx(one, rel=1e-6)
    assert one[0] == losses_of("plain", 1, f"model.path={tmp_path / 'folder'}")[0]  # adapters begin with nothing to add
    checkpoint = nxd_ckpt.open_checkpoint(tmp_path / "two" / "checkpoints")
    weights = [name for name in checkpoint.tensors if not name.startswith(("optimizer/", "rng/"))]
    assert weights
    assert all("lora" in name for name in weights)
    one_layer = ["model.config.num_hidden_layers=1", 'model.config.layer_types=["full_attention"]']
    with pytest.raises(RuntimeError, match=r"layers\.1\.\S+ is in the folder, but not in the model"):
        losses_of("fewer", 1, *lora, *one_layer)


def test_run_does_not_go_on_with_other_adapters(losses_of, tmp_path):
    losses_of("one", 1, *QWEN3, "train.stop_after=2")
    kept = sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir())

    with pytest.raises(RuntimeError, match=r"belongs to another run: lora\.rank is 2, the checkpoint has 0"):
        losses_of("one", 1, *QWEN3, *ADAPTERS)

    assert sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir()) == kept


def test_adapters_saved_with_their_base_go_on_without_the_first_weights(losses_of, tmp_path):
    losses_of("first", 1, *QWEN3)
    begun = [*QWEN3, *ADAPTERS, f"checkpoint.initial_weights={tmp_path / 'first' / 'checkpoints'}", "lora.save=both"]
    uninterrupted = losses_of("whole", 1, *begun)
    losses_of("parts", 1, *begun, "train.stop_after=2")
    shutil.rmtree(tmp_path / "first")

    assert losses_of("parts", 1, *begun) == uninterrupted


def test_run_whose_adapters_are_merged_does_not_go_on_with_them_apart(losses_of):
    losses_of("one", 1, *QWEN3, *ADAPTERS, "lora.save=merged", "train.stop_after=2")

    with pytest.raises(RuntimeError, match=r"belongs to another run: lora\.save is adapter, the checkpoint has merged"):
        losses_of("one", 1, *QWEN3, *ADAPTERS)


def test_adapters_do_not_go_on_upon_other_weights(losses_of):
    losses_of("one", 1, *QWEN3, *ADAPTERS, "train.stop_after=2")

    with pytest.raises(RuntimeError, match=r"belongs to another run: train\.seed is 7, the checkpoint has 0"):
        losses_of("one", 1, *QWEN3, *ADAPTERS, "train.seed=7")


def test_checkpoint_says_of_which_architecture_it_is_and_is_generated_from(losses_of, tmp_path):
    losses_of("one", 2, *QWEN3, "parallel.tensor_parallel_size=2")
    checkpoints = tmp_path / "one" / "checkpoints"

    description = description_of(nxd_ckpt.open_checkpoint(checkpoints))
    model, tokenizer = load_for_generation(checkpoints)

    assert (description.architecture, description.config["eos_token_id"]) == ("Qwen3ForCausalLM", 256)
    assert is_transformers_model(model)
    assert tokenizer.vocab_size == 257


def test_run_begins_with_the_weights_of_a_checkpoint_that_is_chosen_once(run_ranks, losses_of, settings, tmp_path):
    losses_of("one", 1, *QWEN3)
    begun = [f"checkpoint.initial_weights={tmp_path / 'one' / 'checkpoints'}"]
    expected = nxd_ckpt.open_checkpoint(tmp_path / "one" / "checkpoints").read("model.norm.weight")

    def begin(more):
        with patch.object(initial_weights, "find_checkpoint", wraps=initial_weights.find_checkpoint) as chosen:
            state, _ = prepare_run(initialized([*settings, *QWEN3, *more, "train.seed=3"]))
        found = dict(state.model.named_parameters()).get("model.norm.weight")
        return chosen.call_count, get_world_group().rank, None if found is None else torch.equal(found, expected)

    assert run_ranks(begin, 2, [*begun, "parallel.tensor_parallel_size=2", f"output={tmp_path / 'two'}"]) == [
        (1, 0, True),
        (0, 1, True),
    ]
    with pytest.raises(RuntimeError, match=r"belong to another model: model\.rms_norm_eps is 0\.5, there 1e-06"):
        run_ranks(begin, 1, [*begun, "model.rms_norm_eps=0.5", f"output={tmp_path / 'other'}"])
    with pytest.raises(RuntimeError, match=r"model\.model_type is mistral, there qwen3"):
        run_ranks(begin, 1, [*begun, "model.type=mistral", f"output={tmp_path / 'another'}"])


def test_parity_compares_the_model_that_a_recipe_names(run_ranks, settings):
    def report():
        recipe = load_recipe(None, [*settings, *QWEN3, "parallel.pipeline_parallel_size=2"])
        return compare(case_of_recipe(recipe, 1))

    first, _ = run_ranks(report, 2)

    assert first.agrees, str(first)


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Settings of a model that a module in the working directory makes."""
    (tmp_path / "own_models.py").write_text(FACTORY)
    return ["model.factory=own_models:Model", "model.config.width=16"], tmp_path


def run_in(folder: Path, settings):
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        return run(settings)
    finally:
        sys.path[:] = path
        sys.modules.pop("own_models", None)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(["model.config.heads=4"], id="whole"),
        pytest.param(["model.config.heads=3", "parallel.pad_heads=true"], id="padded"),
    ],
)
def test_model_of_a_factory_trains_at_every_layout_and_its_checkpoint_runs_nothing(
    run_ranks, settings, factory, tmp_path, heads
):
    named, folder = factory
    steps = ["train.steps=4", "train.eval_every=0", "train.gradient_accumulation_steps=2", *named, *heads]
    settings = without_sizes(settings)
    run_ranks(run_in, 1, folder, [*settings, *steps, f"output={tmp_path / 'one'}"])

    layout = [*FOUR_RANKS, "pipeline.layer_class=own_models:Block"]
    run_ranks(run_in, 4, folder, [*settings, *steps, *layout, f"output={tmp_path / 'four'}"])

    one, four = (read_records(tmp_path / name / "metrics.jsonl") for name in ("one", "four"))
    assert [record.loss for record in four] == pytest.approx([record.loss for record in one], rel=1e-10)
    with pytest.raises(ValueError, match=r"the function own_models:Model, and code that a checkpoint names is not run"):
        load_for_generation(tmp_path / "four" / "checkpoints")
    assert "own_models" not in sys.modules


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["model.type=qwen33"], r"model\.type=qwen33 is not a language model in transformers; did you mean qwen3"),
        (
            ["model.type=qwen3", "model.config.head_dimm=8"],
            r"model\.config\.head_dimm is not a key .* did you mean head_dim",
        ),
        (["model.type=gemma3"], r"use model\.type=gemma3_text"),
        (["model.type=gpt2", "model.intermediate_size=64"], r"model\.intermediate_size is not a size of gpt2"),
        (["model.type=gemma3_text", "model.rope_theta=5"], r"set model\.config\.rope_parameters"),
        (["model.type=qwen3", "model.vocab_size=100"], r"model\.vocab_size=100 is less than the tokenizer's 257 ids"),
        (
            ["model.type=qwen3", "model.config.vocab_size=100"],
            r"has a vocabulary of 100, less than the tokenizer's 257",
        ),
        (["model.path=nowhere"], r"nowhere/config\.json does not exist"),
        (["model.factory=no_such_module:make"], r"model\.factory=no_such_module:make cannot be imported from here"),
        (["model.factory=json:dumps", "model.config.obj=1"], r"returned a str; it must return a torch module"),
    ],
)
def test_model_that_cannot_be_had_is_refused_in_words(given, expected):
    with pytest.raises(ValueError, match=expected):
        recipe_model(load_recipe(None, given))


def test_keys_of_a_table_come_from_a_file_and_from_the_command_line(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('[model]\ntype = "qwen3"\n[model.config]\nhead_dim = 8\nattention_dropout = 0.5\n')

    recipe = load_recipe(file, ["model.config.attention_dropout=0.25", "model.hidden_size=32"])

    config = recipe_model(recipe).description.config
    assert (config["head_dim"], config["attention_dropout"], config["hidden_size"]) == (8, 0.25, 32)
