"""A traced language model as generation calls it: parts of one prompt, and tokens of many sequences.

Every row of a decode program is a token with its position and the blocks of its sequence. Several rows may be of one
sequence: each layer writes the keys and values of all rows before any row looks back, and each looks back to its own
position. So one call checks several guessed tokens as exactly as if they came one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_trace.manifest import RankManifest, rank_folder
from nxd_trace.model import TensorParallelModel


@dataclass(frozen=True)
class Row:
    """A token to feed.

    Attributes:
        token: its id.
        position: in its sequence.
        blocks: its sequence's blocks of the cache, in order.
    """

    token: int
    position: int
    blocks: Sequence[int]


class CachedModel:
    """The programs of a model that was made by `compile_generator`.

    Args:
        model: traced, or loaded again.

    Attributes:
        model: the same.
        batch_size: sequences that the cache has room for.
        num_rows: rows of the largest decode program.
        max_length: maximum length of a sequence.
        block_size: tokens in a block.
        num_blocks: number of blocks of the cache.
        vocab_size: one more than the largest token id.

    Raises:
        ValueError: the model was not made for generation.
    """

    def __init__(self, model: TensorParallelModel) -> None:
        shapes = {name: signature.inputs[0].shape for name, signature in model.programs.items() if signature.inputs}
        self._decodes = sorted((shape[0], name) for name, shape in shapes.items() if name.startswith("decode_"))
        self._prefills = sorted((shape[1], name) for name, shape in shapes.items() if name.startswith("prefill_"))
        states = RankManifest.read(model.folder / rank_folder(0)).states
        if not self._decodes or not self._prefills or "cache.keys_0" not in states:
            raise ValueError(
                f"the model with programs {', '.join(model.programs)} was not traced for generation; create it with "
                "compile_generator"
            )
        self.model = model
        self.num_rows, largest = self._decodes[-1]
        signature = model.programs[largest]
        self.num_blocks, self.block_size = states["cache.keys_0"].shape[1:3]
        self._table_length = signature.inputs[2].shape[1]
        self.batch_size = (self.num_blocks - 1) // self._table_length
        self.max_length = self._table_length * self.block_size
        self.vocab_size = signature.outputs[0].shape[-1]

    @property
    def prefill_lengths(self) -> tuple[int, ...]:
        """Tokens that its prefill programs take."""
        return tuple(length for length, _ in self._prefills)

    def feed_part(self, tokens: Sequence[int], position: int, blocks: Sequence[int]) -> tuple[int, Tensor]:
        """Feed the first tokens of what is left of a prompt: as many as the smallest program that fits, or the largest.

        Args:
            tokens: all that are left.
            position: position of the first.
            blocks: blocks of the sequence.

        Returns:
            How many were fed, and the logits after the last of them, `[vocab]`.

        Raises:
            WorkerError: a worker failed.
        """
        length, program = self._prefill_for(len(tokens))
        fed = tokens[:length]
        # Padding stands before the tokens, so that the last column is the last token.
        padding = length - len(fed)
        input_ids = torch.zeros(1, length, dtype=torch.long)
        positions = torch.full((1, length), self.max_length - 1)
        input_ids[0, padding:] = torch.tensor(fed)
        positions[0, padding:] = torch.arange(position, position + len(fed))
        logits: Tensor = self.model.run(program, input_ids, positions, self._tables([blocks], 1))
        return len(fed), logits[0]

    def part_length(self, num_tokens: int) -> int:
        """Tokens, with padding, of the part that is fed next where this many are left."""
        return self._prefill_for(num_tokens)[0]

    def _prefill_for(self, num_tokens: int) -> tuple[int, str]:
        return next((it for it in self._prefills if it[0] >= num_tokens), self._prefills[-1])

    def feed_rows(self, rows: Sequence[Row]) -> Tensor:
        """Feed at most `num_rows` single tokens; the logits after each, `[rows, vocab]`.

        Raises:
            WorkerError: a worker failed.
        """
        size, program = next(it for it in self._decodes if it[0] >= len(rows))
        padding = size - len(rows)
        input_ids = torch.tensor([row.token for row in rows] + [0] * padding).unsqueeze(1)
        positions = torch.tensor([row.position for row in rows] + [self.max_length - 1] * padding).unsqueeze(1)
        logits: Tensor = self.model.run(program, input_ids, positions, self._tables([row.blocks for row in rows], size))
        return logits[: len(rows)]

    def _tables(self, blocks: Sequence[Sequence[int]], size: int) -> Tensor:
        tables = torch.zeros(size, self._table_length, dtype=torch.long)
        for row, of_sequence in enumerate(blocks):
            tables[row, : len(of_sequence)] = torch.tensor(of_sequence)
        return tables
