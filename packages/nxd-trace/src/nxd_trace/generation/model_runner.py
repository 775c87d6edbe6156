"""Runs the programs of models compiled for generation: prefill, decode, and the guesses of a draft model.

Each row of a decode program is a token with its position and the blocks of its sequence. Several rows may belong to one
sequence: each layer stores the keys and values of all rows before any row attends, and each row attends to positions up
to its own. So one call verifies several draft tokens with the same result as one call per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_trace.generation.prompt_inputs import TEXT, PromptInputs
from nxd_trace.generation.sequence import RunningSequence
from nxd_trace.manifest import RankManifest, rank_folder
from nxd_trace.model import TensorParallelModel
from nxd_trace.programs import Signature


@dataclass(frozen=True)
class DecodeRow:
    """One row of a decode call.

    Attributes:
        token: token id.
        position: position in its sequence.
        blocks: the sequence's blocks of the cache, in order.
        rotary_offset: difference between its rotary position and its position.
    """

    token: int
    position: int
    blocks: Sequence[int]
    rotary_offset: int = 0


class ModelRunner:
    """The prefill and decode programs of a model.

    Args:
        model: a model from `compile_generator`, or one loaded again.

    Attributes:
        batch_size: number of sequences that fit the cache.
        num_rows: number of rows of the largest decode program.
        max_length: maximum length of a sequence.
        block_size: number of tokens per block.
        num_blocks: number of blocks of the cache.
        vocab_size: size of the vocabulary.
        prefill_lengths: number of tokens of each prefill program.

    Raises:
        ValueError: the model was not compiled for generation.
    """

    def __init__(self, model: TensorParallelModel) -> None:
        shapes = {name: signature.inputs[0].shape for name, signature in model.programs.items() if signature.inputs}
        self._decodes = sorted((shape[0], name) for name, shape in shapes.items() if name.startswith("decode_"))
        self._prefills = sorted((shape[1], name) for name, shape in shapes.items() if name.startswith("prefill_"))
        self._with_features = next(
            ((shape[1], name) for name, shape in shapes.items() if name.startswith("features_")), None
        )
        self._inputs = {name: _further_inputs(signature) for name, signature in model.programs.items()}
        states = RankManifest.read(model.folder / rank_folder(0)).states
        if not self._decodes or not self._prefills or "cache.keys_0" not in states:
            raise ValueError(
                f"the model with programs {', '.join(model.programs)} was not traced for generation; create it with "
                "compile_generator"
            )
        self._model = model
        self.num_rows, largest = self._decodes[-1]
        signature = model.programs[largest]
        self.num_blocks, self.block_size = states["cache.keys_0"].shape[1:3]
        self._table_length = signature.inputs[2].shape[1]
        self.batch_size = (self.num_blocks - 1) // self._table_length
        self.max_length = self._table_length * self.block_size
        self.vocab_size = signature.outputs[0].shape[-1]
        self.prefill_lengths = tuple(length for length, _ in self._prefills)

    def prefill_length(self, num_tokens: int, position: int = 0, inputs: PromptInputs | None = None) -> int:
        """Return the length, with padding, of the next prefill call if this many tokens remain."""
        return self._prefill_for(num_tokens, position, inputs)[0]

    def check_inputs(self, inputs: PromptInputs, num_tokens: int) -> None:
        """Raise ValueError unless the model takes these inputs of a prompt of `num_tokens`."""
        if self._with_features is None:
            raise ValueError("the prompt has features, but the model was compiled for text alone")
        length, program = self._with_features
        inputs.check(num_tokens, length, self._inputs[program])

    def prefill(
        self, tokens: Sequence[int], position: int, blocks: Sequence[int], inputs: PromptInputs | None = None
    ) -> tuple[int, Tensor]:
        """Process the next chunk of a prompt with the smallest program that fits all its tokens, or the largest one.

        Args:
            tokens: the remaining tokens of the prompt.
            position: position of the first one.
            blocks: blocks of the sequence.
            inputs: the prompt's inputs beside its token ids.

        Returns:
            Number of tokens processed, and the logits after the last of them, `[vocab]`.
        """
        length, program = self._prefill_for(len(tokens), position, inputs)
        number = min(length, len(tokens))
        if inputs is not None and "features" in self._inputs[program]:
            number = inputs.chunk(position, number)
        # Padding comes first, so the last column is the last token.
        padding = length - number
        input_ids = torch.zeros(1, length, dtype=torch.long)
        positions = torch.full((1, length), self.max_length - 1)
        input_ids[0, padding:] = torch.tensor(tokens[:number])
        positions[0, padding:] = torch.arange(position, position + number)
        columns = (inputs or TEXT).columns(position, position + number, padding, self._inputs[program])
        tables = self._block_tables([blocks], 1)
        logits: Tensor = self._model.run(program, input_ids, positions, tables, *([columns] if columns else []))
        return number, logits[0]

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Process at most `num_rows` tokens; returns the logits after each, `[rows, vocab]`."""
        size, program = next(it for it in self._decodes if it[0] >= len(rows))
        padding = size - len(rows)
        input_ids = torch.tensor([row.token for row in rows] + [0] * padding).unsqueeze(1)
        positions = torch.tensor([row.position for row in rows] + [self.max_length - 1] * padding).unsqueeze(1)
        tables = self._block_tables([row.blocks for row in rows], size)
        further = {}
        if "rotary" in self._inputs[program]:
            offsets = torch.tensor([row.rotary_offset for row in rows] + [0] * padding).unsqueeze(1)
            further["rotary"] = (
                (positions + offsets).unsqueeze(2).expand_as(self._inputs[program]["rotary"]).contiguous()
            )
        logits: Tensor = self._model.run(program, input_ids, positions, tables, *([further] if further else []))
        return logits[: len(rows)]

    def _prefill_for(self, num_tokens: int, position: int, inputs: PromptInputs | None) -> tuple[int, str]:
        found = next((it for it in self._prefills if it[0] >= num_tokens), self._prefills[-1])
        is_text = inputs is None or inputs.is_text(position, position + min(found[0], num_tokens))
        return found if is_text or self._with_features is None else self._with_features

    def _block_tables(self, blocks: Sequence[Sequence[int]], size: int) -> Tensor:
        tables = torch.zeros(size, self._table_length, dtype=torch.long)
        for row, of_sequence in enumerate(blocks):
            tables[row, : len(of_sequence)] = torch.tensor(of_sequence)
        return tables


def _further_inputs(signature: Signature) -> dict[str, Tensor]:
    """Return zeros of the shapes of a program's inputs beside ids, positions and block tables, by name."""
    match signature.input_structure["list"][0]["tuple"]:
        case [_, _, _, {"dict": indices}]:
            specs = {name: signature.inputs[index] for name, index in indices.items()}
            return {name: torch.zeros(spec.shape, dtype=spec.torch_dtype) for name, spec in specs.items()}
    return {}


class Drafter:
    """Proposes tokens with a small draft model; the model keeps those that it would have generated itself.

    A sequence has the same blocks in both caches, so both share the same prefixes. Where the draft's cache lacks
    tokens, such as those of sampled sequences, its guesses are worse, but the texts stay the same: every token that is
    kept was chosen from the model's own logits.

    Args:
        draft: the draft model, compiled with the model's sizes.
        model: the model, compiled with speculative tokens.

    Attributes:
        num_proposed: number of tokens proposed so far.
        num_accepted: number of these that the model kept.
    """

    def __init__(self, draft: ModelRunner, model: ModelRunner) -> None:
        for what in ("vocab_size", "max_length", "batch_size", "block_size", "prefill_lengths"):
            ours, theirs = getattr(draft, what), getattr(model, what)
            if ours != theirs:
                raise ValueError(
                    f"the draft model has {what}={ours}, but the model {what}={theirs}; use a draft with the same "
                    "vocabulary, and compile it with the same sizes"
                )
        self._max_tokens = model.num_rows // model.batch_size - 1
        if self._max_tokens < 1 or draft.num_rows < 2 * draft.batch_size:
            raise ValueError(
                "a model or its draft was compiled without speculative tokens; pass compile_generator "
                "num_speculative_tokens of 1 or more, also for the draft"
            )
        self.draft = draft
        self.num_proposed = 0
        self.num_accepted = 0

    def prefill(self, tokens: Sequence[int], position: int, blocks: Sequence[int]) -> None:
        """Process a chunk of a prompt, as the ids alone."""
        number = 0
        while number < len(tokens):
            processed, _ = self.draft.prefill(tokens[number:], position + number, blocks)
            number += processed

    def propose(self, sequences: Sequence[RunningSequence]) -> list[list[int]]:
        """Return the proposed next tokens of each sequence, as many as can be verified and used."""
        proposed: list[list[int]] = [[] for _ in sequences]
        wanted = [min(self._max_tokens, sequence.max_draft_tokens) for sequence in sequences]
        pending = {
            index: sequence.all_tokens[sequence.num_draft_computed :]
            for index, sequence in enumerate(sequences)
            if wanted[index]
        }
        while pending:
            for index, token in self._next_tokens(sequences, pending).items():
                proposed[index].append(token)
            pending = {index: proposed[index][-1:] for index in pending if len(proposed[index]) < wanted[index]}
        self.num_proposed += sum(map(len, proposed))
        return proposed

    def accept(self, sequence: RunningSequence, proposed: Sequence[int], number: int) -> None:
        """Count the tokens that the model kept; the draft's entries of the others are overwritten later."""
        self.num_accepted += number
        # The draft model has not processed its last proposal.
        sequence.num_draft_computed -= max(0, len(proposed) - 1 - number)

    def _next_tokens(
        self, sequences: Sequence[RunningSequence], pending: Mapping[int, Sequence[int]]
    ) -> dict[int, int]:
        """Process pending tokens; returns the most likely next token by sequence index."""
        rows, ends = [], {}
        for index, tokens in pending.items():
            sequence = sequences[index]
            start = sequence.num_draft_computed
            rows += [DecodeRow(token, position, sequence.blocks) for position, token in enumerate(tokens, start)]
            sequence.num_draft_computed += len(tokens)
            ends[index] = len(rows) - 1
        most_likely = self.draft.decode(rows).argmax(dim=1)
        return {index: int(most_likely[end]) for index, end in ends.items()}
