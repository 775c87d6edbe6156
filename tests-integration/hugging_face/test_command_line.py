"""`nxd import`, `nxd export` and the recipe key `checkpoint.initial_weights`, as a person calls them."""

import json
import subprocess
import sys

import nxd_ckpt
import pytest
import torch
import transformers
from nxd_engine import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from nxd_engine.checkpoints.model_description import describe_llama
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_testing import deadline
from nxd_trainer.training.initial_weights import load_initial_weights
from safetensors.torch import load_file


def nxd(*arguments):
    command = [sys.executable, "-m", "nxd_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline(180), check=False)


def test_import_and_export_give_the_folder_back(make_folder, tmp_path):
    folder = make_folder("qwen3", max_shard_size="1GB")

    imported = nxd("import", folder, tmp_path / "checkpoints", "--tag", "begin")
    exported = nxd("export", tmp_path / "checkpoints", tmp_path / "exported", "--max-shard-size", "1GB")

    assert imported.stdout == f"wrote {tmp_path / 'checkpoints' / 'begin'}\n", imported.stderr
    weights = tmp_path / "exported" / "model.safetensors"
    assert exported.stdout == f"wrote {tmp_path / 'exported' / 'config.json'} and {weights}\n", exported.stderr
    theirs, ours = load_file(folder / "model.safetensors"), load_file(weights)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert json.loads((tmp_path / "exported" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )


def test_mistakes_are_one_line_without_a_traceback(make_folder, tmp_path):
    folder = make_folder("llama")
    nxd_ckpt.save(tmp_path / "checkpoints", "foreign", {"weight": torch.zeros(3)})
    nxd_ckpt.save(tmp_path / "fused", "neuronx", {"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(4, 2)})

    no_folder = nxd("import", tmp_path / "nowhere", tmp_path / "checkpoints")
    of_what = nxd("export", tmp_path / "checkpoints", tmp_path / "exported")
    other = nxd("export", tmp_path / "checkpoints", tmp_path / "exported", "--like", folder)
    fused = nxd("export", tmp_path / "fused", tmp_path / "exported", "--like", folder)
    bare = tmp_path / "bare"
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(bare)  # names no class
    other_than_config = nxd("export", tmp_path / "checkpoints", tmp_path / "exported", "--like", bare)

    for result, message in (
        (no_folder, "config.json does not exist"),
        (of_what, "does not say which model it holds; pass a folder of the same model"),
        (other, "the model does not match its config"),
        (other_than_config, "the model does not match its config"),
        (fused, "split a Llama's gate_up_proj by `nxd ckpt convert FOLDER OUT --to hf --sharding llama`"),
    ):
        assert result.returncode == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("imports", [True, False], ids=["of a checkpoint", "of a folder"])
def test_run_begins_with_the_weights_of_a_llama_at_any_degree(run_ranks, make_folder, tmp_path, imports):
    folder = make_folder("llama", dtype=torch.bfloat16)
    ids = torch.arange(3, 17).view(2, 7)
    begin = folder
    if imports:
        begin = tmp_path / "checkpoints"
        assert nxd("import", folder, begin).returncode == 0
    config = transformers.AutoConfig.from_pretrained(folder)
    sizes = {name: getattr(config, name) for name in LlamaConfig.__dataclass_fields__ if hasattr(config, name)}

    def load():
        own = LlamaConfig(**sizes)
        layout = neuronx_distributed_config(tensor_parallel_size=2)
        model = initialize_parallel_model(layout, LlamaForCausalLM, own)
        optimizer = initialize_parallel_optimizer(layout, torch.optim.SGD, model.parameters(), lr=0.0)
        load_initial_weights(model, optimizer, describe_llama(own), begin)
        other = describe_llama(LlamaConfig(**sizes | {"rms_norm_eps": 0.5}))
        with pytest.raises(ValueError, match=r"model\.rms_norm_eps is 0\.5, there"):
            load_initial_weights(model, optimizer, other, begin)
        return model(ids[:, :-1], ids[:, 1:])

    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = model(ids, labels=ids).loss
    for loss in run_ranks(load, 2):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_master_weights_begin_with_those_of_the_folder_too(run_ranks, make_folder):
    folder = make_folder("llama", dtype=torch.bfloat16)
    config = transformers.AutoConfig.from_pretrained(folder)
    sizes = {name: getattr(config, name) for name in LlamaConfig.__dataclass_fields__ if hasattr(config, name)}
    ids = torch.arange(3, 17).view(2, 7)

    def step_without_a_change():
        own = LlamaConfig(**sizes)
        layout = neuronx_distributed_config(optimizer_config={"zero_one_enabled": True})
        model = initialize_parallel_model(layout, LlamaForCausalLM, own, dtype=torch.bfloat16)
        optimizer = initialize_parallel_optimizer(layout, torch.optim.SGD, model.parameters(), lr=0.0)
        load_initial_weights(model, optimizer, describe_llama(own), folder)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        return all(map(torch.equal, before, model.parameters()))

    assert run_ranks(step_without_a_change, 2) == [True, True]
