"""Preferences: losses of DPO are those of a loop by hand at any layout, and those of TRL's trainer.

One global batch is all pairs, in whatever order. The loop takes one answer at a time, without padding.
"""

import copy
import json
import random

import pytest
import torch
from nxd_lora import save_peft_adapter
from nxd_parity import InFloat64
from nxd_state import initialize_model_parallel
from nxd_trainer.lr_schedule import lr_multiplier
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import prepare_run, train
from runs_by_hand import SIZES, adamw_of, byte_tokenizer, settings_of_own_llama, train_by_hand, train_in_float64
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
tokenizers = pytest.importorskip("tokenizers", reason="chat templates need them: pip install tokenizers")

pytestmark = pytest.mark.sample(1)  # each takes its time

STEPS, LENGTH, RATE, BETA, NUM_PAIRS = 4, 48, 3e-3, 0.3, 8
SPECIAL = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
MICROBATCHES = "train.gradient_accumulation_steps=2"
LAYOUTS = {
    "one process": (1, []),
    "microbatches": (1, ["train.gradient_accumulation_steps=4"]),
    "TP 2": (2, [TP2]),
    "TP 2 x SP": (2, [TP2, "parallel.sequence_parallel=true"]),
    "PP 2": (2, [PP2, MICROBATCHES]),
    "DP 2 + ZeRO-1": (2, ["parallel.zero_stage=1", MICROBATCHES]),
    "TP 2 x PP 2": (4, [TP2, PP2, MICROBATCHES]),
}
SPLIT = ("TP 2", "PP 2", "TP 2 x PP 2")
QUICK = [("qwen3", "TP 2 x SP"), ("own Llama", "PP 2")]
LORA = ["lora.rank=4", "lora.alpha=8", "lora.save=both"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(pad_token="<end>")


@pytest.fixture(scope="module")
def rows():
    """Texts, with answers of very unequal lengths."""
    generator = random.Random(0)

    def text():
        return "".join(generator.choices("abcdef", k=generator.choice([1, 2, 3, 7, 15])))

    return [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(NUM_PAIRS)]


def as_messages(row):
    said = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": role, "content": row[name]}] for name, role in said.items()}


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    """By the form of their rows: texts, messages, and messages of which the prompt is a part of the answers."""
    folder = tmp_path_factory.mktemp("preferences")
    messages = [as_messages(row) for row in rows]
    joined = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in messages]
    forms = {"texts": rows, "messages": messages, "joined": joined}
    for name, content in forms.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    return {name: folder / f"{name}.jsonl" for name in forms}


@pytest.fixture(scope="module")
def folder_of(tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def make(model_type):
        folder = root / model_type
        if not folder.exists():
            torch.manual_seed(0)
            further = {"head_dim": 8} if model_type == "qwen3" else {}
            config = transformers.AutoConfig.for_model(model_type, **SIZES, **SPECIAL, **further)
            transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return make


def tokens_of(tokenizer, row, name, form):
    """Ids of prompt and answer, and where the answer begins."""
    if form == "texts":
        prompt, answer = tokenizer.encode(row["prompt"]), tokenizer.encode(row[name])
        return [*prompt, *answer, 0], len(prompt)
    prompt = [1, *tokenizer.encode(row["prompt"]), 0, 2]
    return [*prompt, *tokenizer.encode(row[name]), 0], len(prompt)


def losses_by_hand(model, reference, parameters, pairs, smoothing=0.0):
    """Of each step, by a loop as anybody would write it."""

    def log_prob(of, tokens, start):
        with InFloat64():
            logits = of(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
        return -F.cross_entropy(logits[start - 1 :], torch.tensor(tokens[start:]), reduction="sum")

    def loss_of_step(_):
        terms = []
        for pair in pairs:
            with torch.no_grad():
                base = [log_prob(reference, *answer) for answer in pair]
            chosen, rejected = (log_prob(model, *answer) - it for answer, it in zip(pair, base, strict=True))
            margin = BETA * (chosen - rejected)
            terms.append(-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin))
        return torch.stack(terms).mean()

    return train_by_hand(parameters, loss_of_step, steps=STEPS, rate=RATE)


@pytest.fixture(scope="module")
def expected_of(folder_of, tokenizer, rows):
    found = {}

    def run(model_type, form="texts", smoothing=0.0):
        key = model_type, form, smoothing
        if key not in found:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(model_type), dtype=torch.float64)
            pairs = [[tokens_of(tokenizer, row, name, form) for name in ("chosen", "rejected")] for row in rows]
            reference = copy.deepcopy(model)
            found[key] = losses_by_hand(model, reference, list(model.parameters()), pairs, smoothing)
        return found[key]

    return run


@pytest.fixture
def settings(files, tmp_path):
    return [
        f"data.path={files['texts']}",
        f"data.sequence_length={LENGTH}",
        "data.held_out_fraction=0",
        f"dpo.beta={BETA}",
        f"output={tmp_path / 'run'}",
        f"train.steps={STEPS}",
        f"train.global_batch_size={NUM_PAIRS}",
        "train.dtype=float64",
        "train.log_every=1",
        "train.eval_every=0",
        f"optimizer.lr={RATE}",
        "optimizer.warmup_steps=2",
        "checkpoint.save_every=0",
    ]


def model_settings(model, folder):
    if model != "own Llama":
        return [f"model.path={folder}"]
    return [*settings_of_own_llama(folder), f"data.tokenizer={folder}"]


def losses_in(folder):
    return [record.loss for record in read_records(folder / "metrics.jsonl")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, id=f"{model}, {layout}", marks=[] if (model, layout) in QUICK else pytest.mark.slow)
        for model in ("qwen3", "own Llama")
        for layout in LAYOUTS
    ],
)
def test_losses_are_those_of_a_loop_by_hand(run_ranks, folder_of, expected_of, settings, tmp_path, model, layout):
    ranks, degrees = LAYOUTS[layout]
    model_type = "llama" if model == "own Llama" else model

    run_ranks(train_in_float64, ranks, [*settings, *model_settings(model, folder_of(model_type)), *degrees])

    expected = expected_of(model_type)
    assert losses_in(tmp_path / "run") == pytest.approx(expected, rel=1e-10, abs=0)
    assert expected[-1] < expected[0] == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("form", ["messages", pytest.param("joined", marks=pytest.mark.slow)])
def test_messages_are_pairs_by_the_chat_template(run_ranks, folder_of, expected_of, settings, files, tmp_path, form):
    settings += [f"model.path={folder_of('qwen3')}", f"data.path={files[form]}", "dpo.label_smoothing=0.1"]

    run_ranks(train_in_float64, 1, settings)

    assert losses_in(tmp_path / "run") == pytest.approx(expected_of("qwen3", "messages", 0.1), rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, id=f"{model}, {layout}", marks=pytest.mark.slow)
        for model in ("qwen3", "own Llama")
        for layout in LAYOUTS
    ],
)
def test_reference_of_adapters_is_the_base_model(
    run_ranks, folder_of, settings, tokenizer, rows, tmp_path, model, layout
):
    peft = pytest.importorskip("peft", reason="the loop by hand takes its adapters: pip install peft")
    ranks, degrees = LAYOUTS[layout]
    folder = folder_of("llama" if model == "own Llama" else model)
    settings += [*model_settings(model, folder), *LORA]

    def write_adapter(recipe):
        save_peft_adapter(prepare_run(recipe)[0].model.lora_model, tmp_path / "adapter")

    run_ranks(train_in_float64, 1, settings, write_adapter)
    run_ranks(train_in_float64, ranks, [*settings, *degrees])

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter", is_trainable=True)
    pairs = [[tokens_of(tokenizer, row, name, "texts") for name in ("chosen", "rejected")] for row in rows]
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    expected = losses_by_hand(adapted, base, trained, pairs)
    assert losses_in(tmp_path / "run") == pytest.approx(expected, rel=1e-10, abs=0)
    assert expected[-1] < expected[0]


@pytest.mark.slow
def test_resumed_run_keeps_the_reference_of_its_beginning(run_ranks, folder_of, expected_of, settings, tmp_path):
    settings.append(f"model.path={folder_of('qwen3')}")

    run_ranks(train_in_float64, 1, [*settings, "train.stop_after=2"])
    run_ranks(train_in_float64, 1, settings)

    assert losses_in(tmp_path / "run") == pytest.approx(expected_of("qwen3"), rel=1e-10, abs=0)


def test_rows_without_two_answers_are_refused_with_their_place(run_ranks, folder_of, settings, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "completion": "b"}\n')

    with pytest.raises(RuntimeError, match=r"rows\.jsonl.* is not a preference; expected prompt, chosen and"):
        run_ranks(train_in_float64, 1, [*settings, f"model.path={folder_of('qwen3')}", f"data.path={file}"])


BESIDE_TRL = [
    *((layout, form, "sigmoid") for form in ("texts", "messages") for layout in ("one process", *SPLIT)),
    *(("one process", "texts", loss) for loss in ("robust", "hinge", "ipo", "apo_zero", "apo_down")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "form", "loss"), [pytest.param(*it, id=", ".join(it)) for it in BESIDE_TRL])
def test_losses_of_twenty_steps_are_those_of_trl(
    run_ranks, folder_of, settings, files, rows, tokenizer, tmp_path, layout, form, loss
):
    trl = pytest.importorskip("trl", reason="its trainer is compared: pip install trl")
    datasets = pytest.importorskip("datasets", reason="TRL's trainer takes them: pip install datasets")
    ranks, degrees = LAYOUTS[layout]
    folder = folder_of("qwen3")
    settings += ["train.dtype=float32", "train.steps=20", f"model.path={folder}", f"data.path={files[form]}"]
    smoothing = 0.1 if loss == "robust" else 0.0
    settings += [f"dpo.loss={loss}", f"dpo.label_smoothing={smoothing}"]

    run_ranks(train_plainly, ranks, [*settings, *degrees])

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = adamw_of(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_multiplier(step, total_steps=20, warmup_steps=2, min_lr_ratio=0.1)
    )
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "trl"),
            beta=BETA,
            loss_type=[loss],
            label_smoothing=smoothing,
            max_length=None,
            max_steps=20,
            per_device_train_batch_size=NUM_PAIRS,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows if form == "texts" else [as_messages(row) for row in rows]),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
    )
    trainer.train()

    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(expected) == 20
    assert losses_in(tmp_path / "run") == pytest.approx(expected, rel=1e-5, abs=1e-5)


def train_plainly(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    train(recipe)
