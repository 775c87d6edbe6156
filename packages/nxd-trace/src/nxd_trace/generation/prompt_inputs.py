"""Inputs of a prompt beside its token ids: the features that a model reads in place of some of its tokens.

The tokens of an image are such tokens. Whoever makes the features knows what they stand for; here they are tensors.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from nxd_state import Group
from torch import Tensor

from nxd_trace.generation.cache import local_columns


@dataclass(frozen=True)
class PromptInputShapes:
    """What a model takes beside token ids.

    Attributes:
        hidden_size: length of an embedding.
        dtype: dtype of the features.
        layers: the layers before which further features are added to the hidden states, ascending.
        num_axes: number of a token's rotary positions; 0 if they are its position in the sequence.
        longest_span: the longest run of tokens that attend to each other, as an image's do; 1 if every token only
            attends to earlier ones, None if a run may be as long as a prompt.
    """

    hidden_size: int
    dtype: torch.dtype
    layers: tuple[int, ...] = ()
    num_axes: int = 0
    longest_span: int | None = 1

    def example(self, batch_size: int, length: int, *, with_features: bool) -> dict[str, Tensor]:
        """Return inputs of a program, of `[batch, seq, ...]`; without features, those of text alone."""
        shape = (batch_size, length)
        positions = torch.arange(length).expand(shape).contiguous()
        inputs: dict[str, Tensor] = {}
        if self.num_axes:
            inputs["rotary"] = torch.zeros(*shape, self.num_axes, dtype=torch.long)
        if with_features:
            inputs["features"] = torch.zeros(*shape, 1 + len(self.layers), self.hidden_size, dtype=self.dtype)
            inputs["is_given"] = torch.zeros(shape, dtype=torch.bool)
            inputs["first"], inputs["last"] = positions, positions.clone()
        return inputs


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """The features of a prompt.

    Attributes:
        at: indices of the tokens that are read as features, ascending, int64 `[given]`.
        features: `[given, 1 + layers, hidden]`: a token's embedding, and what is added to its hidden states before each
            of `PromptInputShapes.layers`.
        spans: runs of tokens that attend to each other, besides all earlier tokens: first index, and the one after the
            last. They are ascending and do not overlap.
        rotary: rotary positions of all tokens of the prompt, int64 `[tokens, axes]`; None if these are their positions.
    """

    at: Tensor
    features: Tensor
    spans: tuple[tuple[int, int], ...] = ()
    rotary: Tensor | None = None

    @cached_property
    def rotary_offset(self) -> int:
        """Difference between the rotary position and the position of a token after the prompt."""
        return 0 if self.rotary is None else int(self.rotary.max()) + 1 - len(self.rotary)

    def is_text(self, start: int, stop: int) -> bool:
        """Whether the tokens from `start` to `stop` have no features and are in no span."""
        first, last = self._given(start, stop)
        return first == last and not any(begin < stop and start < end for begin, end in self.spans)

    def chunk(self, start: int, most: int) -> int:
        """Return how many tokens from `start`, at most `most`, can be processed together: spans are not cut.

        Raises:
            ValueError: the rest of a span is longer than `most`.
        """
        stop = start + most
        cut = [begin for begin, end in self.spans if begin < stop < end]
        if not cut:
            return most
        if cut[0] <= start:
            begin, end = next(span for span in self.spans if span[0] == cut[0])
            raise ValueError(
                f"{end - begin} tokens of the prompt attend to each other, but the model was compiled to process "
                f"{most} tokens at once; compile it with a longer longest_span"
            )
        return cut[0] - start

    def columns(self, start: int, stop: int, padding: int, empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a chunk after `padding` columns, `[1, seq, ...]`; `empty` are those of a program."""
        filled = {name: torch.zeros_like(tensor) for name, tensor in empty.items()}
        if "rotary" in filled:
            positions = torch.arange(start, stop).unsqueeze(1) if self.rotary is None else self.rotary[start:stop]
            filled["rotary"][0, padding:] = positions
        if "features" not in filled:
            return filled
        first, last = self._given(start, stop)
        columns = self.at[first:last] - start + padding
        filled["features"][0, columns] = self.features[first:last].to(filled["features"])
        filled["is_given"][0, columns] = True
        for name in ("first", "last"):
            filled[name][0, padding:] = torch.arange(start, stop)
        for begin, end in self.spans:
            if begin < stop and start < end:
                own = slice(max(begin, start) - start + padding, min(end, stop) - start + padding)
                filled["first"][0, own] = begin
                filled["last"][0, own] = end - 1
        return filled

    def content(self, tokens: Sequence[int], start: int, stop: int) -> bytes:
        """Return what else determines the keys and values of the tokens from `start` to `stop`."""
        spans = [span for span in self.spans if span[0] < stop and start < span[1]]
        end = max([stop, *(end for _, end in spans)])  # the tokens of a span also depend on its later ones
        first, last = self._given(start, end)
        if first == last and not spans:
            return b""
        parts = [tokens[stop:end], self.at[first:last].tolist(), spans]
        return json.dumps(parts).encode() + b"".join(self._digests[first:last])

    @cached_property
    def _digests(self) -> list[bytes]:
        """The digests of each given token's features and rotary positions."""
        rows = [[features] for features in self.features]
        if self.rotary is not None:
            rows = [[*row, self.rotary[at]] for row, at in zip(rows, self.at.tolist(), strict=True)]
        return [hashlib.sha256(b"".join(map(_bytes, row))).digest() for row in rows]

    def check(self, num_tokens: int, length: int, like: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless a program of this length, with inputs `like` these, can process the prompt."""
        expected = (len(self.at), *like["features"].shape[2:])
        if tuple(self.features.shape) != expected:
            raise ValueError(f"the features have shape {tuple(self.features.shape)}; expected {expected}")
        if len(self.at) and not 0 <= int(self.at.min()) <= int(self.at.max()) < num_tokens:
            raise ValueError(f"features are for tokens outside the prompt of {num_tokens} tokens")
        rotary = (num_tokens, like["rotary"].shape[2]) if "rotary" in like else None
        if (None if self.rotary is None else tuple(self.rotary.shape)) != rotary:
            given = None if self.rotary is None else tuple(self.rotary.shape)
            raise ValueError(f"the rotary positions have shape {given}; expected {rotary}")
        for start, _ in self.spans:
            self.chunk(start, length)

    def _given(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of `at` that is in `[start, stop)`."""
        first, last = torch.searchsorted(self.at, torch.tensor([start, stop])).tolist()
        return first, last


TEXT = PromptInputs(torch.empty(0, dtype=torch.long), torch.empty(0))
"""The inputs of a prompt without features."""


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of one forward beside token ids; those that a program does not have are None.

    Attributes:
        rotary: rotary positions, int64 `[batch, seq, axes]`.
        features: `[batch, seq, 1 + layers, hidden]`.
        is_given: which tokens are read as features, bool `[batch, seq]`.
        first: first position of each token's span, int64 `[batch, seq]`.
        last: last position of each token's span.
    """

    rotary: Tensor | None = None
    features: Tensor | None = None
    is_given: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None

    def local(self, replicas: Group) -> "TokenInputs":
        """Return this replica's share of the columns."""
        own = {name: local_columns(tensor, replicas) for name, tensor in vars(self).items() if tensor is not None}
        return replace(self, **own)


def _bytes(tensor: Tensor) -> bytes:
    data: bytes = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data
