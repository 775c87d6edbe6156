"""Writing text with a trained model, from a checkpoint of any layout and at any tensor-parallel degree."""

from collections.abc import Iterator
from pathlib import Path

import nxd_ckpt
import torch
from nxd_layers import parallel_argmax, parallel_topk
from nxd_state import active_group, all_gather, get_device, move_model_to_device
from torch import Tensor

from nxd_trainer.checkpoint import model_state
from nxd_trainer.data import Tokenizer, load_tokenizer
from nxd_trainer.from_recipe import DTYPES
from nxd_trainer.models import KeyValueCache, LlamaConfig, LlamaForCausalLM
from nxd_trainer.recipe import recipe_from_dict


def load_for_generation(folder: str | Path, tag: str | None = None) -> tuple[LlamaForCausalLM, Tokenizer]:
    """The model and tokenizer of a checkpoint, on this rank's device; each rank reads only its part.

    Args:
        folder: a run's checkpoints.
        tag: the newest complete one if None.

    Raises:
        ValueError: the sizes do not divide by the tensor-parallel degree.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    recipe = recipe_from_dict(checkpoint.objects["recipe"], origin=f"recipe in {folder}")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.objects["model"]), dtype=DTYPES[recipe.train.dtype])
    move_model_to_device(model, get_device())
    nxd_ckpt.load(folder, checkpoint.tag, into=model_state(model), strict=False)
    return model.eval(), load_tokenizer(recipe.data.tokenizer)


@torch.no_grad()
def generate(
    model: LlamaForCausalLM,
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
        model: built with `sequence_parallel=False`.
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
    longest = model.config.max_position_embeddings
    if prompt.numel() + max_new_tokens > longest:
        raise ValueError(
            f"{prompt.numel()} prompt tokens and {max_new_tokens} new ones are more than the model's "
            f"max_position_embeddings={longest}; ask for {max(0, longest - prompt.numel())} or fewer"
        )
    # Draws are made on the CPU from one seed on every rank, so all ranks choose the same token.
    generator = torch.Generator().manual_seed(seed)
    cache = KeyValueCache()
    tokens = prompt.unsqueeze(0).to(get_device())
    for _ in range(max_new_tokens):
        logits = model(tokens, cache=cache)[0, -1]  # [vocab/tp]
        token = _choose(logits, temperature, top_k, generator)
        yield token
        if token == end_token:
            return
        tokens = torch.tensor([[token]], device=get_device())


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token, from this rank's part of the logits, `[vocab/tp]`."""
    if temperature == 0:
        return int(parallel_argmax(logits))
    group = active_group("tp")
    vocab = logits.numel() * group.size
    if 0 < top_k < vocab:
        candidates, ids = parallel_topk(logits, top_k)
    else:
        candidates, ids = all_gather(logits, group), torch.arange(vocab)
    candidates = candidates.float().cpu()
    probabilities = torch.softmax((candidates - candidates.max()) / temperature, dim=-1)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
