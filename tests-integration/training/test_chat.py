"""Training on conversations, apart or packed: losses are those of plain transformers and a loop by hand, at any layout.

The loop takes one conversation at a time, without padding, and divides the sum of the losses of all that the assistant
says in a step by the number of these tokens. Both sides compute in float64.
"""

import json
import logging
import random
import re

import pytest
import torch
from nxd_engine.logs import get_logger
from nxd_parity import InFloat64
from nxd_trainer.from_recipe import PACKED_TYPES
from nxd_trainer.report import read_records
from nxd_trainer.report.run_log import last_event, read_events
from runs_by_hand import SIZES, byte_tokenizer, settings_of_own_llama, train_by_hand, train_in_float64
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
tokenizers = pytest.importorskip("tokenizers", reason="chat templates need them: pip install tokenizers")

pytestmark = pytest.mark.sample(3)  # each takes its time

STEPS, LENGTH, RATE = 4, 24, 3e-3
ROLES = {"user": "<u>", "assistant": "<a>"}
SPECIAL = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
FURTHER = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "glm4": {"head_dim": 8},
}
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
MICROBATCHES = "train.gradient_accumulation_steps=2"
LAYOUTS = {
    "one process": (1, []),
    "microbatches": (1, ["train.gradient_accumulation_steps=4"]),
    "TP 2": (2, [TP2]),
    "TP 2 x SP": (2, [TP2, "parallel.sequence_parallel=true"]),
    "PP 2": (2, [PP2, MICROBATCHES]),
    "DP 2": (2, [MICROBATCHES]),
    "DP 2 + ZeRO-1": (2, ["parallel.zero_stage=1"]),
    "TP 2 x PP 2": (4, [TP2, PP2, MICROBATCHES]),
}
QUICK = [
    ("qwen3", "one process"),
    ("qwen3", "TP 2"),
    ("qwen3", "PP 2"),
    ("qwen3", "DP 2"),
    ("own Llama", "DP 2"),
]
QUICK_PACKED = [
    ("qwen3", "PP 2"),
    ("qwen3", "TP 2 x SP"),
    ("own Llama", "DP 2"),
]
# Of twelve conversations each third is held out; one global batch is the other eight, in whatever order.
NUM_CONVERSATIONS, NUM_TRAINED = 12, 8
PACKED_LENGTH, NUM_PACKED = 40, 4  # then the eight are four sequences


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def conversations():
    """Of one turn or two, with answers of very unequal lengths, some of which do not fit into a sequence."""
    generator = random.Random(0)
    return [
        [
            {"role": role, "content": "".join(generator.choices("abcdef", k=generator.choice([1, 2, 3, 7, 15])))}
            for _ in range(generator.randint(1, 2))
            for role in ROLES
        ]
        for _ in range(NUM_CONVERSATIONS)
    ]


@pytest.fixture(scope="module")
def chat_file(conversations, tmp_path_factory):
    file = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations))
    return file


@pytest.fixture(scope="module")
def folder_of(tokenizer, tmp_path_factory):
    """`folder_of("qwen3")`: a model in float64 with random weights, and its tokenizer, as transformers saves them."""
    root = tmp_path_factory.mktemp("models")

    def make(model_type):
        folder = root / model_type
        if not folder.exists():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(model_type, **SIZES, **SPECIAL, **FURTHER.get(model_type, {}))
            transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def expected_of(folder_of, tokenizer, conversations):
    """`expected_of("qwen3")`: the losses of each step and, after the last, that of the held-out conversations."""
    whole = []
    for messages in conversations:
        tokens, labels = [], []
        for message in messages:
            mark, text = tokenizer.convert_tokens_to_ids(ROLES[message["role"]]), tokenizer.encode(message["content"])
            tokens += [mark, *text, tokenizer.eos_token_id]
            is_answer = message["role"] == "assistant"
            labels += [
                -100,
                *(text if is_answer else [-100] * len(text)),
                tokenizer.eos_token_id if is_answer else -100,
            ]
        whole.append((tokens, labels))
    found = {}

    def run(model_type, length=LENGTH):
        if (model_type, length) in found:
            return found[model_type, length]
        samples = [(tokens[: length + 1], labels[: length + 1]) for tokens, labels in whole]
        held_out = samples[2::3]
        trained = [sample for sample in samples if sample not in held_out]
        assert len(trained) == NUM_TRAINED
        model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(model_type), dtype=torch.float64)

        def loss_over(chosen):
            count = sum(label != -100 for _, labels in chosen for label in labels[1:])
            total = torch.zeros((), dtype=torch.float64)
            for tokens, labels in chosen:
                with InFloat64():
                    logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
                total += F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
            return total / count

        losses = train_by_hand(model.parameters(), lambda _: loss_over(trained), steps=STEPS, rate=RATE)
        with torch.no_grad():
            found[model_type, length] = losses, loss_over(held_out).item()
        return found[model_type, length]

    return run


@pytest.fixture
def settings(chat_file, tmp_path):
    return [
        f"data.path={chat_file}",
        "data.chat=true",
        f"data.sequence_length={LENGTH}",
        f"data.held_out_fraction={1 / 3}",
        f"output={tmp_path / 'run'}",
        f"train.steps={STEPS}",
        f"train.global_batch_size={NUM_TRAINED}",
        "train.dtype=float64",
        "train.log_every=1",
        f"train.eval_every={STEPS}",
        f"optimizer.lr={RATE}",
        "optimizer.warmup_steps=2",
        "checkpoint.save_every=0",
    ]


def model_settings(model, folder):
    if model != "own Llama":
        return [f"model.path={folder}"]
    return [*settings_of_own_llama(folder), f"data.tokenizer={folder}"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, id=f"{model}, {layout}", marks=[] if (model, layout) in QUICK else pytest.mark.slow)
        for model in ("qwen3", "own Llama")
        for layout in LAYOUTS
    ],
)
def test_losses_are_the_mean_over_the_tokens_of_answers(
    run_ranks, folder_of, expected_of, settings, tmp_path, model, layout
):
    ranks, degrees = LAYOUTS[layout]
    model_type = "llama" if model == "own Llama" else model

    run_ranks(train_in_float64, ranks, [*settings, *model_settings(model, folder_of(model_type)), *degrees])

    losses, held_out_loss = expected_of(model_type)
    records = read_records(tmp_path / "run/metrics.jsonl")
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-10, abs=0)
    assert records[-1].held_out_loss == pytest.approx(held_out_loss, rel=1e-10, abs=0)
    assert losses[-1] < losses[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            model, layout, id=f"{model}, {layout}", marks=[] if (model, layout) in QUICK_PACKED else pytest.mark.slow
        )
        for model in ("qwen3", "gemma3_text", "own Llama")
        for layout in LAYOUTS
    ],
)
def test_packed_conversations_have_the_losses_of_each_alone(
    run_ranks, folder_of, expected_of, settings, tmp_path, model, layout
):
    ranks, degrees = LAYOUTS[layout]
    model_type = "llama" if model == "own Llama" else model
    packing = ["data.packing=true", f"data.sequence_length={PACKED_LENGTH}", "train.eval_every=0"]
    packing += [f"train.global_batch_size={NUM_PACKED}"]

    run_ranks(train_in_float64, ranks, [*settings, *model_settings(model, folder_of(model_type)), *packing, *degrees])

    losses, _ = expected_of(model_type, PACKED_LENGTH)
    records = read_records(tmp_path / "run/metrics.jsonl")
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-10, abs=0)


@pytest.mark.parametrize(
    "model_type",
    [it if it in ("qwen3", "gemma3_text") else pytest.param(it, marks=pytest.mark.slow) for it in PACKED_TYPES],
)
def test_every_type_that_may_be_packed_keeps_documents_apart(folder_of, model_type):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(model_type), dtype=torch.float64).eval()
    model.config._experts_implementation = "eager"
    lengths = [5, 1, 12, 6]
    tokens = torch.randint(0, SIZES["vocab_size"], (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths]).view(1, -1)

    with torch.no_grad(), InFloat64():
        packed = model(tokens, position_ids=positions, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in tokens.split(lengths, dim=1)]

    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-12)


def test_model_that_nobody_has_compared_packed_is_refused(run_ranks, folder_of, settings):
    settings = [*settings, *model_settings("mamba", folder_of("mamba")), "data.packing=true"]

    with pytest.raises(
        RuntimeError, match=r"data\.packing=true is for our Llama and .* qwen3, .*; leave it out for mamba"
    ):
        run_ranks(train_in_float64, 1, settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", ["false", "true"])
def test_resumed_run_has_the_losses_and_token_counts_of_the_run_that_never_stopped(
    run_ranks, folder_of, settings, tmp_path, packing
):
    settings = [*settings, *model_settings("qwen3", folder_of("qwen3")), "train.global_batch_size=4", MICROBATCHES]
    settings.append(f"data.packing={packing}")
    run_ranks(train_in_float64, 2, [*settings, f"output={tmp_path / 'whole'}"])

    run_ranks(train_in_float64, 2, [*settings, "train.stop_after=1"])
    run_ranks(train_in_float64, 2, settings)

    found, expected = (
        [(it.loss, it.tokens, it.tokens_seen, it.grad_norm) for it in read_records(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "whole")
    )
    assert found == expected
    assert 0 < expected[-1][1] < expected[-1][2] < STEPS * 4 * LENGTH


@pytest.mark.parametrize("change", ["answers", "packing"])
def test_resume_with_other_sequences_is_refused(run_ranks, folder_of, settings, conversations, tmp_path, change):
    settings = [*settings, *model_settings("qwen3", folder_of("qwen3"))]
    run_ranks(train_in_float64, 1, [*settings, "train.stop_after=1"])
    other = [{"messages": [*messages[:-1], {"role": "assistant", "content": "g"}]} for messages in conversations]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, other)))
    changes = {"answers": f"data.path={tmp_path / 'other.jsonl'}", "packing": "data.packing=true"}
    message = {
        "answers": r"data\.path is \S+other\.jsonl, the checkpoint has",
        "packing": r"data\.packing is True, the",
    }

    with pytest.raises(RuntimeError, match=message[change]):
        run_ranks(train_in_float64, 1, [*settings, changes[change]])


def test_conversations_and_cuts_are_told_before_the_first_step(run_ranks, folder_of, settings, tmp_path):
    def lines_of(settings):
        lines, logger = [], get_logger("nxd_trainer")
        handler = logging.Handler()
        handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
        logger.addHandler(handler)
        try:
            train_in_float64(settings)
        finally:
            logger.removeHandler(handler)
        return lines

    [lines] = run_ranks(
        lines_of, 1, [*settings, *model_settings("qwen3", folder_of("qwen3")), "train.steps=1", "train.eval_every=0"]
    )

    assert [level for level, line in lines if re.match(r"12 conversations of \d+ tokens, of which", line)] == ["INFO"]
    assert [level for level, line in lines if "template has no {% generation %} marks" in line] == ["INFO"]
    assert [level for level, line in lines if re.match(r"\d conversations are longer than", line)] == ["WARNING"]
    [cut] = [found[1] for _, line in lines if (found := re.search(r"([\d,]+) tokens are cut off", line))]
    assert last_event(read_events(tmp_path / "run"), "start")["data"]["truncated"] == int(cut.replace(",", "")) > 0
