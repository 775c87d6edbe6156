"""Text that is read while it is trained on: rows are tokenized as they come, and nothing is kept on disk.

The rows of all files, or of a data set of the hub, follow one another again and again as one endless row of tokens,
which is cut into sequences. Blocks of neighboring sequences are shuffled, each by itself. Every rank reads all rows
and takes its part, so that the order depends on the files and the seed alone. Where a block begins is told by the
number of a row and a place in it: a run that resumes reads from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxd_trainer.data.loader import Batch, Slicer, shuffled
from nxd_trainer.data.tables import read_texts
from nxd_trainer.data.tokenizer import Tokenizer, encode_prompt

ReadTexts = Callable[[int], Iterator[str]]  # the texts of one epoch, from the row of this number on


@dataclass(frozen=True)
class TextStream:
    """What is read.

    Attributes:
        name: name of the files or the data set, for messages.
        read_texts: the rows' texts in their order, the same at each call.
        tokenizer: makes the tokens; puts its prefix before each text, and the end-of-document token after it.
        sequence_length: tokens of a sample.
        shuffled_at_a_time: sequences of a block.
    """

    name: str
    read_texts: ReadTexts
    tokenizer: Tokenizer
    sequence_length: int
    shuffled_at_a_time: int


@dataclass(frozen=True)
class Cursor:
    """A place in the endless row of tokens: a token of a row of an epoch."""

    epoch: int = 0
    row: int = 0
    token: int = 0


def stream_files(files: Sequence[tuple[str, Path]], column: str) -> ReadTexts:
    """The texts in a column of files of rows, one file after the other; see `tables.read_texts`."""

    def read(start: int) -> Iterator[str]:
        return islice((text for _, path in files for text in read_texts(path, column)), start, None)

    return read


class StreamLoader:
    """The training batches of one rank from a stream, with the methods and attributes of `TrainLoader`.

    Args:
        stream: stream to train on.
        global_batch_size, gradient_accumulation_steps, dp_rank, dp_size, seed: as for `TrainLoader`.

    Raises:
        ValueError: the batch does not divide.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        global_batch_size: int,
        gradient_accumulation_steps: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
    ):
        self._slicer = Slicer(global_batch_size, gradient_accumulation_steps, dp_rank, dp_size)
        self._stream = stream
        self._seed = seed
        self._cursors = {0: Cursor()}  # of blocks by their number, from that of the next step on
        self.samples_consumed = self.tokens_learned = self.tokens_seen = 0

    def next_step(self) -> list[Batch]:
        """This rank's microbatches of the next optimizer step; the position moves on by a global batch.

        Raises:
            ValueError: a row that cannot be read.
        """
        batches = next(self.steps_from(self.samples_consumed))
        self.pass_step()
        return batches

    def steps_from(self, position: int) -> Iterator[list[Batch]]:
        """This rank's microbatches of one step after the other, without end; the loader's own position does not change.

        Args:
            position: as `samples_consumed` before the first of these steps; not before it is now.

        Raises:
            ValueError: a row that cannot be read, or there is no text at all.
        """
        size = self._slicer.global_batch_size
        block, first = divmod(position, self._stream.shuffled_at_a_time)
        samples = islice(self._samples_from(block), first, None)
        everyone = np.arange(size)
        while True:
            held = TokenRows(np.stack(list(islice(samples, size))))
            yield self._slicer.microbatches(held, everyone, everyone)

    def pass_step(self) -> None:
        """Move on by a step whose batches came from elsewhere, see `steps_from`."""
        self.samples_consumed += self._slicer.global_batch_size
        num_tokens = self._slicer.global_batch_size * self._stream.sequence_length
        self.tokens_learned += num_tokens
        self.tokens_seen += num_tokens
        block = self.samples_consumed // self._stream.shuffled_at_a_time
        for number in list(self._cursors):  # a copy: another thread may add to them
            if number < block:
                del self._cursors[number]

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain numbers; the same on every rank."""
        block = self.samples_consumed // self._stream.shuffled_at_a_time
        return {
            "samples_consumed": self.samples_consumed,
            "tokens_learned": self.tokens_learned,
            "tokens_seen": self.tokens_seen,
            "seed": self._seed,
            "sequence_length": self._stream.sequence_length,
            "shuffled_at_a_time": self._stream.shuffled_at_a_time,
            "block_begins": asdict(self._cursors[block]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the samples that `state` has consumed, at this loader's own layout.

        Raises:
            ValueError: the state is of another order: of data that were not streamed, or other sizes or another seed.
        """
        own = self.state_dict()
        keys = {
            "sequence_length": "data.sequence_length",
            "shuffled_at_a_time": "data.shuffle_buffer_size",
            "seed": "train.seed",
        }
        differences = [
            f"{name}={own[name]}, but the checkpoint has {state.get(name)} (from {key})"
            for name, key in keys.items()
            if state.get(name) != own[name]
        ]
        if differences:
            raise ValueError(
                f"the run cannot resume its position in the data: {'; '.join(differences)}; restore these values, "
                "or start over in another output folder"
            )
        self.samples_consumed = state["samples_consumed"]
        self.tokens_learned, self.tokens_seen = state["tokens_learned"], state["tokens_seen"]
        block = self.samples_consumed // self._stream.shuffled_at_a_time
        self._cursors = {block: Cursor(**state["block_begins"])}

    def _samples_from(self, block: int) -> Iterator[NDArray[np.int64]]:
        """The tokens `[sequence_length + 1]` of one sample after the other, from the beginning of a block on."""
        count, length = self._stream.shuffled_at_a_time, self._stream.sequence_length
        reader = _Reader(self._stream, self._cursors[block])
        while True:
            tokens = reader.take(count * length)
            self._cursors[block + 1] = reader.cursor
            for sample in shuffled(np.arange(count), count, seed=self._seed, epoch=block):
                yield tokens[sample * length : (sample + 1) * length + 1]
            block += 1


class _Reader:
    """The endless row of tokens, from a place on.

    Args:
        stream: stream to read.
        cursor: the first token.
    """

    def __init__(self, stream: TextStream, cursor: Cursor) -> None:
        self._stream = stream
        self._rows = self._rows_from(cursor)
        self._held: deque[tuple[Cursor, NDArray[np.int64]]] = deque()  # rows in part not taken, with their beginnings
        self._first = cursor.token  # of the first row held

    @property
    def cursor(self) -> Cursor:
        """The next token."""
        begins, _ = self._held[0]
        return Cursor(begins.epoch, begins.row, self._first)

    def take(self, count: int) -> NDArray[np.int64]:
        """The next tokens `[count + 1]`; the last of them is the first of the next ones."""
        parts = [tokens for _, tokens in self._held]
        available = sum(map(len, parts)) - self._first
        while available < count + 1:
            cursor, tokens = next(self._rows)
            self._held.append((cursor, tokens))
            parts.append(tokens)
            available += len(tokens)
        taken = np.concatenate(parts)[self._first : self._first + count + 1]
        self._first += count
        while self._first >= len(self._held[0][1]):
            self._first -= len(self._held.popleft()[1])
        return taken

    def _rows_from(self, cursor: Cursor) -> Iterator[tuple[Cursor, NDArray[np.int64]]]:
        """The tokens of each row with text, epoch after epoch; the first one is the cursor's."""
        epoch, row, tokenizer = cursor.epoch, cursor.row, self._stream.tokenizer
        while True:
            is_empty = row == 0
            for text in self._stream.read_texts(row):
                if text:
                    is_empty = False
                    ids = [*encode_prompt(tokenizer, text), tokenizer.end_of_document]
                    yield Cursor(epoch, row), np.array(ids, dtype=np.int64)
                row += 1
            if is_empty:
                raise ValueError(f"{self._stream.name} holds no row with text; add some, or set another data.column")
            epoch, row = epoch + 1, 0


@dataclass(frozen=True)
class TokenRows:
    """Samples in memory, as `Sequences`: tokens `[count, sequence_length + 1]`."""

    tokens: NDArray[np.int64]

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self.tokens.shape[1] - 1

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Samples `[count]` as inputs, the tokens that follow them, and positions, each `[count, sequence_length]`."""
        taken = self.tokens[samples]
        inputs = taken[:, :-1]
        return inputs, taken[:, 1:], np.broadcast_to(np.arange(self.sequence_length), inputs.shape)

    def count(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Of samples `[count]` together: the labels that the loss counts, and the tokens read: all of them."""
        num_tokens = len(samples) * self.sequence_length
        return num_tokens, num_tokens
