"""The whole way: train, go on at another layout, write text, export."""

import json

import nxd_ckpt
import pytest
import torch
from nxd_trainer.report import read_records
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def trained(nxd_in, tiny_in, tmp_path_factory):
    """The folder of a run of six steps that changed its layout after three, and what the second half printed."""
    folder = tmp_path_factory.mktemp("trained")
    settings = [*tiny_in(folder), "model.tie_word_embeddings=true", "train.gradient_accumulation_steps=2"]
    pipeline = ["--parallel.pipeline_parallel_size", "2", "--pipeline.trace_file", "run/timeline.json"]
    first = nxd_in(folder, "train", "--nproc", "2", *pipeline, *settings, "train.stop_after=3")
    assert first.returncode == 0, first.stderr
    second = nxd_in(folder, "train", "--nproc", "2", *settings, "checkpoint.background=true")
    assert second.returncode == 0, second.stderr
    return folder / "run", second


def test_train_resumed_at_another_layout_goes_on_where_it_was(trained):
    folder, second = trained

    records = read_records(folder / "metrics.jsonl")

    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.layout for record in records if record.layout] == ["TP 1 x PP 2 x DP 1", "TP 1 x DP 2"]
    assert f"held-out loss as resumed, at step 3: {records[2].held_out_loss:.4f}" in second.stderr
    assert "resumes from step-00000003" in second.stderr


def test_finished_run_prints_the_next_commands_and_how_to_train_longer(trained, nxd_in):
    folder, second = trained

    again = nxd_in(folder.parent, "train", "run/recipe.toml")

    assert "nxd generate run/checkpoints --prompt TEXT " in second.stdout.partition("\nnext:\n")[2]
    assert "nothing to do: the run is at step 6 and ends at 6" in again.stderr
    assert "add for example --train.steps 12, and to start anew --output FOLDER\n" in again.stderr


def test_train_pipeline_leaves_a_timeline_of_its_ranks(trained):
    folder, _ = trained

    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]

    assert {event["args"]["microbatch"] for event in events if "microbatch" in event.get("args", {})} == {0, 1}


def test_generate_writes_the_same_text_at_every_degree(trained, nxd):
    folder, _ = trained
    arguments = ["generate", str(folder / "checkpoints"), "--prompt", "the quick", "--max-new-tokens", "24"]

    whole, split = nxd(*arguments), nxd(*arguments, "--nproc", "2")

    assert whole.returncode == split.returncode == 0, split.stderr
    # gloo of torch 2.9 reports its connections first.
    texts = [run.stdout[run.stdout.index("the quick") :] for run in (whole, split)]
    assert len(texts[0]) > len("the quick")
    assert texts[0] == texts[1]


def test_export_has_the_names_and_values_of_the_hugging_face_model(trained, nxd, tmp_path):
    folder, _ = trained

    result = nxd("export", str(folder / "checkpoints"), "exported", "--dtype", "bfloat16")

    assert result.returncode == 0, result.stderr
    tensors = load_file(tmp_path / "exported/model.safetensors")
    checkpoint = nxd_ckpt.open_checkpoint(folder / "checkpoints")
    embedding = "model.embed_tokens.weight"
    assert torch.equal(tensors[embedding], checkpoint.read(embedding).bfloat16())
    assert "lm_head.weight" not in checkpoint.tensors  # tied: saved once
    assert "model.layers.1.self_attn.k_proj.weight" in tensors
    assert all(name.startswith("model.") for name in tensors)  # nothing of the optimizer
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["num_key_value_heads"] == 2
    assert config["torch_dtype"] == "bfloat16"


@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_export_gives_transformers_the_same_logits(nxd, tiny, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    from nxd_trainer.generate import load_for_generation

    # Other than the defaults of either side, and large enough to be seen in the logits.
    sizes = ["model.rope_theta=50", "model.rms_norm_eps=0.1", "model.initializer_range=0.2"]
    tied_setting = f"model.tie_word_embeddings={tied}"
    assert nxd("train", *tiny, *sizes, tied_setting, "train.steps=2", "train.eval_every=0").returncode == 0
    assert nxd("export", "run/checkpoints", "exported").returncode == 0

    ours, _ = load_for_generation(tmp_path / "run/checkpoints")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)

    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_export_into_a_folder_with_a_model_refuses(trained, nxd):
    export = ["export", str(trained[0] / "checkpoints"), "exported"]
    assert nxd(*export).returncode == 0

    result = nxd(*export)

    assert result.returncode == 2
    assert "exported already holds a model.safetensors" in result.stderr
