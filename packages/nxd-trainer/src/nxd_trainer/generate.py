"""Text generation with a trained model, from a checkpoint of any layout and at any tensor-parallel degree."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from nxd_data import Tokenizer
from nxd_engine.checkpoints.merged_weights import load_model
from nxd_engine.models import LlamaCache
from nxd_state import active_group, all_gather, get_device, is_multimodal, is_transformers_model
from nxd_trace.generation import SamplingSettings, choose_token
from torch import Tensor, nn

from nxd_trainer.opened_model import OpenedModel, TextCodec, open_codec, open_model_together

_CROSS_MASK = "cross_attention_mask"


def load_for_generation(
    folder: str | Path,
    tag: str | None = None,
    *,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
) -> tuple[nn.Module, Tokenizer]:
    """Load a folder's model and tokenizer on this rank's device; each rank reads only its part. Call it on all ranks.

    A LoRA adapter stored with its base model is merged into it.

    Args:
        folder: a Hugging Face folder, or checkpoints from `nxd train`, `save_checkpoint`, Lightning or
            `import_hugging_face`.
        tag: the checkpoint's name; the newest complete one if None.
        tokenizer: a file, a folder or "bytes"; the model's own if None.
        adapter: the folder of an adapter to merge, see `open_model`.

    Raises:
        ValueError: the tensor-parallel degree does not divide the sizes, the model or tokenizer cannot be determined,
            or the adapter does not fit the model.
        nxd_ckpt.CheckpointError: there is no such checkpoint, it is damaged, or its tensors do not match the model
            that it names; on all ranks.
    """
    model, codec = load_with_codec(folder, tag, tokenizer=tokenizer, adapter=adapter)
    return model, codec.tokenizer


def load_with_codec(
    folder: str | Path,
    tag: str | None = None,
    *,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
) -> tuple[nn.Module, TextCodec]:
    """Like `load_for_generation`, with the chat template and the tokens that end a text."""
    opened = open_model_together(folder, tag, adapter=adapter)
    return load_opened(opened), open_codec(opened, tokenizer)


def load_opened(opened: OpenedModel) -> nn.Module:
    """Load an opened model on this rank's device, as `load_for_generation` does."""
    return load_model(opened.weights, opened.description, opened.dtype, opened.where).eval()


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    end_token: int | None = None,
    images: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> Iterator[int]:
    """Yield new tokens one by one, the same on every rank.

    Args:
        model: a `LlamaForCausalLM` built with `sequence_parallel=False`, or a transformers causal language model.
        prompt: token ids `[seq]`, at least one.
        max_new_tokens: stop after this many.
        temperature: 0 takes the most likely token; higher values sample more freely.
        end_token: stop after this token.
        images: the inputs of the prompt's images, and types of its tokens, as the model's processor makes them.
        **settings: as for `nxd_trace.generation.SamplingSettings`, such as `top_k`, `seed` and `stop_tokens`.

    Raises:
        ValueError: the prompt is empty, the model has too few positions, or a setting is out of range.
        FloatingPointError: the logits have NaNs.
    """
    stop_tokens = (*settings.pop("stop_tokens", ()), *([] if end_token is None else [end_token]))
    sampling = SamplingSettings(
        max_new_tokens=max_new_tokens, temperature=temperature, stop_tokens=stop_tokens, **settings
    )
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty; give at least one token")
    check_length(prompt.numel(), max_new_tokens, max_positions(model))
    # Every rank samples on the CPU with the same seed, so all ranks choose the same token.
    draws = torch.Generator().manual_seed(sampling.seed)
    logits_after = _next_logits(model, images or {})
    tokens = prompt.unsqueeze(0).to(get_device())
    before: list[int] = prompt.tolist()
    written: list[int] = []
    for _ in range(max_new_tokens):
        token = choose_token(logits_after(tokens).cpu(), sampling, draws, prompt=before, written=written)
        yield token
        if token in sampling.stop_tokens:
            return
        written.append(token)
        tokens = torch.tensor([[token]], device=get_device())


def check_length(prompt_tokens: int, max_new_tokens: int, longest: int | None) -> None:
    """Raise ValueError if a prompt and its continuation are more tokens than the `longest` text of a model."""
    if longest is None or prompt_tokens + max_new_tokens <= longest:
        return
    room = longest - prompt_tokens
    raise ValueError(
        f"{prompt_tokens} prompt tokens plus {max_new_tokens} new ones are more than the model's {longest} positions "
        "(max_position_embeddings); "
        + (f"use max_new_tokens={room} (--max-new-tokens {room})" if room > 0 else "give a shorter prompt")
    )


def max_positions(model: Any) -> int | None:
    """Return the number of positions that the model supports; None if its config does not say."""
    config = model.config.get_text_config() if is_transformers_model(model) else model.config
    found: int | None = getattr(config, "max_position_embeddings", None)
    return found


def _next_logits(model: Any, images: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function from new tokens `[1, seq]` to the logits after them, `[vocab]`; it caches earlier tokens."""
    if images and not is_multimodal(model):
        raise ValueError(f"{type(model).__name__} reads text alone; leave the images out")
    if not is_transformers_model(model):
        cache = LlamaCache()
        return lambda tokens: all_gather(model(tokens, cache=cache)[0, -1], active_group("tp"))
    past: Any = None
    taken = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    cache_name = "cache" if "cache" in taken else "past_key_values"  # before transformers 5.24
    dtype = next(model.parameters()).dtype
    further = {name: it.to(get_device(), dtype if it.is_floating_point() else None) for name, it in images.items()}
    for module in model.modules():  # of an earlier prompt
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None

    def logits_after(tokens: Tensor) -> Tensor:
        nonlocal past, further
        output = model(tokens, use_cache=True, **{cache_name: past}, **further)
        if getattr(output, cache_name) is None:  # Granite 4 Vision's language model makes no cache of its own
            from transformers import DynamicCache  # noqa: PLC0415 - optional

            past = DynamicCache(config=model.config.get_text_config())
            output = model(tokens, use_cache=True, **{cache_name: past}, **further)
        past = getattr(output, cache_name)
        # Later tokens attend to the images as the last one of the prompt does, where layers read their features.
        further = {name: it[:, -1:] for name, it in further.items() if name == _CROSS_MASK}
        logits: Tensor = output.logits[0, -1]
        return logits

    return logits_after
