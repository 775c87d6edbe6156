"""Checkpoints from before they said under one key which model they are of: a run's, kept here, and a script's."""

import shutil
from pathlib import Path

import nxd_ckpt
import pytest
import torch
from nxd_engine.checkpoints.find import open_own
from nxd_engine.checkpoints.state import kind_of, model_state
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_trainer.export import export_hugging_face
from nxd_trainer.generate import load_for_generation
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import prepare_run
from safetensors.torch import load_file
from writers_and_readers import (
    SIZES,
    begin_by_train,
    differing,
    initialize_model_parallel,
    initialize_parallel_optimizer,
    load_checkpoint,
    neuronx_distributed_config,
)

OF_A_RUN = Path(__file__).parent / "written_before"  # of two steps of `nxd train` in one process
CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def test_run_written_before_resumes_at_another_layout(run_ranks, text, tmp_path):
    shutil.copytree(OF_A_RUN, tmp_path / "checkpoints")
    settings = [
        f"data.path={text}",
        f"output={tmp_path}",
        "data.sequence_length=16",
        "model.hidden_size=8",
        "model.intermediate_size=16",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "model.num_key_value_heads=1",
        "model.max_position_embeddings=64",
        "model.tie_word_embeddings=true",
        "train.global_batch_size=4",
        "parallel.tensor_parallel_size=2",
    ]

    def resume():
        initialize_model_parallel(2)
        state, tag = prepare_run(load_recipe(None, settings))
        return tag, state.step, differing(state.model, OF_A_RUN, state.optimizer)

    assert run_ranks(resume, 2) == [("step-00000002", 2, [])] * 2


def test_run_written_before_loads_in_a_script_with_its_optimizer(run_ranks):
    def load():
        config = neuronx_distributed_config(tensor_parallel_size=2)
        model = LlamaForCausalLM(CONFIG)
        optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-3)
        load_checkpoint(OF_A_RUN, model=model, optimizer=optimizer)
        return differing(model, OF_A_RUN, optimizer)

    assert run_ranks(load, 2) == [[], []]


def test_run_written_before_generates_with_its_tokenizer_and_is_exported(run_ranks, tmp_path):
    def generates() -> tuple[list[str], LlamaConfig, int]:
        initialize_model_parallel(2)
        model, tokenizer = load_for_generation(OF_A_RUN)
        return differing(model, OF_A_RUN), model.config, tokenizer.vocab_size

    assert run_ranks(generates, 2) == [([], CONFIG, 257)] * 2
    export_hugging_face(OF_A_RUN, tmp_path / "exported")
    checkpoint = open_own(OF_A_RUN, None)
    names = {name for name in checkpoint.tensors if kind_of(name) == "model"}
    assert load_file(tmp_path / "exported/model.safetensors").keys() == names


def test_weights_without_a_description_begin_a_run_but_say_what_generating_takes(run_ranks, text, tmp_path):
    torch.manual_seed(1)
    model = LlamaForCausalLM(SIZES, dtype=torch.float64)
    nxd_ckpt.save(tmp_path / "undescribed", "a", model_state(model))

    assert run_ranks(begin_by_train, 2, tmp_path / "undescribed", tmp_path / "run", text) == [[], []]
    for read in (load_for_generation, lambda folder: export_hugging_face(folder, tmp_path / "exported")):
        with pytest.raises(ValueError, match="does not say which model it holds; pass a folder of the same model"):
            read(tmp_path / "undescribed")
