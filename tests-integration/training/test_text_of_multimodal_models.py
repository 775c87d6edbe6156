"""Multimodal folders train on text alone: losses at every layout, towers that stay as they are, whole exports."""

import sys
from pathlib import Path

import pytest
import torch
from nxd_parity import InFloat64
from nxd_state import initialize_model_parallel
from nxd_trainer.export import export_hugging_face
from nxd_trainer.from_recipe import PACKED_TYPES_OF_TEXT, recipe_model
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import train

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
pytest.importorskip("torchvision", reason="processors of images need it: pip install torchvision")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

FAMILIES = ["gemma3", "qwen2_5_vl", "llava_next", "mistral3", "mllama"]
FEW = ["gemma3", "mllama"]
EACH = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
RUN = ["train.steps=4", "train.eval_every=0", "train.gradient_accumulation_steps=2"]
TWO_REPLICAS = (2, "parallel.zero_stage=1")
TENSOR_PARALLEL = (2, "parallel.tensor_parallel_size=2")
PIPELINE = (2, "parallel.pipeline_parallel_size=2")


@pytest.fixture(scope="session")
def folder_of_family(tmp_path_factory):
    """`folder_of_family("gemma3")`: the folder of one of the small models of `hf_survey.vision`, in float64."""
    from hf_survey.vision import write_vision_folder

    root = tmp_path_factory.mktemp("families")

    def make(family):
        if not (root / family).exists():
            write_vision_folder(family, root / family, dtype=torch.float64)
        return root / family

    return make


def run(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    train(recipe)


@pytest.fixture
def trained(run_ranks, settings, folder_of_family, tmp_path, capfd):
    """`trained("gemma3", "one", 1, ...)`: the losses, the tensors of the exported folder, and what the run said."""
    from safetensors.torch import load_file

    def make(family, name, ranks, *more, again=False):
        own = [it for it in settings if not it.startswith("model.")]
        output = tmp_path / name
        run_ranks(run, ranks, [*own, *RUN, f"model.path={folder_of_family(family)}", f"output={output}", *more])
        exported = export_hugging_face(output / "checkpoints", tmp_path / f"{name}-exported{'-again' * again}")
        losses = [record.loss for record in read_records(output / "metrics.jsonl")]
        return losses, load_file(exported / "model.safetensors"), exported

    return make


def logits(folder):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40, 52)[None]).logits


@pytest.mark.parametrize("family", EACH)
def test_every_use_of_the_towers_trains_the_same_language_model_at_every_layout(trained, folder_of_family, family):
    from safetensors.torch import load_file

    before = load_file(folder_of_family(family) / "model.safetensors")
    losses, expected, folder = trained(family, "frozen", 1)
    runs = [
        trained(family, "replicas", *TWO_REPLICAS),
        trained(family, "left-out", 1, "model.towers=left_out"),
        trained(family, "tensor-parallel", *TENSOR_PARALLEL),
        trained(family, "stages", *PIPELINE),
        trained(family, "stages-without-towers", *PIPELINE, "model.towers=left_out"),
        trained(family, "left-out-of-replicas", *TWO_REPLICAS, "model.towers=left_out"),
    ]

    assert losses[-1] < losses[0]
    unchanged = {name for name, value in expected.items() if torch.equal(value, before[name])}
    assert any("vision" in name or "visual" in name for name in unchanged)
    assert any("embed_tokens" in name for name in expected.keys() - unchanged)
    for other, tensors, _ in runs:
        assert other == pytest.approx(losses, rel=1e-6)  # norms and the loss are in float32
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-5, msg=name)
            assert name not in unchanged or torch.equal(tensors[name], value), name
    assert torch.equal(logits(folder), logits(runs[1][2]))


@pytest.mark.parametrize("family", [*FEW, *(pytest.param(it, marks=pytest.mark.slow) for it in PACKED_TYPES_OF_TEXT)])
def test_every_type_whose_text_may_be_packed_keeps_documents_apart(family):
    from hf_survey.vision import vision_model

    model = vision_model(family).eval()
    lengths = [5, 1, 12, 20]
    tokens = torch.randint(5, 300, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths]).view(1, -1)

    with torch.no_grad(), InFloat64():
        packed = model(input_ids=tokens, position_ids=positions).logits
        alone = [model(input_ids=part).logits for part in tokens.split(lengths, dim=1)]

    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-12)


def test_text_is_packed_if_the_towers_are_left_out(settings, folder_of_family):
    own = [it for it in settings if not it.startswith("model.")]
    packed = [*own, f"model.path={folder_of_family('gemma3')}", "data.chat=true", "data.packing=true"]

    with pytest.raises(ValueError, match=r"type gemma3 apart in text alone; set model.towers=left_out"):
        recipe_model(load_recipe(None, packed))
    assert "position_ids" in recipe_model(load_recipe(None, [*packed, "model.towers=left_out"])).input_names


def test_a_resumed_run_without_towers_equals_the_run_that_never_stopped(trained):
    losses, expected, _ = trained("gemma3", "whole", 1, "model.towers=left_out")
    trained("gemma3", "stopped", 1, "model.towers=left_out", "train.stop_after=2")

    resumed, tensors, _ = trained("gemma3", "stopped", *TWO_REPLICAS, "model.towers=left_out", again=True)

    assert resumed == pytest.approx(losses, rel=1e-6)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_a_run_that_resumes_keeps_the_use_of_its_towers(trained):
    trained("gemma3", "run", 1, "train.stop_after=2")

    with pytest.raises(RuntimeError, match=r"model.towers is left_out, the checkpoint has frozen"):
        trained("gemma3", "run", 1, "model.towers=left_out", again=True)


def test_adapters_are_on_the_language_model_and_on_towers_that_are_named(trained, folder_of_family):
    from safetensors.torch import load_file

    before = load_file(folder_of_family("gemma3") / "model.safetensors")

    def changed(name, *more):
        _, tensors, _ = trained("gemma3", name, 1, "lora.rank=2", *more)
        assert tensors.keys() == before.keys()
        return {key for key, value in tensors.items() if not torch.equal(value, before[key])}

    by_default = changed("default")
    assert by_default
    assert all(".language_model." in name or "language_model.model" in name for name in by_default)
    assert changed("left-out", "model.towers=left_out") == by_default
    projector = {name for name in before if "multi_modal_projector" in name}
    assert projector
    saved = changed("saved", "lora.modules_to_save=multi_modal_projector", "lora.target_modules=q_proj")
    assert not saved & projector  # text gives it no gradient


@pytest.mark.parametrize(("towers", "trained_towers"), [(None, False), ("frozen", False), ("train", True)])
def test_a_run_says_what_it_does_with_the_towers_which_are_frozen_by_default(folder_of_family, towers, trained_towers):
    chosen = [] if towers is None else [f"model.towers={towers}"]

    model = recipe_model(load_recipe(None, [f"model.path={folder_of_family('gemma3')}", *chosen]))

    trained = {name.split(".")[1] for name, it in model.make().named_parameters() if it.requires_grad}
    assert ("vision_tower" in trained) == ("multi_modal_projector" in trained) == trained_towers
    assert "language_model" in trained
    [note] = model.notes
    done = "trained" if trained_towers else "frozen"
    assert note.startswith(f"towers {done}: model.vision_tower, model.multi_modal_projector, 19,272 parameters")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.towers=train"], "model.towers=train is for the multimodal models of model.path"),
        (["model.path=here", "model.towers=train", "lora.rank=2"], "name them there, or in lora.target_modules"),
        (["model.path=here", "model.towers=left_out", "checkpoint.initial_weights=there"], "towers from model.path"),
    ],
)
def test_uses_of_towers_that_contradict_other_keys_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(None, settings)
