"""Answers in the JSON of OpenAI's interface: whole ones and events of a stream, of completions and of chats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_trace.generation import TokenLogprobs

Decode = Callable[[Sequence[int]], str]
TokenBytes = Callable[[int], bytes]


@dataclass
class Text:
    """A generated text, or the next piece of one.

    Attributes:
        index: index of the text in its request.
        text: may be empty.
        finish_reason: None if more will follow.
        logprobs: log-probabilities of its tokens; empty if they were not asked for.
        offset: characters of the text before this piece.
    """

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0


class CompletionForm:
    """The answers to `/v1/completions`.

    Args:
        common: the fields of every answer: `id`, `created` and `model`.
        decode: from token ids to text, for log-probabilities.
        token_bytes: the bytes of a token, of which a character may take several.
        has_logprobs: whether the client asked for them.
    """

    _kind = _event_kind = "text_completion"

    def __init__(self, common: dict[str, Any], decode: Decode, token_bytes: TokenBytes, *, has_logprobs: bool) -> None:
        self._common = common
        self._decode = decode
        self._token_bytes = token_bytes
        self._has_logprobs = has_logprobs

    def whole(self, texts: Sequence[Text], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer, when all is written."""
        choices = [self._choice(text, self._said(text)) for text in texts]
        return {**self._common, "object": self._kind, "choices": choices, "usage": usage}

    def beginning(self, index: int) -> dict[str, Any] | None:
        """The event before a text's first piece, if there is one."""
        del index
        return None

    def event(self, text: Text) -> dict[str, Any]:
        """A piece."""
        return self._event([self._choice(text, self._piece(text))])

    def last_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event with the counts of tokens."""
        return self._event([]) | {"usage": usage}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common, "object": self._event_kind, "choices": choices}

    def _choice(self, text: Text, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(text) if self._has_logprobs else None
        return {"index": text.index, **said, "logprobs": logprobs, "finish_reason": text.finish_reason}

    def _said(self, text: Text) -> dict[str, Any]:
        return {"text": text.text}

    def _piece(self, text: Text) -> dict[str, Any]:
        return self._said(text)

    def _logprobs(self, text: Text) -> dict[str, Any]:
        tokens = [self._decode([it.token]) for it in text.logprobs]
        offsets, offset = [], text.offset
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [it.logprob for it in text.logprobs],
            "top_logprobs": [self._top(it) for it in text.logprobs],
            "text_offset": offsets,
        }

    def _top(self, scored: TokenLogprobs) -> dict[str, float] | None:
        """By text; where several tokens have one text, of the likeliest. The written token is always there."""
        if scored.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            top.setdefault(self._decode([token]), logprob)
        return top


class ChatForm(CompletionForm):
    """The answers to `/v1/chat/completions`; arguments as of `CompletionForm`."""

    _kind, _event_kind = "chat.completion", "chat.completion.chunk"

    def beginning(self, index: int) -> dict[str, Any]:
        """The event that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _said(self, text: Text) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text.text, "refusal": None}}

    def _piece(self, text: Text) -> dict[str, Any]:
        return {"delta": {"content": text.text} if text.text else {}}

    def _logprobs(self, text: Text) -> dict[str, Any]:
        content = [
            self._scored(it.token, it.logprob) | {"top_logprobs": [self._scored(*pair) for pair in it.top]}
            for it in text.logprobs
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._decode([token]), "logprob": logprob, "bytes": list(self._token_bytes(token))}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Tokens taken and given, and how many of the taken ones the cache had already."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
