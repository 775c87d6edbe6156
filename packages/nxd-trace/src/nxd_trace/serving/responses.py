"""Formats responses as the JSON of OpenAI's API: whole ones and stream events, for completions and chat completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_trace.generation import TokenLogprobs

Decode = Callable[[Sequence[int]], str]
TokenBytes = Callable[[int], bytes]


@dataclass
class CompletionOutput:
    """A generated text, or a chunk of one.

    Attributes:
        index: index of the text in its request.
        text: the text, which may be empty.
        finish_reason: None if more chunks follow.
        logprobs: log-probabilities of its tokens, if requested.
        offset: number of characters before this chunk.
        token_ids: its generated tokens, with the one that ends the text.
    """

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0
    token_ids: list[int] = field(default_factory=list)


class CompletionFormatter:
    """Formats responses of `/v1/completions`.

    Args:
        common: fields of every response: `id`, `created` and `model`.
        decode: function from token ids to text, for log-probabilities.
        token_bytes: function that returns a token's bytes; one character may take several tokens.
        has_logprobs: whether log-probabilities are returned.
        has_token_ids: whether token ids are returned.
    """

    _object = _event_object = "text_completion"

    def __init__(
        self,
        common: dict[str, Any],
        decode: Decode,
        token_bytes: TokenBytes,
        *,
        has_logprobs: bool,
        has_token_ids: bool = False,
    ) -> None:
        self._common = common
        self._decode = decode
        self._token_bytes = token_bytes
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids

    def response(self, outputs: Sequence[CompletionOutput], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the response with whole texts."""
        choices = [self._choice(output, self._message(output)) for output in outputs]
        return {**self._common, "object": self._object, "choices": choices, "usage": usage}

    def first_event(self, index: int) -> dict[str, Any] | None:
        """Return the event before a text's first chunk, if there is one."""
        del index
        return None

    def event(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the event of a chunk."""
        return self._event([self._choice(output, self._delta(output))])

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last event, with the token counts."""
        return self._event([]) | {"usage": usage}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common, "object": self._event_object, "choices": choices}

    def _choice(self, output: CompletionOutput, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(output) if self._has_logprobs else None
        choice = {"index": output.index, **content, "logprobs": logprobs, "finish_reason": output.finish_reason}
        return choice | ({"token_ids": output.token_ids} if self._has_token_ids else {})

    def _message(self, output: CompletionOutput) -> dict[str, Any]:
        return {"text": output.text}

    def _delta(self, output: CompletionOutput) -> dict[str, Any]:
        return self._message(output)

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any]:
        tokens = [self._decode([it.token]) for it in output.logprobs]
        offsets, offset = [], output.offset
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [it.logprob for it in output.logprobs],
            "top_logprobs": [self._top(it) for it in output.logprobs],
            "text_offset": offsets,
        }

    def _top(self, scored: TokenLogprobs) -> dict[str, float] | None:
        """Return log-probabilities by text, including the generated token; the first of equal texts wins."""
        if scored.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            top.setdefault(self._decode([token]), logprob)
        return top


class ChatFormatter(CompletionFormatter):
    """Formats responses of `/v1/chat/completions`."""

    _object, _event_object = "chat.completion", "chat.completion.chunk"

    def first_event(self, index: int) -> dict[str, Any]:
        """Return the event with the role."""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _message(self, output: CompletionOutput) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": output.text, "refusal": None}}

    def _delta(self, output: CompletionOutput) -> dict[str, Any]:
        return {"delta": {"content": output.text} if output.text else {}}

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any]:
        content = [
            self._scored(it.token, it.logprob) | {"top_logprobs": [self._scored(*pair) for pair in it.top]}
            for it in output.logprobs
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._decode([token]), "logprob": logprob, "bytes": list(self._token_bytes(token))}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the token counts of a response."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
