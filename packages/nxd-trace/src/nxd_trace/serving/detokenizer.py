"""Incremental detokenization: turns tokens that arrive one by one into text that can be sent at once.

The cost of a token depends neither on the length of the text before it nor on the lengths of the stop strings.
"""

from collections.abc import Callable, Iterable, Sequence

# A token may end in the middle of a character, which decodes to this until the next token completes it.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 64  # tokens; this many without a complete character are not the start of one


class StopString:
    """A stop string, prepared for matching in linear time (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        # For each number of matched characters, how many remain matched if the next one differs.
        self._shorter = [0, 0]
        for character in text[1:]:
            self._shorter.append(self.extend(self._shorter[-1], character))

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, matched: int, character: str) -> int:
        """Return how many characters are matched after a new character, if `matched` were before it."""
        while matched == len(self.text) or self.text[matched] != character:
            if matched == 0:
                return 0
            matched = self._shorter[matched]
        return matched + 1


def special_token(text: str, encode: Callable[[str], Iterable[int]], decode: Callable[[list[int]], str]) -> int | None:
    """Return the special token that a stop string spells and decoding omits, such as `<|im_end|>`; None otherwise.

    Such a string never appears in generated text, so generation stops at the token instead.
    """
    try:
        ids = [int(token) for token in encode(text)]
        return ids[0] if len(ids) == 1 and not decode(ids) else None
    except Exception:  # a tokenizer may raise anything for text that it cannot encode, and then never generates it
        return None


class IncrementalDetokenizer:
    """Decodes a growing list of tokens chunk by chunk, and stops at stop strings.

    Args:
        decode: function from token ids to text.
        stop: stop strings; they are not part of the text.

    Attributes:
        stopped: whether a stop string was found.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], stop: Sequence[StopString] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._matched = [0] * len(stop)  # characters of each stop string at the end of the text
        self._held = ""  # text that is not returned yet, because it may start a stop string
        # Only the newest tokens are decoded, with those of the character before: some decoders depend on these.
        self._window: list[int] = []
        self._num_before = 0  # tokens of the window whose text was processed earlier
        self._num_processed = 0  # characters of the window's text that were processed
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the new text that can no longer change."""
        self._window.append(token)
        text = self._decode(self._window)
        is_complete = not text.endswith(_INCOMPLETE) or len(self._window) > _MAX_WINDOW
        new = (text if is_complete else text.rstrip(_INCOMPLETE))[self._num_processed :]
        self._num_processed += len(new)
        if (is_complete and new) or len(self._window) > _MAX_WINDOW:
            del self._window[: self._num_before]
            self._num_before = len(self._window)
            self._num_processed = len(self._decode(self._window))
        return self._match(new)

    def flush(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.stopped:
            return ""
        text = self._match(self._decode(self._window)[self._num_processed :])
        if not self.stopped:
            text += self._held
        self._held = ""
        return text

    def _match(self, text: str) -> str:
        """Return the text so far that neither may start a stop string nor follows one."""
        if not self._stop:
            return text
        start = len(self._held) + 1
        self._held += text
        for end, character in enumerate(text, start):
            self._matched = [
                stop.extend(matched, character) for stop, matched in zip(self._stop, self._matched, strict=True)
            ]
            found = [len(stop) for stop, matched in zip(self._stop, self._matched, strict=True) if matched == len(stop)]
            if found:
                self.stopped = True
                return self._held[: end - max(found)]
        length = len(self._held) - max(self._matched)
        text, self._held = self._held[:length], self._held[length:]
        return text
