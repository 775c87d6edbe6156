"""Small models, tokenizers and data, made here, and layouts with the batch size that keeps the global batch."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch


def save_model(folder, kind, dtype=torch.float64, **settings):
    """Save a small model of a class of transformers with random weights as a Hugging Face folder."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    model_class = getattr(transformers, kind)
    given = {"pad_token_id": 0, "eos_token_id": 1, **sizes, **heads, **settings}
    model_class(model_class.config_class(**given)).to(dtype).save_pretrained(folder)
    return str(folder)


def save_llama(folder, kind="LlamaForCausalLM", dtype=torch.float64, **settings):
    """Save a small Llama, see `save_model`."""
    return save_model(folder, kind, dtype, num_labels=1, **settings)


def save_mixtral(folder, **settings):
    """Save a small mixture of experts, see `save_model`."""
    return save_model(folder, "MixtralForCausalLM", torch.float32, num_local_experts=4, **settings)


def make_tokenizer():
    """Return a tokenizer of the words w0 to w49."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(50)), "user", "assistant", "."]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def token_rows(count, generator_seed=1):
    """Return rows of random tokens, whose first labels are left out, a different number in each."""
    generator = torch.Generator().manual_seed(generator_seed)
    rows = []
    for number in range(count):
        ids = torch.randint(3, 60, (16,), generator=generator)
        labels = ids.clone()
        labels[: number % 7] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


@contextmanager
def at(layout):
    """Context of a layout; the plain library if None, or if it has no degrees."""
    from accelerate.state import AcceleratorState, GradientState
    from nxd_hf_trainer import under_trainer

    if layout is not None and layout.degrees is not None:
        with under_trainer(**layout.degrees):
            yield
        return
    try:
        yield
    finally:  # the process serves other tests
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)


def words(generator, count):
    """Return random words of the tokenizer."""
    return " ".join(f"w{number}" for number in torch.randint(0, 50, (count,), generator=generator).tolist())


def layout(ranks, replicas=1, **degrees):
    """A layout of so many ranks; `None` degrees mean the plain trainer in one process."""
    return SimpleNamespace(ranks=ranks, replicas=replicas, degrees=degrees)


LAYOUTS = {
    "TP 2": layout(2, tensor_parallel_size=2),
    "TP 2 with sequence parallelism": layout(2, tensor_parallel_size=2, sequence_parallel=True),
    "PP 2": layout(2, pipeline_parallel_size=2),
    "PP 2 with 3 microbatches": layout(2, pipeline_parallel_size=2, num_microbatches=3),
    "PP 2 x TP 2": layout(4, pipeline_parallel_size=2, tensor_parallel_size=2),
    "PP 2 x DP 2 with ZeRO-3": layout(4, 2, pipeline_parallel_size=2, zero_stage=3),
    "CP 2": layout(2, context_parallel_size=2),
    "EP 2": layout(2, 2, expert_parallel_size=2),
    "DP 2": layout(2, 2),
    "DP 2 with ZeRO-1": layout(2, 2, zero_stage=1),
    "DP 2 with ZeRO-2": layout(2, 2, zero_stage=2),
    "DP 2 with ZeRO-3": layout(2, 2, zero_stage=3),
    "TP 2 x DP 2 with ZeRO-1": layout(4, 2, tensor_parallel_size=2, zero_stage=1),
    "TP 2 x DP 2 with ZeRO-3": layout(4, 2, tensor_parallel_size=2, zero_stage=3),
}


@pytest.fixture
def tools():
    """What the tests' functions, which run on the ranks, need of this file."""
    return SimpleNamespace(
        save_model=save_model,
        save_llama=save_llama,
        save_mixtral=save_mixtral,
        make_tokenizer=make_tokenizer,
        token_rows=token_rows,
        words=words,
        layouts=LAYOUTS,
        at=at,
    )
