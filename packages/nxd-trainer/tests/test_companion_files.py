"""The files of tokenizers travel with a model, and no other file of this machine does."""

import json
import os
import shutil

import nxd_ckpt
import pytest
import torch
from nxd_ckpt.interop import as_extra, companions_in, read_companions, write_companions
from nxd_engine.checkpoints.model_description import describe_llama
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_trainer.export import export_hugging_face
from nxd_trainer.opened_model import open_codec, open_model
from safetensors.torch import load_file

CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
FILES = {"tokenizer.json": b"{}", "chat_template.jinja": b"x", "additional_chat_templates/tool_use.jinja": b"y"}


def save(root, *, tokenizer=None, files=FILES, **described):
    description = describe_llama(CONFIG, tokenizer=tokenizer)
    objects = {"model": {**description.as_objects()["model"], **described}}
    state = dict(LlamaForCausalLM(CONFIG, dtype=torch.float32).state_dict())
    nxd_ckpt.save(root, "a", state, objects=objects, extra=as_extra(files))


def test_folder_gives_the_files_of_its_tokenizer_and_no_others(tmp_path):
    others = ("token", "tokens.json", "api_token.txt", "id_rsa", "config.json", "model.safetensors", "vocab.secret")
    write_companions(FILES | {"generation_config.json": b"{}", "tokenizer_config.json": b"{}"}, tmp_path)
    for name in others:
        (tmp_path / name).write_text("private")

    assert read_companions(tmp_path).keys() == {*FILES, "generation_config.json", "tokenizer_config.json"}
    assert read_companions(tmp_path / "tokenizer.json").keys() == {*FILES, "tokenizer_config.json"}


def test_link_out_of_a_folder_is_refused_by_name_and_one_in_the_hubs_cache_is_not(tmp_path):
    (tmp_path / "private").write_text("private")
    folder = tmp_path / "models--a--b/snapshots/abc"
    folder.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").mkdir()
    (tmp_path / "models--a--b/blobs/1").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/1")

    assert read_companions(folder) == {"tokenizer.json": b"{}"}

    (folder / "tokenizer_config.json").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is a symbolic link that points outside .*private"):
        read_companions(folder)


def test_checkpoint_carries_the_files_and_exports_them(tmp_path):
    save(tmp_path / "checkpoints")

    export_hugging_face(tmp_path / "checkpoints", tmp_path / "exported")

    assert companions_in(nxd_ckpt.open_checkpoint(tmp_path / "checkpoints", "a")) == FILES
    assert read_companions(tmp_path / "exported") == FILES


def test_export_like_another_folder_keeps_the_tokenizer_that_was_trained_with(tmp_path):
    save(tmp_path / "checkpoints")
    export_hugging_face(tmp_path / "checkpoints", tmp_path / "like")
    for name in ("tokenizer.json", "vocab.json", "generation_config.json"):
        (tmp_path / "like" / name).write_text('"the base\'s"')

    export_hugging_face(tmp_path / "checkpoints", tmp_path / "exported", like=tmp_path / "like")

    assert read_companions(tmp_path / "exported") == FILES | {"generation_config.json": b'"the base\'s"'}


def test_export_like_a_folder_with_only_a_config_writes_the_models_own_names(tmp_path):
    save(tmp_path / "checkpoints", files={})
    export_hugging_face(tmp_path / "checkpoints", tmp_path / "exported")
    (tmp_path / "like").mkdir()
    shutil.copy(tmp_path / "exported/config.json", tmp_path / "like")

    export_hugging_face(tmp_path / "checkpoints", tmp_path / "again", like=tmp_path / "like")

    exported, again = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "again"))
    assert exported.keys() == again.keys()


@pytest.mark.parametrize("key", ["tokenizer", "folder"])
def test_what_a_checkpoint_names_on_this_machine_is_never_opened(tmp_path, key):
    private = tmp_path / "private"
    private.mkdir()
    (private / "token").write_text("hf_secret")
    (private / "tokenizer.json").write_text("{}")
    save(tmp_path / "checkpoints", files={}, **{key: str(private)})

    export_hugging_face(tmp_path / "checkpoints", tmp_path / "exported")
    with pytest.raises(ValueError, match="has no tokenizer"):
        open_codec(open_model(tmp_path / "checkpoints"))

    assert sorted(os.listdir(tmp_path / "exported")) == ["config.json", "model.safetensors"]


def test_files_of_a_checkpoint_with_other_names_are_not_taken(tmp_path):
    save(tmp_path / "checkpoints", files={"authorized_keys": b"x", "model.safetensors": b"x", "config.json": b"x"})

    assert companions_in(nxd_ckpt.open_checkpoint(tmp_path / "checkpoints", "a")) == {}


def test_codec_of_a_checkpoint_comes_from_its_own_files(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "</s>": 2, "<turn>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    generation = json.dumps({"eos_token_id": [3]}).encode()
    files = {"tokenizer.json": tokenizer.to_str().encode(), "generation_config.json": generation}
    save(tmp_path / "checkpoints", tokenizer="/elsewhere", files=files)

    codec = open_codec(open_model(tmp_path / "checkpoints"))

    assert codec.tokenizer.encode("b").tolist() == [1]
    assert codec.end_tokens == (2, 3)
