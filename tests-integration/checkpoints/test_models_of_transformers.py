"""Models of transformers: whoever wrote a checkpoint, every reader has the model back, at another layout."""

from functools import partial

import pytest
import torch
from nxd_engine import save_checkpoint
from nxd_engine.checkpoints.find import open_own
from nxd_engine.checkpoints.model_description import description_of
from nxd_state import destroy_model_parallel
from nxd_trainer.compiled_generation import open_for_compilation
from nxd_trainer.export import export_hugging_face
from nxd_trainer.generate import generate, load_for_generation
from writers_and_readers import (
    LORA,
    OF_TRANSFORMERS,
    WRITERS_OF_TRANSFORMERS,
    begin_by_train,
    fit_by_lightning,
    initialize_model_parallel,
    load_by_script,
    of_transformers,
)

transformers = pytest.importorskip("transformers", reason="needs it: pip install transformers")

pytestmark = pytest.mark.sample(8)  # each takes its time

PROMPT = [3, 1, 4, 1, 5]
ADAPTER = "save_checkpoint of an adapter"
IMPORT = "nxd import"
SLOW = pytest.mark.slow
CELLS = [
    pytest.param(model_type, writer, marks=() if model_type == "qwen3" else SLOW)
    for model_type in OF_TRANSFORMERS
    for writer in WRITERS_OF_TRANSFORMERS
    if writer != ADAPTER or model_type != "phi3"  # whose q_proj is fused
]
every_cell = pytest.mark.parametrize(("model_type", "writer"), CELLS)
every_cell_without_adapter = pytest.mark.parametrize(
    ("model_type", "writer"), [cell for cell in CELLS if cell.values[1] != ADAPTER]
)


@pytest.fixture
def checkpoints(written, model_type, writer):
    """What the writer has left."""
    if writer == "Lightning":
        pytest.importorskip("lightning")
    return written(writer, model_type)


@torch.no_grad()
def whole(model_type, checkpoints):
    """The model of transformers with the weights of a checkpoint, put together by hand."""
    checkpoint, model = open_own(checkpoints, None), of_transformers(model_type)
    for name, parameter in model.named_parameters():
        parameter.copy_(checkpoint.read(name))
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A" in checkpoint.tensors:
            parameter.add_(LORA.scale * checkpoint.read(f"{layer}.lora_B") @ checkpoint.read(f"{layer}.lora_A"))
    return model.eval()


def greedy(model_type, checkpoints):
    """What transformers writes, as long as it does not depend on rounding."""
    tokens = whole(model_type, checkpoints).generate(
        torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    return tokens[0, len(PROMPT) :].tolist()


@pytest.mark.sample(3)
@every_cell
def test_load_checkpoint_fills_the_model_and_its_optimizer(run_ranks, checkpoints, text, tmp_path, model_type, writer):
    settings = {"lora_config": LORA} if writer == ADAPTER else {}
    tp = 1 if writer == ADAPTER else 2
    model_fn, with_optimizer = partial(of_transformers, model_type), writer != IMPORT
    load = partial(load_by_script, model_fn=model_fn, tp=tp, with_optimizer=with_optimizer, **settings)

    assert run_ranks(load, 2, checkpoints, tmp_path, text) == [[], []]


@every_cell_without_adapter  # it has no place in the weights that a run begins with
def test_nxd_train_begins_with_the_weights(run_ranks, checkpoints, text, tmp_path, model_type):
    begin = partial(begin_by_train, model_fn=partial(of_transformers, model_type), tp=2)

    assert run_ranks(begin, 2, checkpoints, tmp_path, text) == [[], []]


@pytest.mark.sample(3)
@every_cell_without_adapter  # a Trainer's module has none
def test_lightning_goes_on_with_the_model(run_ranks, checkpoints, text, tmp_path, model_type):
    pytest.importorskip("lightning")
    fit = partial(fit_by_lightning, model_fn=partial(of_transformers, model_type), tp=2)

    assert run_ranks(fit, 2, checkpoints, tmp_path, text) == [[], []]


@pytest.mark.sample(3)
@every_cell
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_generate_writes_what_transformers_would(run_ranks, checkpoints, model_type, writer, num_ranks):
    def write() -> tuple[list[int], list[int]]:
        initialize_model_parallel(num_ranks)
        model, _ = load_for_generation(checkpoints, tokenizer="bytes")
        likeliest, drawn = (
            list(generate(model, torch.tensor(PROMPT), max_new_tokens=16, temperature=temperature, top_k=top_k))
            for temperature, top_k in ((0, 0), (5.0, 1))
        )
        return likeliest, drawn

    expected = greedy(model_type, checkpoints)
    assert run_ranks(write, num_ranks) == [(expected, expected)] * num_ranks


COMPILED = [
    pytest.param(*cell.values, num_ranks, marks=() if (*cell.values, num_ranks) == ("qwen3", ADAPTER, 2) else SLOW)
    for cell in CELLS
    for num_ranks in (1, 2)
]


@pytest.mark.parametrize(("model_type", "writer", "num_ranks"), COMPILED)
def test_compiled_model_writes_what_transformers_would(checkpoints, tmp_path, model_type, writer, num_ranks):
    checkpoint = open_for_compilation(checkpoints, tokenizer="bytes")
    settings = {"batch_size": 2, "max_length": 32, "compiler": "export", "cache_dir": tmp_path}

    with checkpoint.compile(tp_degree=num_ranks, **settings) as generator:
        (found,) = generator.generate([PROMPT], max_new_tokens=16, temperature=0)

    assert found.tokens == greedy(model_type, checkpoints)


def test_what_cannot_be_compiled_is_refused_at_once_and_generated_with(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "layer_types": ["conv", "full_attention"]}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, **heads))
    save_checkpoint(tmp_path, "first", model)

    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM cannot be compiled .*its cache.*nxd generate runs it"):
        open_for_compilation(tmp_path, tokenizer="bytes").compile(batch_size=1)

    initialize_model_parallel(1)  # so does a process with ranks of its own
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM cannot be compiled .*its cache"):
        open_for_compilation(tmp_path, tokenizer="bytes").compile(batch_size=1)
    destroy_model_parallel()

    expected = model.eval().generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    found, _ = load_for_generation(tmp_path, tokenizer="bytes")
    tokens = generate(found, torch.tensor(PROMPT), max_new_tokens=8, temperature=0)
    assert list(tokens) == expected[0, len(PROMPT) :].tolist()


@every_cell
def test_export_gives_the_model_to_transformers(checkpoints, tmp_path, model_type, writer):
    export_hugging_face(checkpoints, tmp_path / "exported")

    expected = whole(model_type, checkpoints)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=expected.dtype)

    assert type(found) is type(expected)
    with torch.no_grad():
        logits, expected_logits = (model(torch.tensor([PROMPT])).logits for model in (found, expected))
    tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(logits, expected_logits, rtol=tolerance, atol=tolerance)


def test_tokenizer_that_nobody_knows_is_asked_for(written):
    with pytest.raises(ValueError, match=r"has no tokenizer; give tokenizer="):
        load_for_generation(written("save_checkpoint", "qwen3"))


def test_tokenizer_is_that_of_the_folder_that_the_model_was_loaded_from(tmp_path):
    of_transformers("qwen3").save_pretrained(tmp_path / "loaded")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "loaded")

    save_checkpoint(tmp_path / "checkpoints", "first", model)

    assert description_of(open_own(tmp_path / "checkpoints", None)).folder == str(tmp_path / "loaded")
