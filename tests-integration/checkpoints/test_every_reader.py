"""Whoever wrote a checkpoint, everybody reads it, at another layout: docs/reference/checkpoint-readers.md."""

import shutil

import pytest
import torch
import torch.distributed as dist
from nxd_engine.checkpoints.find import open_own
from nxd_engine.checkpoints.state import kind_of, model_state
from nxd_engine.models import LlamaForCausalLM
from nxd_testing import RankFailure
from nxd_trainer.compiled_generation import open_for_compilation
from nxd_trainer.export import export_hugging_face
from nxd_trainer.generate import load_for_generation
from nxd_trainer.training import prepare_run
from safetensors.torch import load_file
from writers_and_readers import (
    READERS,
    SIZES,
    WRITERS,
    differing,
    initialize_model_parallel,
    recipe_of,
    save_checkpoint,
)


@pytest.fixture(params=WRITERS)
def writer(request) -> str:
    """Each of them in turn, where what it needs is installed."""
    if "Lightning" in request.param:
        pytest.importorskip("lightning")
    if "transformers" in request.param:
        pytest.importorskip("transformers")
    return request.param


@pytest.mark.sample(3)
@pytest.mark.parametrize("reader", READERS)
def test_checkpoint_fills_the_model_of_every_reader(run_ranks, written, text, tmp_path, writer, reader):
    if reader == "Lightning":
        pytest.importorskip("lightning")
    if "transformers" in reader:
        pytest.importorskip("transformers")

    differences = run_ranks(READERS[reader], 2, written(writer), tmp_path, text)

    assert differences == [[], []]


def test_checkpoint_says_which_model_the_compiler_and_the_server_need(written, writer):
    checkpoints = written(writer)

    found = open_for_compilation(checkpoints, tokenizer="bytes")

    build = found.decoder_builder(1)
    assert (build.config, build.dtype, found.max_positions) == (SIZES, torch.float64, SIZES.max_position_embeddings)
    wanted = {name: tuple(tensor.shape) for name, tensor in model_state(build().model).items()}
    stored = {name: found.weights.tensors[name].global_shape for name in wanted}
    assert stored == wanted


@pytest.mark.slow  # compiles
def test_checkpoint_is_compiled_and_served(written, writer):
    with open_for_compilation(written(writer), tokenizer="bytes").compile(
        batch_size=1, max_length=32, compiler="export"
    ) as generator:
        (completion,) = generator.generate([[3, 1, 4]], max_new_tokens=4, temperature=0)
    assert len(completion.tokens) == 4


def test_checkpoint_becomes_a_folder_of_transformers(written, tmp_path, writer):
    transformers = pytest.importorskip("transformers", reason="needs it: pip install transformers")
    checkpoint = open_own(written(writer), None)

    export_hugging_face(written(writer), tmp_path / "exported")

    tensors = load_file(tmp_path / "exported/model.safetensors")
    assert tensors.keys() == {name for name in checkpoint.tensors if kind_of(name) == "model"}
    assert all(torch.equal(tensor, checkpoint.read(name)) for name, tensor in tensors.items())
    config = transformers.AutoConfig.from_pretrained(tmp_path / "exported")
    assert config.rope_parameters["rope_theta"] == SIZES.rope_theta
    assert config.rms_norm_eps == SIZES.rms_norm_eps


def test_run_resumes_from_its_own_checkpoints_only(run_ranks, written, text, tmp_path, writer):
    shutil.copytree(written(writer), tmp_path / "checkpoints")

    def resume():
        initialize_model_parallel(1, 2)
        state, tag = prepare_run(recipe_of(tmp_path, text, "parallel.pipeline_parallel_size=2"))
        return tag, state.step, differing(state.model, tmp_path / "checkpoints", state.optimizer)

    if writer == "nxd train":
        assert run_ranks(resume, 2) == [("step-00000002", 2, [])] * 2
    else:
        with pytest.raises(RankFailure, match=r"ValueError: .* is not a checkpoint of nxd train: .*initial_weights="):
            run_ranks(resume, 2)


def test_first_rank_chooses_the_newest_checkpoint_for_all(run_ranks, written, tmp_path):
    sooner, later = written("save_checkpoint"), tmp_path / "later"
    shutil.copytree(sooner, later)
    save_checkpoint(later, "finished meanwhile", LlamaForCausalLM(SIZES, dtype=torch.float64))

    def load():
        initialize_model_parallel(2)
        model, _ = load_for_generation(later if dist.get_rank() else sooner, tokenizer="bytes")
        return differing(model, sooner)

    assert run_ranks(load, 2) == [[], []]
