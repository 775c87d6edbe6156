"""Streaming text: turns tokens that arrive one by one into text that can be sent at once."""

from collections.abc import Callable, Iterable, Sequence

# A token may end in the middle of a character, which decodes to this until the next token brings the rest.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of a growing list of tokens, piece by piece.

    Args:
        decode: from token ids to text.
        stop: texts after which nothing more is wanted; they are left out themselves.

    Attributes:
        stopped: whether one of them was found.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._tokens: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; gives the text that is certain by now and has not been given yet."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._give(text, min(found))
        certain = len(text.rstrip(_INCOMPLETE)) if text.endswith(_INCOMPLETE) else len(text)
        return self._give(text, certain - self._begun_stop(text[:certain]))

    def rest(self) -> str:
        """What was held back, at the end."""
        text = self._decode(self._tokens)
        return "" if self.stopped else self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _begun_stop(self, text: str) -> int:
        """Length of the longest end of the text that may become a stop text."""
        lengths = (length for stop in self._stop for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return max(lengths, default=0)
