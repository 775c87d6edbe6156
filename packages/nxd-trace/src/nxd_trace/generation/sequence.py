"""A prompt in the batch, and the tokens that are written after it."""

from collections.abc import Iterable
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from nxd_trace.generation.cache import TextDigests
from nxd_trace.generation.sampling import SamplingSettings, TokenLogprobs, choose_token

FinishReason = Literal["stop", "length"]


class RunningSequence:
    """A prompt and the tokens generated after it.

    Args:
        settings: sampling settings.
        prompt: token ids.
        block_size: tokens in a block of the cache.
        cache_salt: sequences with different salts share no blocks.

    Attributes:
        settings: sampling settings.
        prompt: token ids.
        tokens: written so far; a stop token, if one ended it, is the last.
        num_seen: tokens in the cache.
        num_new: tokens that the latest step wrote.
        num_drafted: tokens in the cache of a draft model.
        num_shared: tokens of the prompt that the cache had already.
        finish_reason: None while it runs; "stop" after a stop token, "length" after the most tokens asked for.
        failure: exception from choosing a token, which ended only this sequence.
        logprobs: log-probabilities of the tokens written, if requested.
        prompt_logprobs: log-probabilities of the prompt's tokens, if requested.
        blocks: its blocks of the cache, in order; empty until it is scheduled.
        text: prompt and tokens.
        digests: digests of the full blocks.
        num_kept: full blocks that others may share.
    """

    def __init__(self, settings: SamplingSettings, prompt: list[int], block_size: int, cache_salt: bytes = b"") -> None:
        self.settings = settings
        self.prompt = prompt
        self.tokens: list[int] = []
        self.num_seen = 0
        self.num_new = 0
        self.num_drafted = 0
        self.num_shared = 0
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs = [TokenLogprobs(prompt[0], None, ())] if settings.prompt_logprobs else []
        self.blocks: list[int] = []
        self.num_kept = 0
        self.text = list(prompt)
        self.digests = TextDigests(self.text, block_size, cache_salt)
        self._draws = torch.Generator().manual_seed(settings.seed)

    @property
    def unseen(self) -> list[int]:
        """Tokens that the model has not been fed yet."""
        return self.text[self.num_seen :]

    @property
    def takes_single_tokens(self) -> bool:
        """Whether it is fed one token at a time: its prompt is in the cache, or each logit of it is wanted."""
        return self.settings.prompt_logprobs or self.num_seen >= len(self.prompt)

    @property
    def num_guessable(self) -> int:
        """How many guesses of its next tokens are of use: none where tokens are drawn, or nothing but one is left."""
        is_greedy = self.settings.temperature == 0 and not self.settings.prompt_logprobs
        return self.settings.max_new_tokens - len(self.tokens) - 1 if is_greedy else 0

    def take_logits(self, logits: Tensor) -> bool:
        """Choose the next token from the `[vocab]` logits after the last one seen; false if the prompt continues."""
        num_top = self.settings.num_logprobs
        if self.num_seen < len(self.text):
            if self.settings.prompt_logprobs:
                self.prompt_logprobs.append(TokenLogprobs.of(self.text[self.num_seen], logits, num_top or 0))
            return False
        token = choose_token(logits, self.settings, self._draws, prompt=self.prompt, written=self.tokens)
        self.tokens.append(token)
        self.num_new += 1
        self.text.append(token)
        if num_top is not None:
            self.logprobs.append(TokenLogprobs.of(token, logits, num_top))
        if token in self.settings.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.settings.max_new_tokens:
            self.finish_reason = "length"
        return True


def read_prompt(prompt: Any, vocab_size: int) -> list[int]:
    """The ids of one prompt, checked.

    Args:
        prompt: a sequence of ids, or a tensor or array `[seq]` of integers.
        vocab_size: one more than the largest id.

    Raises:
        TypeError: it is nothing of the kind.
        ValueError: it is empty, or has an id outside the vocabulary.
    """
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"a prompt is {prompt!r}, a {type(prompt).__name__}; expected a list of token ids")
    try:
        ids = [index(token) for token in values]
    except TypeError as error:
        raise TypeError(f"a prompt holds values that are not token ids: {error}") from error
    if not ids:
        raise ValueError("the prompt is empty; pass at least one token")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary 0..{vocab_size - 1}")
    return ids


def unpad_prompts(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The tokens of each row, without its padding.

    Args:
        input_ids: `[batch, seq]`.
        attention_mask: `[batch, seq]`, 1 for tokens and 0 for padding, on the left or on the right of each row.

    Raises:
        ValueError: other shapes, a row of padding only, or padding between tokens.
    """
    if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; expected "
            "[batch, seq] for both"
        )
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
        at = mask.nonzero().flatten().tolist()
        if not at:
            raise ValueError(f"row {row} of attention_mask is 0 everywhere; each prompt needs at least one token")
        if at[-1] - at[0] + 1 != len(at):
            raise ValueError(f"row {row} of attention_mask has padding between tokens; pad on the left or on the right")
        prompts.append([int(token) for token in ids[at]])
    return prompts
