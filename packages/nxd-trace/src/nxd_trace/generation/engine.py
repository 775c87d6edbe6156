"""Continuous batching: each row of a batch is a sequence that joins and leaves while the others continue.

Every step feeds each row the tokens that it has not seen yet: the prompt, or a part of a long one, and later the token
chosen last. So prompts of any length join a running batch, and all steps are alike.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nxd_trace.generation.prompts import read_prompt
from nxd_trace.generation.sampling import SamplingSettings, choose_token
from nxd_trace.manifest import RankManifest, rank_folder
from nxd_trace.model import TensorParallelModel

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class RunningSequence:
    """A prompt and the tokens generated after it.

    Attributes:
        settings: how its tokens are chosen.
        unseen: tokens that the model has not been fed yet.
        num_seen: tokens in the cache.
        tokens: written so far; a stop token, if one ended it, is the last.
        finish_reason: None while it runs; "stop" after a stop token, "length" after the most tokens asked for.
        failure: what choosing a token raised, and so ended this sequence alone.
    """

    settings: SamplingSettings
    unseen: list[int]
    num_seen: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self._draws = torch.Generator().manual_seed(self.settings.seed)

    def extend(self, logits: torch.Tensor) -> None:
        """Choose the next token from `[vocab]` logits."""
        token = choose_token(logits, self.settings, self._draws)
        self.tokens.append(token)
        self.unseen = [token]
        if token in self.settings.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.settings.max_new_tokens:
            self.finish_reason = "length"


class GenerationEngine:
    """Steps a batch of sequences. Not for several threads at once.

    Args:
        model: traced by `compile_generator`, or loaded again.

    Attributes:
        batch_size: sequences at a time.
        max_length: of a prompt and what is written after it.
        vocab_size: one more than the largest token id.

    Raises:
        ValueError: the model was not made for generation.
    """

    def __init__(self, model: TensorParallelModel) -> None:
        self._model = model
        shapes = {name: signature.inputs[0].shape for name, signature in model.programs.items() if signature.inputs}
        states = RankManifest.read(model.folder / rank_folder(0)).states
        if "decode" not in shapes or "cache.keys_0" not in states:
            raise ValueError(
                f"the model with programs {', '.join(model.programs)} was not traced for generation; make it with "
                "compile_generator"
            )
        self.batch_size = shapes["decode"][0]
        self.max_length = states["cache.keys_0"].shape[2]
        self.vocab_size = model.programs["decode"].outputs[0].shape[-1]
        self._programs = sorted((shape[1], name) for name, shape in shapes.items())
        self._rows: list[RunningSequence | None] = [None] * self.batch_size

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return self._rows.count(None)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs."""
        return self.num_free == self.batch_size

    def check(self, prompt: Any, settings: SamplingSettings) -> list[int]:
        """The prompt's token ids, which may be in any sequence, tensor or array.

        Raises:
            TypeError: the prompt is no such thing.
            ValueError: it is empty, has ids outside the vocabulary, or leaves no room for the new tokens.
        """
        ids = read_prompt(prompt, self.vocab_size)
        if len(ids) + settings.max_new_tokens > self.max_length:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_new_tokens={settings.max_new_tokens} are more than the "
                f"max_length={self.max_length} that the model was compiled with; ask for "
                f"{max(0, self.max_length - len(ids))} or fewer, or compile it with a larger max_length"
            )
        return ids

    def add(self, prompt: Any, settings: SamplingSettings) -> RunningSequence:
        """Give a prompt a row.

        Raises:
            TypeError: as `check`.
            ValueError: as `check`; or all rows are taken.
        """
        ids = self.check(prompt, settings)
        if not self.num_free:
            raise ValueError(f"all {self.batch_size} rows of the batch are taken; step until one is free")
        sequence = RunningSequence(settings, ids)
        self._rows[self._rows.index(None)] = sequence
        return sequence

    def remove(self, sequence: RunningSequence) -> None:
        """Free the row of a sequence that is no longer needed; does nothing if it has left already."""
        self._rows = [None if row is sequence else row for row in self._rows]

    def step(self) -> list[RunningSequence]:
        """Run the model once. Sequences that finish or fail leave their rows.

        Returns:
            Those that got a token, or a failure; not those whose prompt continues in the next step.

        Raises:
            WorkerError: a worker failed.
            FloatingPointError: the logits have NaNs, which are in the cache, too. After either, `clear` the engine.
        """
        running = [(row, sequence) for row, sequence in enumerate(self._rows) if sequence is not None]
        if not running:
            return []
        longest = max(len(sequence.unseen) for _, sequence in running)
        length, program = next((it for it in self._programs if it[0] >= longest), self._programs[-1])
        # Padding stands before the tokens, so that the last column is the last token of each row.
        input_ids = torch.zeros(self.batch_size, length, dtype=torch.long)
        positions = torch.full((self.batch_size, length), self.max_length - 1)
        for row, sequence in running:
            tokens = sequence.unseen[:length]
            input_ids[row, length - len(tokens) :] = torch.tensor(tokens)
            positions[row, length - len(tokens) :] = torch.arange(len(tokens)) + sequence.num_seen
            sequence.num_seen += len(tokens)
            sequence.unseen = sequence.unseen[length:]
        logits = self._model.run(program, input_ids, positions)
        extended = [(row, sequence) for row, sequence in running if not sequence.unseen]
        for row, sequence in extended:
            try:
                sequence.extend(logits[row])
            except FloatingPointError:
                raise
            except Exception as error:
                sequence.failure = error
            if sequence.finish_reason is not None or sequence.failure is not None:
                self._rows[row] = None
        return [sequence for _, sequence in extended]

    def clear(self) -> None:
        """Drop all sequences and empty the cache, for a new beginning after an error."""
        self._rows = [None] * self.batch_size
        if self._model.worker_pids:
            self._model.reset_state()

    def check_workers(self) -> None:
        """Look whether the workers are alive, while there is nothing to step.

        Raises:
            WorkerError: one has ended.
        """
        self._model.check_workers()

    def restart(self) -> None:
        """Drop all sequences, and start new workers from the model's folder.

        Raises:
            ModelFolderError: the folder has changed or is gone.
            WorkerError: a worker could not load its part.
        """
        self._rows = [None] * self.batch_size
        self._model.restart()
