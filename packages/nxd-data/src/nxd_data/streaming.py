"""Streams text during training: rows are tokenized as they are read, and nothing is stored on disk.

The rows of all files, or of a dataset on the hub, form an endless stream of tokens, epoch after epoch, which is cut
into sequences. Blocks of consecutive sequences are shuffled, one at a time. Every rank reads all rows and takes its
part, so the order depends only on the data and the seed. A checkpoint has the row and token where the current block
starts, and a resumed run reads from there.
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

from nxd_data.loader import Batch, Slicer, check_position, shuffled
from nxd_data.sequences import TokenRows
from nxd_data.tables import import_datasets, read_texts, text_in
from nxd_data.tokenizer import Tokenizer, encode_prompt

ReadTexts = Callable[[int], Iterator[str]]  # the texts of an epoch, starting at this row


@dataclass(frozen=True)
class StreamSource:
    """A source of text to stream."""

    name: str  # name of the files or the dataset, for messages
    read_texts: ReadTexts  # function that reads the rows' texts, in the same order at each call
    tokenizer: Tokenizer  # the tokenizer, which adds its prefix before each text and the end-of-document token after it
    sequence_length: int  # tokens per sample
    shuffled_at_a_time: int  # sequences per shuffled block


@dataclass(frozen=True)
class Cursor:
    """A position in the endless stream of tokens."""

    epoch: int = 0
    row: int = 0
    token: int = 0


def stream_files(files: Sequence[tuple[str, Path]], column: str) -> ReadTexts:
    """Stream the texts in a column of files of rows, one file after the other; see `tables.read_texts`."""

    def read(start: int) -> Iterator[str]:
        return islice((text for _, path in files for text in read_texts(path, column)), start, None)

    return read


def stream_hub(name: str, column: str, *, config: str | None = None, split: str = "train") -> ReadTexts:
    """Stream the texts in a column of a split from the hub; arguments as for `hub_files`.

    Raises:
        ValueError: as for `hub_files`; while reading, also if a row lacks the column or cannot be read.
    """
    datasets = import_datasets(name)

    def rows(start: int) -> Iterator[Any]:
        try:
            yield from datasets.load_dataset(name, config, split=split, streaming=True).skip(start)
        except Exception as error:  # as in `hub_files`
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(f"data.dataset={name} (data.dataset_split={split}) cannot be read: {reason}") from error

    def read(start: int) -> Iterator[str]:
        for number, row in enumerate(rows(start), start=start + 1):
            yield text_in(f"{name}, row {number}", row, column)

    return read


class StreamLoader:
    """The training batches of one rank from a stream, with the methods and attributes of `TrainLoader`.

    Args:
        stream: the source to train on.
        global_batch_size, gradient_accumulation_steps, dp_rank, dp_size, seed: as for `TrainLoader`.

    Raises:
        ValueError: the batch is not divisible.
    """

    def __init__(
        self,
        stream: StreamSource,
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
        self._cursors = {0: Cursor()}  # of blocks by number, from that of the next step on
        self.samples_consumed = self.tokens_learned = self.tokens_seen = 0

    def next_step(self) -> list[Batch]:
        """Return this rank's microbatches of the next step, and advance; raises ValueError as `steps_from` does."""
        batches = next(self.steps_from(self.samples_consumed))
        self.pass_step()
        return batches

    def steps_from(self, position: int) -> Iterator[list[Batch]]:
        """Yield this rank's microbatches step by step, endlessly; the loader's own position does not change.

        Args:
            position: `samples_consumed` before the first of these steps; at least its current value.

        Raises:
            ValueError: a row cannot be read, or there is no text.
        """
        size = self._slicer.global_batch_size
        block, first = divmod(position, self._stream.shuffled_at_a_time)
        samples = islice(self._samples_from(block), first, None)
        everyone = np.arange(size)
        while True:
            held = TokenRows(np.stack(list(islice(samples, size))))
            yield self._slicer.microbatches(held, everyone, everyone)

    def pass_step(self) -> None:
        """Advance by a step whose batches were taken from `steps_from`."""
        self.samples_consumed += self._slicer.global_batch_size
        num_tokens = self._slicer.global_batch_size * self._stream.sequence_length
        self.tokens_learned += num_tokens
        self.tokens_seen += num_tokens
        for number in list(self._cursors):  # a copy: another thread may add to them
            if number < self._block:
                del self._cursors[number]

    @property
    def _block(self) -> int:
        return self.samples_consumed // self._stream.shuffled_at_a_time

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain numbers; the same on every rank."""
        return {
            "samples_consumed": self.samples_consumed,
            "tokens_learned": self.tokens_learned,
            "tokens_seen": self.tokens_seen,
            "seed": self._seed,
            "sequence_length": self._stream.sequence_length,
            "shuffled_at_a_time": self._stream.shuffled_at_a_time,
            "block_begins": asdict(self._cursors[self._block]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the samples that `state` has consumed, with this loader's layout.

        Raises:
            ValueError: the state has another order: data that were not streamed, other sizes or another seed.
        """
        keys = {
            "sequence_length": "data.sequence_length",
            "shuffled_at_a_time": "data.shuffle_buffer_size",
            "seed": "train.seed",
        }
        check_position(self.state_dict(), state, keys)
        self.samples_consumed = state["samples_consumed"]
        self.tokens_learned, self.tokens_seen = state["tokens_learned"], state["tokens_seen"]
        self._cursors = {self._block: Cursor(**state["block_begins"])}

    def _samples_from(self, block: int) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens `[sequence_length + 1]` of one sample after the other, from the start of a block."""
        count, length = self._stream.shuffled_at_a_time, self._stream.sequence_length
        reader = _Reader(self._stream, self._cursors[block])
        while True:
            tokens = reader.take(count * length)
            self._cursors[block + 1] = reader.cursor
            for sample in shuffled(np.arange(count), count, seed=self._seed, epoch=block):
                yield tokens[sample * length : (sample + 1) * length + 1]
            block += 1


class _Reader:
    """Reads the endless stream of tokens from a position on."""

    def __init__(self, stream: StreamSource, cursor: Cursor) -> None:
        self._stream = stream
        self._rows = self._rows_from(cursor)
        self._held: deque[tuple[Cursor, NDArray[np.int64]]] = deque()  # rows not yet used up, with their starts
        self._first = cursor.token  # in the first of these rows

    @property
    def cursor(self) -> Cursor:
        """The position of the next token."""
        start, _ = self._held[0]
        return Cursor(start.epoch, start.row, self._first)

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the next tokens `[count + 1]`; the last one is also the first of the next call."""
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
        """Yield the tokens of each row with text, epoch after epoch, starting with the cursor's row."""
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
