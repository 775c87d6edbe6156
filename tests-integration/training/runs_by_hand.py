"""What runs of recipes are compared with: small models, a tokenizer of bytes, and a training loop by hand.

Both sides compute in float64, also what the models of transformers compute in float32 whatever their weights are.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from nxd_engine import NxDModel
from nxd_parity import InFloat64
from nxd_state import initialize_model_parallel
from nxd_trainer.lr_schedule import lr_multiplier
from nxd_trainer.recipe import Recipe, load_recipe
from nxd_trainer.training import train

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MARKS = ["<end>", "<u>", "<a>"]  # tokens 0, 1 and 2
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '<u>', 'assistant': '<a>'}[m['role']] + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def train_in_float64(settings: Sequence[str], program: Callable[[Recipe], object] = train) -> None:
    """Run a recipe of these settings on this rank."""
    recipe = load_recipe(None, settings)
    initialize_model_parallel(
        recipe.parallel.tensor_parallel_size,
        recipe.parallel.pipeline_parallel_size,
        recipe.parallel.expert_parallel_size,
        context_parallel_size=recipe.parallel.context_parallel_size,
        expert_tensor_parallel_size=recipe.parallel.expert_tensor_parallel_size,
    )

    def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: NxDModel, *args: Any, **inputs: Any) -> Any:
            with InFloat64():
                return function(model, *args, **inputs)

        return call

    methods = {name: in_float64(getattr(NxDModel, name)) for name in ("run_train", "run_eval", "forward")}
    with patch.multiple(NxDModel, **methods):
        program(recipe)


def settings_of_own_llama(folder: Path, sizes: dict[str, Any] = SIZES) -> list[str]:
    """Of our Llama, which begins with the weights of a Hugging Face folder."""
    own = [f"model.{name}={size}" for name, size in sizes.items()]
    return [*own, "model.rms_norm_eps=1e-6", f"checkpoint.initial_weights={folder}"]


def adamw_of(parameters: Iterable[torch.Tensor], rate: float) -> torch.optim.AdamW:
    """The optimizer of a recipe: matrices decay, norms do not."""
    trained = list(parameters)
    groups = [
        {"params": [it for it in trained if it.dim() > 1], "weight_decay": 0.1},
        {"params": [it for it in trained if it.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)


def train_by_hand(
    parameters: Iterable[torch.Tensor], loss_of_step: Callable[[int], torch.Tensor], *, steps: int, rate: float
) -> list[float]:
    """The losses of a loop as anybody would write it, with two steps of warm-up and a cosine."""
    trained = list(parameters)
    optimizer = adamw_of(trained, rate)
    losses = []
    for step in range(steps):
        loss = loss_of_step(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * lr_multiplier(step, total_steps=steps, warmup_steps=2, min_lr_ratio=0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def byte_tokenizer(template: str = TEMPLATE, **special_tokens: str) -> Any:
    """A tokenizer of transformers with a token for each byte, and the marks."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*MARKS, *alphabet])}
    own = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    own.add_special_tokens(MARKS)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token=MARKS[0], **special_tokens)
    fast.chat_template = template
    return fast
