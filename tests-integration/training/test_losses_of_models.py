"""Every model that a recipe can name, in every layout: ten steps on real text give the losses of plain transformers.

The text is that of a package of Python's standard library. Both sides compute in float64, also what the models of
transformers compute in float32 whatever their weights are (norms, rotary positions, the loss).
"""

import json

import pytest
import runs_by_hand
import torch
from nxd_data import ByteTokenizer, TrainLoader, build_corpus, open_corpus, pack_corpus
from nxd_parity import InFloat64
from nxd_trainer.report import read_records
from runs_by_hand import settings_of_own_llama, train_by_hand, train_in_float64

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

STEPS, BATCH, SEQUENCE, RATE = 10, 4, 24, 3e-3
SIZES = runs_by_hand.SIZES | {"vocab_size": 260}
SPECIAL = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
HEADS = {"head_dim": 8}
MODELS = {
    "own Llama": ("llama", {}),
    "Llama": ("llama", {}),
    "Qwen3": ("qwen3", HEADS),
    "Gemma 3": ("gemma3_text", HEADS | {"sliding_window": 8, "tie_word_embeddings": True}),
    "Mixtral": ("mixtral", {"num_local_experts": 4}),
    "GPT-OSS": ("gpt_oss", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "Phi-3": ("phi3", {}),
    "GLM-4": ("glm4", HEADS),
}
LAYOUTS = {
    "TP 2": (2, ["parallel.tensor_parallel_size=2"]),
    "PP 2": (2, ["parallel.pipeline_parallel_size=2", "train.gradient_accumulation_steps=2"]),
    "TP 2 x PP 2": (
        4,
        [
            "parallel.tensor_parallel_size=2",
            "parallel.pipeline_parallel_size=2",
            "train.gradient_accumulation_steps=2",
        ],
    ),
    "TP 2 x SP": (2, ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]),
    "DP 2 + ZeRO-1": (2, ["parallel.zero_stage=1"]),
    "CP 2": (2, ["parallel.context_parallel_size=2"]),
    "CP 2 x TP 2 + SP": (
        4,
        [
            "parallel.context_parallel_size=2",
            "parallel.tensor_parallel_size=2",
            "parallel.sequence_parallel=true",
        ],
    ),
}
MIXTURES = ("Mixtral", "GPT-OSS")
WITH_EXPERTS = {
    "EP 2 + ZeRO-1": (2, ["parallel.expert_parallel_size=2", "parallel.zero_stage=1"]),
    "EP 2 over CP 2": (2, ["parallel.expert_parallel_size=2", "parallel.context_parallel_size=2"]),
    "EP 2 over TP 2": (
        2,
        [
            "parallel.tensor_parallel_size=2",
            "parallel.expert_parallel_size=2",
            "parallel.expert_tensor_parallel_size=1",
            "parallel.sequence_parallel=true",
        ],
    ),
    "EP 2 x PP 2, recomputed": (
        4,
        [
            "parallel.expert_parallel_size=2",
            "parallel.pipeline_parallel_size=2",
            "train.gradient_accumulation_steps=2",
            "parallel.activation_checkpointing=full",
        ],
    ),
}
QUICK = [
    ("own Llama", "TP 2 x SP"),
    ("Llama", "TP 2 x SP"),
    ("Qwen3", "TP 2 x PP 2"),
    ("Gemma 3", "PP 2"),
    ("Mixtral", "TP 2 x SP"),
    ("Mixtral", "EP 2 + ZeRO-1"),
    ("GPT-OSS", "TP 2 x PP 2"),
    ("GLM-4", "TP 2"),
    ("own Llama", "CP 2"),
    ("GPT-OSS", "EP 2 over CP 2"),
]


def config_of(name):
    model_type, further = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **SPECIAL, **further})
    config._experts_implementation = "eager"  # grouped products know no float64
    return config


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of("Qwen3")`: a model in float64, with random weights, as transformers saves it."""
    root = tmp_path_factory.mktemp("models")

    def make(name):
        folder = root / name
        if not folder.exists():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config_of(name)).double()
            model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def tokens_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def losses_of(folder_of, tokens_folder):
    """`losses_of("Qwen3")`: those of transformers in one process, by a loop as anybody would write it."""
    found = {}

    def run(name):
        if name in found:
            return found[name]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float64)
        model.config._experts_implementation = "eager"
        corpus = build_corpus(text_folder(), ByteTokenizer(), cache_folder=tokens_folder, suffixes=(".py",))
        sequences, _ = pack_corpus(open_corpus(corpus), sequence_length=SEQUENCE, held_out_fraction=0.05)
        batches = TrainLoader(sequences, global_batch_size=BATCH)

        def loss_of_step(_):
            [batch] = batches.next_step()
            with InFloat64():
                return model(batch.input_ids, labels=batch.labels, shift_labels=batch.labels, use_cache=False).loss

        found[name] = train_by_hand(model.parameters(), loss_of_step, steps=STEPS, rate=RATE)
        return found[name]

    return run


def text_folder():
    """Some files of the running Python's standard library."""
    return json.__path__[0]


def settings_of(name, folder, output, tokens):
    settings = [
        f"output={output}",
        f"data.path={text_folder()}",
        f"data.cache_folder={tokens}",
        "data.suffixes=.py",
        f"data.sequence_length={SEQUENCE}",
        f"train.steps={STEPS}",
        f"train.global_batch_size={BATCH}",
        "train.dtype=float64",
        "train.log_every=1",
        "train.eval_every=0",
        f"optimizer.lr={RATE}",
        "optimizer.warmup_steps=2",
        "checkpoint.save_every=0",
    ]
    if name != "own Llama":
        return [*settings, f"model.path={folder}"]
    return [*settings, *settings_of_own_llama(folder, SIZES)]


CELLS = [
    pytest.param(model, layout, id=f"{model}, {layout}", marks=[] if (model, layout) in QUICK else pytest.mark.slow)
    for model in MODELS
    for layout in [*LAYOUTS, *(WITH_EXPERTS if model in MIXTURES else ())]
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layout"), CELLS)
def test_losses_are_those_of_a_loop_of_transformers(
    run_ranks, folder_of, losses_of, tokens_folder, tmp_path, model, layout
):
    ranks, degrees = (LAYOUTS | WITH_EXPERTS)[layout]

    run_ranks(
        train_in_float64, ranks, [*settings_of(model, folder_of(model), tmp_path / "run", tokens_folder), *degrees]
    )

    losses = [record.loss for record in read_records(tmp_path / "run/metrics.jsonl")]
    assert losses == pytest.approx(losses_of(model), rel=1e-10, abs=0)
    assert losses[-1] < losses[0]


def test_model_whose_split_nobody_has_compared_is_refused(run_ranks, tokens_folder, tmp_path):
    settings = settings_of("own Llama", tmp_path, tmp_path / "run", tokens_folder)
    kept = [it for it in settings if not it.startswith(("model.", "checkpoint.initial"))]

    with pytest.raises(RuntimeError, match="models of type 'doge' are not split by their own plan"):
        run_ranks(train_in_float64, 2, [*kept, "model.type=doge", "parallel.tensor_parallel_size=2"])
