"""A model of transformers that is no Llama of ours: `save_checkpoint` says which it is, and others make it anew."""

import pytest
import torch
from nxd_trainer.api.checkpoint_tags import open_own
from nxd_trainer.compiled_generation import open_for_compilation
from nxd_trainer.export import export_hugging_face
from nxd_trainer.generate import generate, load_for_generation
from nxd_trainer.model_description import description_of
from writers_and_readers import (
    initialize_model_parallel,
    initialize_parallel_model,
    neuronx_distributed_config,
    save_checkpoint,
)

transformers = pytest.importorskip("transformers", reason="needs it: pip install transformers")

PROMPT = [3, 1, 4, 1, 5]


def qwen3():
    config = transformers.Qwen3Config(
        vocab_size=37,  # which two ranks do not divide
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).to(torch.float64)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Saved by two pipeline stages."""
    from nxd_state.testing import run_on_ranks

    def save(folder) -> None:
        stages = {"num_microbatches": 2, "input_names": ["input_ids", "labels"], "auto_partition": True}
        config = neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config=stages)
        save_checkpoint(folder, "first", initialize_parallel_model(config, qwen3))

    folder = tmp_path_factory.mktemp("checkpoints")
    run_on_ranks(save, 2, folder)
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_generate_writes_what_transformers_would(run_ranks, checkpoints, num_ranks):
    expected = qwen3().generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()

    def write() -> tuple[list[int], list[int]]:
        initialize_model_parallel(num_ranks)
        model, _ = load_for_generation(checkpoints, tokenizer="bytes")
        greedy, drawn = (
            list(generate(model, torch.tensor(PROMPT), max_new_tokens=8, temperature=temperature, top_k=top_k))
            for temperature, top_k in ((0, 0), (5.0, 1))
        )
        return greedy, drawn

    assert run_ranks(write, num_ranks) == [(expected, expected)] * num_ranks


def test_export_gives_the_model_to_transformers(checkpoints, tmp_path):
    export_hugging_face(checkpoints, tmp_path / "exported")

    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)

    expected = qwen3()
    assert type(found) is type(expected)
    for name, parameter in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


def test_what_only_our_llama_can_is_refused_with_advice(checkpoints):
    with pytest.raises(ValueError, match=r"'Qwen3ForCausalLM'\] is not a LlamaForCausalLM.*nxd generate runs it"):
        open_for_compilation(checkpoints, tokenizer="bytes")


def test_tokenizer_that_nobody_knows_is_asked_for(checkpoints):
    with pytest.raises(ValueError, match=r"does not say which tokenizer its model reads; give tokenizer="):
        load_for_generation(checkpoints)


def test_tokenizer_is_that_of_the_folder_that_the_model_was_loaded_from(tmp_path):
    qwen3().save_pretrained(tmp_path / "loaded")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "loaded")

    save_checkpoint(tmp_path / "checkpoints", "first", model)

    assert description_of(open_own(tmp_path / "checkpoints", None)).folder == str(tmp_path / "loaded")
