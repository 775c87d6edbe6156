"""A folder into a model of four ranks and back: tensors bit for bit, the files beside them, transformers' logits."""

import nxd_ckpt
import pytest
import torch
import transformers
from nxd_ckpt.interop import companions_in, open_hugging_face, read_whole
from nxd_engine import save_checkpoint
from nxd_engine.checkpoints.state import model_state, saved_here
from nxd_engine.hugging_face import import_hugging_face, load_pretrained, save_pretrained
from nxd_layers.hf import parallelize, param_init_fn_of
from nxd_pipeline import NxDPPModel
from nxd_state import initialize_model_parallel
from nxd_trainer.export import export_hugging_face

pytestmark = pytest.mark.sample(1)  # each takes its time

IDS = torch.arange(3, 17).view(2, 7)

# Two tables, one tied table, experts stored one by one, fused queries, keys and values, packed ones, and a table that
# has a buffer no file holds.
MODEL_TYPES = ["llama", "smollm3", "mixtral", "gpt_neox", "phi3", "gemma2"]
SPLIT = ["sarvam_moe", "lara_mini"]  # projections that files hold in one tensor, with routers in float32


def empty_model(folder):
    """Two stages of two ranks each."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model = parallelize(model)
    return NxDPPModel(model, num_microbatches=1, auto_partition=True, param_init_fn=param_init_fn_of(model))


def assert_same_folder(folder, expected):
    theirs, ours = open_hugging_face(expected), open_hugging_face(folder)
    assert dict(ours.tensors) == dict(theirs.tensors)
    for name in theirs.tensors:
        assert torch.equal(read_whole(ours, name).view(torch.uint8), read_whole(theirs, name).view(torch.uint8)), name
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (folder / file).read_bytes().strip() == (expected / file).read_bytes().strip(), file


def logits_of(folder):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def test_folder_to_checkpoint_of_four_ranks_to_folder_is_the_same(run_ranks, make_folder, tmp_path):
    folders = {name: make_folder(name, dtype=torch.bfloat16) for name in MODEL_TYPES}
    for name, folder in folders.items():
        import_hugging_face(folder, tmp_path / "imported", name)

    def resave():
        initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        for name, folder in folders.items():
            model = empty_model(folder)
            nxd_ckpt.load(tmp_path / "imported", name, into=model_state(model))
            nxd_ckpt.save(tmp_path / "checkpoints", name, saved_here(model, model_state(model)))

    run_ranks(resave, 4)

    for name, folder in folders.items():
        export_hugging_face(tmp_path / "checkpoints", tmp_path / "exported" / name, name, like=folder)
        assert_same_folder(tmp_path / "exported" / name, folder)
        assert torch.equal(logits_of(tmp_path / "exported" / name), logits_of(folder)), name
        export_hugging_face(tmp_path / "imported", tmp_path / "copied" / name, name)  # it remembers names and config
        assert_same_folder(tmp_path / "copied" / name, folder)


def test_model_of_four_ranks_loaded_and_saved_is_the_same_folder_and_computes_the_same(
    run_ranks, make_folder, tmp_path
):
    folders = {name: make_folder(name) for name in [*MODEL_TYPES, *SPLIT]}

    def load_and_save():
        initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        losses = {}
        for name, folder in folders.items():
            model = empty_model(folder)
            missing = load_pretrained(model, folder)
            save_pretrained(model, tmp_path / "saved" / name, like=folder, max_shard_size="40KB")
            losses[name] = missing, model.run_eval(input_ids=IDS, labels=IDS)
        return losses

    *_, last = run_ranks(load_and_save, 4)

    for name, folder in folders.items():
        assert_same_folder(tmp_path / "saved" / name, folder)
        assert len(list((tmp_path / "saved" / name).glob("*.safetensors"))) > 1
        missing, loss = last[name]
        assert missing == []
        with torch.no_grad():
            expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(IDS, labels=IDS).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0, msg=name)


def test_checkpoint_of_a_script_holds_the_tokenizer_of_the_folder_it_began_with(run_ranks, make_folder, tmp_path):
    folder = make_folder("llama")

    def save():
        initialize_model_parallel(tensor_model_parallel_size=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        save_checkpoint(tmp_path / "checkpoints", "a", model=parallelize(model))

    run_ranks(save, 2)

    companions = companions_in(nxd_ckpt.open_checkpoint(tmp_path / "checkpoints", "a"))
    assert companions["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()


def test_save_without_a_folder_to_follow_stores_transformers_own_names(run_ranks, make_folder, tmp_path):
    folder = make_folder("mixtral")

    def load_and_save():
        initialize_model_parallel(tensor_model_parallel_size=2)
        model = parallelize(transformers.AutoConfig.from_pretrained(folder))
        load_pretrained(model, folder)
        save_pretrained(model, tmp_path / "saved", dtype=torch.bfloat16)

    run_ranks(load_and_save, 2)

    saved = open_hugging_face(tmp_path / "saved")
    assert saved.tensors.keys() == open_hugging_face(folder).tensors.keys()
    assert {info.dtype for info in saved.tensors.values()} == {torch.bfloat16}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16
    torch.testing.assert_close(logits_of(tmp_path / "saved").float(), logits_of(folder), rtol=0, atol=0.02)


def test_failure_of_the_writing_rank_ends_all_ranks(run_ranks, make_folder):
    folder = make_folder("llama")

    def save_onto_itself():
        initialize_model_parallel(tensor_model_parallel_size=2)
        model = parallelize(transformers.AutoConfig.from_pretrained(folder))
        with pytest.raises((ValueError, RuntimeError), match=r"already holds a model\.safetensors\.index\.json"):
            save_pretrained(model, folder, like=folder)

    run_ranks(save_onto_itself, 2)
