"""Text generation with a trained model, from a checkpoint of any layout and at any tensor-parallel degree."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from nxd_layers import parallel_argmax, parallel_topk
from nxd_layers.hf import is_transformers_model
from nxd_state import active_group, all_gather, get_device
from torch import Tensor, nn

from nxd_trainer.api.checkpoint_tags import open_own_together
from nxd_trainer.data import Tokenizer, load_tokenizer
from nxd_trainer.model_description import BYTES, ModelDescription, description_of, tokenizer_in
from nxd_trainer.model_weights import load_model
from nxd_trainer.models import KeyValueCache


def load_for_generation(
    folder: str | Path, tag: str | None = None, *, tokenizer: str | Path | None = None
) -> tuple[nn.Module, Tokenizer]:
    """The model and tokenizer of a checkpoint, on this rank's device; each rank reads only its part. Called by all.

    A LoRA adapter that lies beside its base model is merged into it.

    Args:
        folder: of checkpoints of `nxd train`, `save_checkpoint`, Lightning or `import_hugging_face`.
        tag: the newest complete one if None.
        tokenizer: a file or a folder, or "bytes"; what the checkpoint says of itself if None.

    Raises:
        ValueError: the sizes do not divide by the tensor-parallel degree, or the checkpoint does not say which model or
            tokenizer it is of.
        nxd_ckpt.CheckpointError: there is no such checkpoint, it is damaged, or its tensors are not those of the model
            that it says; on all ranks.
    """
    checkpoint = open_own_together(folder, tag)
    description = description_of(checkpoint)
    words = tokenizer_of(description, tokenizer)
    return load_model(checkpoint, description).eval(), words


def tokenizer_of(description: ModelDescription, given: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint's model, or the one given in its place.

    Raises:
        ValueError: neither is known, or nothing usable is there.
    """
    known = given or description.tokenizer or tokenizer_in(description.folder)
    if known is None:
        raise ValueError(
            "the checkpoint does not say which tokenizer its model reads; give tokenizer= (on the command line "
            f'--tokenizer): a tokenizer.json, its folder, or "{BYTES}"'
        )
    return load_tokenizer(None if str(known) == BYTES else known)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    end_token: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield new tokens one by one, the same on every rank.

    Args:
        model: a `LlamaForCausalLM` built with `sequence_parallel=False`, or a causal language model of transformers.
        prompt: token ids `[seq]`, at least one.
        max_new_tokens: stop after this many.
        temperature: 0 takes the likeliest token; higher is bolder.
        top_k: draw from the k likeliest tokens; 0 for all.
        end_token: stop after it.
        seed: of the draws.

    Raises:
        ValueError: an empty prompt, more tokens than the model has positions, or a negative number.
    """
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty; give at least one token")
    if not 0 <= temperature < torch.inf or top_k < 0 or max_new_tokens < 0:
        raise ValueError(f"temperature={temperature}, top_k={top_k}, max_new_tokens={max_new_tokens}: use 0 or more")
    longest = _max_positions(model)
    if longest is not None and prompt.numel() + max_new_tokens > longest:
        raise ValueError(
            f"{prompt.numel()} prompt tokens and {max_new_tokens} new ones are more than the model's "
            f"max_position_embeddings={longest}; ask for {max(0, longest - prompt.numel())} or fewer"
        )
    # Draws are made on the CPU from one seed on every rank, so all ranks choose the same token.
    generator = torch.Generator().manual_seed(seed)
    logits_after = _next_logits(model)
    tokens = prompt.unsqueeze(0).to(get_device())
    for _ in range(max_new_tokens):
        token = _choose(*logits_after(tokens), temperature, top_k, generator)
        yield token
        if token == end_token:
            return
        tokens = torch.tensor([[token]], device=get_device())


def _max_positions(model: Any) -> int | None:
    """Tokens that the model is made for; None if it does not say."""
    config = model.config.get_text_config() if is_transformers_model(model) else model.config
    found: int | None = getattr(config, "max_position_embeddings", None)
    return found


def _next_logits(model: Any) -> Callable[[Tensor], tuple[Tensor, int]]:
    """From further tokens `[1, seq]` to the logits after them, and over how many ranks these are split.

    What came before is kept.
    """
    if not is_transformers_model(model):
        cache = KeyValueCache()
        return lambda tokens: (model(tokens, cache=cache)[0, -1], active_group("tp").size)  # [vocab/tp]
    past: Any = None

    def logits_after(tokens: Tensor) -> tuple[Tensor, int]:
        nonlocal past
        output = model(tokens, past_key_values=past, use_cache=True)
        past = output.past_key_values
        return output.logits[0, -1], 1  # [vocab]

    return logits_after


def _choose(logits: Tensor, num_parts: int, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token, from all logits, `[vocab]`, or from this rank's part of them, `[vocab/tp]`."""
    is_split = num_parts > 1
    if temperature == 0:
        return int(parallel_argmax(logits) if is_split else logits.argmax())
    vocab = logits.numel() * num_parts
    if 0 < top_k < vocab:
        candidates, ids = parallel_topk(logits, top_k) if is_split else logits.topk(top_k)
    else:
        candidates, ids = all_gather(logits, active_group("tp")) if is_split else logits, torch.arange(vocab)
    candidates = candidates.float().cpu()
    probabilities = torch.softmax((candidates - candidates.max()) / temperature, dim=-1)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
