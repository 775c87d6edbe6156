"""The small models, tokenizers, metrics and data on which `tools/trainer_scripts.py` runs public scripts."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
_OF_BERT = {"mask_token": "<mask>", "cls_token": "<cls>", "sep_token": "<sep>"}
_WORDS = 50
_CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_METRIC = '''"""A metric that scripts load and do not compute."""

import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        value = datasets.Value("int64")
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
'''
_REWARDS = '''"""A reward for scripts that take one by its import path."""


def evenness(completions, **columns):
    return [sum(int(word[1:]) % 2 == 0 for word in it.split() if word[1:].isdigit()) / 8 for it in completions]
'''


def write_models(work: Path) -> None:
    """Write a model and its tokenizer to each of the folders llama, reward, mixture, bert and t5."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
        "reward": lambda: LlamaForSequenceClassification(LlamaConfig(**_SIZES, num_labels=1)),
        "mixture": lambda: MixtralForCausalLM(
            MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2)
        ),
        "bert": lambda: BertForMaskedLM(
            BertConfig(**_SIZES, **no_dropout, max_position_embeddings=64, initializer_range=0.1)
        ),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                feed_forward_proj="gated-gelu",  # ReLU's gradients jump, also where rounding decides
                pad_token_id=0,
                eos_token_id=1,
                decoder_start_token_id=0,
            )
        ),
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        make().save_pretrained(work / name)
        _tokenizer(_SPECIAL | _OF_BERT if name == "bert" else _SPECIAL).save_pretrained(work / name)


def _tokenizer(special: dict[str, str]) -> PreTrainedTokenizerFast:
    words = [*special.values(), *(f"w{number}" for number in range(_WORDS))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special, model_max_length=32)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.chat_template = _CHAT
    return tokenizer


def write_data(work: Path) -> None:
    """Write the scripts' data, metrics and reward function."""
    draw = random.Random(1)
    data = work / "data"
    data.mkdir(parents=True)
    (data / "text.txt").write_text("\n".join(_words(draw, 20) for _ in range(200)))
    columns = {
        "completions": ("prompt", "completion"),
        "preferences": ("prompt", "chosen", "rejected"),
        "triples": ("prompt", "chosen", "rejected", "reference"),
        "labels": ("prompt", "completion", "label"),
        "prompts": ("prompt",),
    }
    for name, of_rows in columns.items():
        (data / name).mkdir()
        rows = [
            {it: row % 2 == 0 if it == "label" else f"{_words(draw, 3 + row % 4)} " for it in of_rows}
            for row in range(96)
        ]
        _write_lines(data / name / "train.jsonl", rows)
    _write_lines(
        data / "classes.json", [{"sentence": _words(draw, 3 + row % 4), "label": row % 2} for row in range(96)]
    )
    tags = [
        {"tokens": _words(draw, 3 + row % 4).split(), "ner_tags": [f"T{it % 2}" for it in range(3 + row % 4)]}
        for row in range(96)
    ]
    _write_lines(data / "tags.json", tags)
    endings = [
        {"sent1": _words(draw, 4), "sent2": _words(draw, 1), "label": row % 4}
        | {f"ending{number}": _words(draw, 2 + number) for number in range(4)}
        for row in range(96)
    ]
    _write_lines(data / "endings.json", endings)
    pairs = [{"translation": {"en": _words(draw, 4 + row % 3), "de": _words(draw, 5)}} for row in range(96)]
    _write_lines(data / "translations.json", pairs)
    (data / "answers.json").write_text(json.dumps({"data": [_answer(draw, row) for row in range(96)]}))
    for metric in ("accuracy", "seqeval", "squad", "sacrebleu"):
        (work / metric).mkdir(exist_ok=True)
        (work / metric / f"{metric}.py").write_text(_METRIC)
    (work / "rewards.py").write_text(_REWARDS)


def _answer(draw: random.Random, row: int) -> dict[str, Any]:
    context = _words(draw, 10)
    word = context.split()[row % 10]
    answers = {"text": [word], "answer_start": [context.index(word)]}
    return {"id": str(row), "question": _words(draw, 3), "context": context, "answers": answers}


def _words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(_WORDS)}" for _ in range(count))


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows))
