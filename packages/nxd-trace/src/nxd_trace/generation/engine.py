"""Continuous batching: sequences join and leave a batch while the others continue.

A step feeds the next parts of new prompts, up to a number of tokens, and a token of every other sequence. So several
short prompts join at a time, and a long one does not hold up the others for more than that. Prompts that begin as an
earlier text did use what the cache still has of it. With a draft model, a sequence that takes the likeliest tokens is
fed several guessed ones at a time.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nxd_trace.generation.cache import BlockPool
from nxd_trace.generation.model_runner import CachedModel, Drafter, Row
from nxd_trace.generation.sampling import SamplingSettings
from nxd_trace.generation.sequence import RunningSequence, read_prompt
from nxd_trace.model import TensorParallelModel

_PARTS_PER_STEP = 2  # of prompts, of the largest size; of smaller ones as many as have its tokens


class GenerationEngine:
    """Steps a batch of sequences. Not for several threads at once.

    Args:
        model: traced by `compile_generator`, or loaded again.
        draft: a smaller model of the same vocabulary, compiled with the same sizes, which guesses tokens.

    Attributes:
        batch_size: sequences at a time.
        max_length: maximum length of a prompt and its continuation.
        vocab_size: one more than the largest token id.

    Raises:
        ValueError: a model was not made for generation, or the draft does not fit.
    """

    def __init__(self, model: TensorParallelModel, draft: TensorParallelModel | None = None) -> None:
        self._model = CachedModel(model)
        self._drafter = None if draft is None else Drafter(CachedModel(draft), self._model)
        self._models = [model] if draft is None else [model, draft]
        self.batch_size = self._model.batch_size
        self.max_length = self._model.max_length
        self.vocab_size = self._model.vocab_size
        self._block_size = self._model.block_size
        self._pool = BlockPool(self._model.num_blocks)
        self._running: list[RunningSequence] = []

    @property
    def num_free(self) -> int:
        """Sequences that may join."""
        return self.batch_size - len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs."""
        return not self._running

    @property
    def num_guesses(self) -> tuple[int, int]:
        """Tokens that the draft model has guessed so far, and those that the model kept."""
        return (0, 0) if self._drafter is None else (self._drafter.num_proposed, self._drafter.num_accepted)

    def check(self, prompt: Any, settings: SamplingSettings) -> list[int]:
        """The prompt's token ids, which may be in any sequence, tensor or array.

        Raises:
            TypeError: the prompt is no such thing.
            ValueError: it is empty, has ids outside the vocabulary, or leaves no room for the new tokens; or a bias is
                for a token outside the vocabulary.
        """
        ids = read_prompt(prompt, self.vocab_size)
        if len(ids) + settings.max_new_tokens > self.max_length:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_new_tokens={settings.max_new_tokens} are more than the "
                f"max_length={self.max_length} that the model was compiled with; request "
                f"{max(0, self.max_length - len(ids))} or fewer, or compile it with a larger max_length"
            )
        outside = [token for token, _ in settings.logit_bias if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"logit_bias is for token {outside[0]}, outside the vocabulary 0..{self.vocab_size - 1}")
        return ids

    def add(self, prompt: Any, settings: SamplingSettings, cache_salt: bytes = b"") -> RunningSequence:
        """Let a prompt join the batch.

        Args:
            prompt: token ids.
            settings: sampling settings.
            cache_salt: prompts that begin alike share their cache only under the same salt.

        Raises:
            TypeError: as `check`.
            ValueError: as `check`; or the batch is full.
        """
        ids = self.check(prompt, settings)
        if not self.num_free:
            raise ValueError(f"all {self.batch_size} rows of the batch are taken; step until one is free")
        sequence = RunningSequence(settings, ids, self._block_size, cache_salt)
        self._running.append(sequence)
        return sequence

    def remove(self, sequence: RunningSequence) -> None:
        """Take out a sequence that is no longer needed; does nothing if it has left already."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._pool.give_back(sequence.blocks)

    def step(self) -> list[RunningSequence]:
        """Feed the next parts of prompts, and tokens of each other sequence. Those that finish or fail leave.

        Returns:
            Those that got tokens, or a failure; not those whose prompt continues in the next step.

        Raises:
            WorkerError: a worker failed.
            FloatingPointError: the logits have NaNs, which are in the cache, too. After either, `clear` the engine.
        """
        singles = [sequence for sequence in self._running if sequence.takes_single_tokens]
        prompts = [sequence for sequence in self._running if not sequence.takes_single_tokens]
        for sequence in self._running:
            sequence.num_new = 0
        return self._feed_prompts(prompts) + (self._feed_singles(singles) if singles else [])

    def _find_blocks(self, sequence: RunningSequence) -> None:
        """Blocks for all that the sequence may come to: those of a known beginning, and new ones."""
        if sequence.blocks:
            return
        if not sequence.settings.prompt_logprobs:
            # The prompt's last token is fed in any case: the logits after it are wanted.
            sequence.blocks = self._pool.share(sequence.digests.first(len(sequence.prompt) - 1))
        sequence.num_seen = sequence.num_drafted = sequence.num_shared = len(sequence.blocks) * self._block_size
        needed = -(-(len(sequence.prompt) + sequence.settings.max_new_tokens) // self._block_size)
        sequence.blocks += self._pool.take(needed - len(sequence.blocks))

    def _feed_prompts(self, prompts: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Feed parts of prompts, each to its end before the next one, which may share its blocks."""
        extended = []
        room = _PARTS_PER_STEP * self._model.prefill_lengths[-1]
        for sequence in prompts:
            while room > 0 and not sequence.takes_single_tokens:
                self._find_blocks(sequence)
                room -= self._model.part_length(len(sequence.unseen))
                if self._feed_part(sequence):
                    extended.append(sequence)
        return extended

    def _feed_part(self, sequence: RunningSequence) -> bool:
        """Feed the next part of a prompt, to the draft model as well; whether that was the last one."""
        part = sequence.unseen, sequence.num_seen, sequence.blocks
        if self._drafter is not None:
            self._drafter.draft.feed_part(*part)
        number, logits = self._model.feed_part(*part)
        sequence.num_seen += number
        sequence.num_drafted = sequence.num_seen
        return self._take(sequence, logits)

    def _feed_singles(self, sequences: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Feed the next token of each sequence, and what a draft model guesses after it."""
        for sequence in sequences:
            self._find_blocks(sequence)
        guesses: list[list[int]] = [[] for _ in sequences]
        if self._drafter is not None:
            guesses = self._drafter.propose(sequences)
        rows: list[Row] = []
        starts = []
        for sequence, guessed in zip(sequences, guesses, strict=True):
            starts.append(len(rows))
            tokens = [sequence.unseen[0], *guessed]
            rows += [Row(token, sequence.num_seen + place, sequence.blocks) for place, token in enumerate(tokens)]
        logits = self._model.feed_rows(rows)
        extended = []
        for sequence, guessed, start in zip(sequences, guesses, starts, strict=True):
            sequence.num_seen += 1
            is_extended = self._take(sequence, logits[start])
            number = 0
            while number < len(guessed) and sequence in self._running and sequence.tokens[-1] == guessed[number]:
                number += 1
                sequence.num_seen += 1
                self._take(sequence, logits[start + number])
            if self._drafter is not None:
                self._drafter.note_accepted(sequence, guessed, number)
            extended += [sequence] if is_extended else []
        return extended

    def _take(self, sequence: RunningSequence, logits: Tensor) -> bool:
        """Give a sequence its logits; whether it got a token or a failure."""
        try:
            is_extended = sequence.take_logits(logits)
        except FloatingPointError:
            raise
        except Exception as error:
            sequence.failure = error
            is_extended = True
        self._keep_full_blocks(sequence)
        if sequence.finish_reason is not None or sequence.failure is not None:
            self.remove(sequence)
        return is_extended

    def _keep_full_blocks(self, sequence: RunningSequence) -> None:
        digests = sequence.digests.first(sequence.num_seen)
        for index in range(sequence.num_kept, len(digests)):
            self._pool.keep(sequence.blocks[index], digests[index])
        sequence.num_kept = len(digests)

    def clear(self) -> None:
        """Drop all sequences and empty the cache, for a new beginning after an error."""
        self._forget_all()
        for model in self._models:
            if model.worker_pids:
                model.reset_state()

    def check_workers(self) -> None:
        """Look whether the workers are alive, while there is nothing to step.

        Raises:
            WorkerError: one has ended or is stopped.
        """
        for model in self._models:
            model.check_workers()

    def restart(self) -> None:
        """Drop all sequences, and start new workers from the model's folder.

        Raises:
            ModelFolderError: the folder has changed or is gone.
            WorkerError: a worker could not load its part.
        """
        self._forget_all()
        for model in self._models:
            model.restart()

    def _forget_all(self) -> None:
        self._running = []
        self._pool = BlockPool(self._model.num_blocks)
