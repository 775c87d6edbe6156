"""A traced language model as generation calls it: parts of one prompt, and tokens of many sequences.

Every row of a decode program is a token with its position and the blocks of its sequence. Several rows may be of one
sequence: each layer writes the keys and values of all rows before any row looks back, and each looks back to its own
position. So one call checks several guessed tokens as exactly as if they came one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_trace.generation.sequence import RunningSequence
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


class Drafter:
    """A draft model beside the model whose tokens it guesses.

    Args:
        draft: compiled with the sizes of the model.
        model: compiled with room for guesses.

    Attributes:
        draft: the same.
        num_proposed: guesses so far.
        num_accepted: number of tokens that the model kept.

    Raises:
        ValueError: they do not fit each other, or the model has no room for guesses.
    """

    def __init__(self, draft: CachedModel, model: CachedModel) -> None:
        for what in ("vocab_size", "max_length", "batch_size", "block_size", "prefill_lengths"):
            ours, theirs = getattr(draft, what), getattr(model, what)
            if ours != theirs:
                raise ValueError(
                    f"the draft model has {what}={ours}, but the model {what}={theirs}; use a draft with the same "
                    "vocabulary, and compile it with the same sizes"
                )
        self._most = model.num_rows // model.batch_size - 1
        if self._most < 1 or draft.num_rows < 2 * draft.batch_size:
            raise ValueError(
                "a model or its draft was compiled without speculative tokens; pass compile_generator "
                "num_speculative_tokens of 1 or more, also for the draft"
            )
        self.draft = draft
        self.num_proposed = 0
        self.num_accepted = 0

    def propose(self, sequences: Sequence[RunningSequence]) -> list[list[int]]:
        """Guess what follows each text: as many tokens as there is room and use for.

        Raises:
            WorkerError: a worker of the draft failed.
        """
        guesses: list[list[int]] = [[] for _ in sequences]
        wanted = [min(self._most, sequence.num_guessable) for sequence in sequences]
        unseen = {
            index: list(sequence.text[sequence.num_drafted :])
            for index, sequence in enumerate(sequences)
            if wanted[index]
        }
        while unseen:
            for index, token in self._next_tokens(sequences, unseen).items():
                guesses[index].append(token)
            unseen = {index: guesses[index][-1:] for index in unseen if len(guesses[index]) < wanted[index]}
        self.num_proposed += sum(map(len, guesses))
        return guesses

    def note_accepted(self, sequence: RunningSequence, guesses: Sequence[int], number: int) -> None:
        """The model kept this many of a sequence's guesses; what the draft saw of the others is written over."""
        self.num_accepted += number
        # The last guess has not been fed.
        sequence.num_drafted -= max(0, len(guesses) - 1 - number)

    def _next_tokens(self, sequences: Sequence[RunningSequence], unseen: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Feed what the draft has not seen; the likeliest token after each."""
        rows, ends = [], {}
        for index, tokens in unseen.items():
            sequence = sequences[index]
            rows += [Row(token, sequence.num_drafted + place, sequence.blocks) for place, token in enumerate(tokens)]
            sequence.num_drafted += len(tokens)
            ends[index] = len(rows) - 1
        likeliest = self.draft.feed_rows(rows).argmax(dim=1)
        return {index: int(likeliest[end]) for index, end in ends.items()}
