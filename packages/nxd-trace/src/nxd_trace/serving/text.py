"""Streaming text: turns tokens that arrive one by one into text that can be sent at once.

What a token costs depends neither on the text before it nor on the lengths of the stop texts.
"""

from collections.abc import Callable, Iterable, Sequence

# A token may end in the middle of a character, which decodes to this until the next token brings the rest.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 64  # tokens; this many without a whole character are no beginning of one


class StopText:
    """A text to stop at, prepared for matching in linear time (Knuth, Morris and Pratt 1977).

    Args:
        text: not empty.

    Attributes:
        text: the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        # For each number of matched characters, how many remain matched if the next one differs.
        self._shorter = [0, 0]
        for character in text[1:]:
            self._shorter.append(self.extend(self._shorter[-1], character))

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, matched: int, character: str) -> int:
        """How many characters at the end of a text begin the stop text, once this one has been added.

        Args:
            matched: number of characters matched before.
            character: the new one.
        """
        while matched == len(self.text) or self.text[matched] != character:
            if matched == 0:
                return 0
            matched = self._shorter[matched]
        return matched + 1


def unseen_token(text: str, encode: Callable[[str], Iterable[int]], decode: Callable[[list[int]], str]) -> int | None:
    """The one token that a stop text spells and decoding omits, such as `<|im_end|>`; None for other texts.

    Such a text never appears in what is written: to stop there is to stop at the token.
    """
    try:
        ids = [int(token) for token in encode(text)]
        return ids[0] if len(ids) == 1 and not decode(ids) else None
    except Exception:  # a tokenizer may raise anything for a text that it cannot encode, and then never writes it
        return None


class TextStream:
    """The text of a growing list of tokens, piece by piece.

    Args:
        decode: from token ids to text.
        stop: texts after which nothing more is wanted; they are omitted themselves.

    Attributes:
        stopped: whether one of them was found.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], stop: Sequence[StopText] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._matched = [0] * len(stop)  # characters of each, at the end of what was read
        self._held = ""  # read and not given, because a stop text may have begun
        # Only the newest tokens are decoded, after those of the character before: some decoders inspect these.
        self._window: list[int] = []
        self._num_before = 0  # tokens of the window whose text has been read
        self._num_read = 0  # characters of the window's text that have been read
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; gives the text that is certain by now and has not been given yet."""
        self._window.append(token)
        text = self._decode(self._window)
        is_certain = not text.endswith(_INCOMPLETE) or len(self._window) > _MAX_WINDOW
        new = (text if is_certain else text.rstrip(_INCOMPLETE))[self._num_read :]
        self._num_read += len(new)
        if (is_certain and new) or len(self._window) > _MAX_WINDOW:
            del self._window[: self._num_before]
            self._num_before = len(self._window)
            self._num_read = len(self._decode(self._window))
        return self._read(new)

    def rest(self) -> str:
        """What was held back, at the end."""
        if self.stopped:
            return ""
        given = self._read(self._decode(self._window)[self._num_read :])
        if not self.stopped:
            given += self._held
        self._held = ""
        return given

    def _read(self, text: str) -> str:
        """What can be given: nothing that may begin a stop text, and nothing after one."""
        if not self._stop:
            return text
        known = len(self._held)
        self._held += text
        for end, character in enumerate(text, start=known + 1):
            self._matched = [
                stop.extend(matched, character) for stop, matched in zip(self._stop, self._matched, strict=True)
            ]
            found = [len(stop) for stop, matched in zip(self._stop, self._matched, strict=True) if matched == len(stop)]
            if found:
                self.stopped = True
                return self._held[: end - max(found)]
        certain = len(self._held) - max(self._matched)
        given, self._held = self._held[:certain], self._held[certain:]
        return given
