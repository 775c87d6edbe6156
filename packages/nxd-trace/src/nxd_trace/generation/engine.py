"""Continuous batching: sequences join and leave a batch while the others continue.

A step feeds the next part of one new prompt, and a token of every other sequence. So a long prompt does not hold up the
others for more than one part. Prompts that begin as an earlier text did use what the cache still has of it.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from nxd_trace.generation.blocks import BlockPool, TextDigests
from nxd_trace.generation.prompts import read_prompt
from nxd_trace.generation.sampling import SamplingSettings, TokenLogprobs, choose_token
from nxd_trace.manifest import RankManifest, rank_folder
from nxd_trace.model import TensorParallelModel

FinishReason = Literal["stop", "length"]


class RunningSequence:
    """A prompt and the tokens generated after it.

    Args:
        settings: how its tokens are chosen.
        prompt: token ids.
        block_size: tokens in a block of the cache.

    Attributes:
        settings: how its tokens are chosen.
        prompt: token ids.
        tokens: written so far; a stop token, if one ended it, is the last.
        num_seen: tokens in the cache.
        num_shared: tokens of the prompt that the cache had already.
        finish_reason: None while it runs; "stop" after a stop token, "length" after the most tokens asked for.
        failure: what choosing a token raised, and so ended this sequence alone.
        logprobs: of the tokens written, if asked for.
        prompt_logprobs: of the prompt's tokens, if asked for.
        blocks: of the cache, in order; none until it is its turn.
        digests: of the full blocks.
        num_kept: full blocks that others may share.
    """

    def __init__(self, settings: SamplingSettings, prompt: list[int], block_size: int) -> None:
        self.settings = settings
        self.prompt = prompt
        self.tokens: list[int] = []
        self.num_seen = 0
        self.num_shared = 0
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs = [TokenLogprobs(prompt[0], None, ())] if settings.prompt_logprobs else []
        self.blocks: list[int] = []
        self.num_kept = 0
        self._text = list(prompt)
        self.digests = TextDigests(self._text, block_size)
        self._draws = torch.Generator().manual_seed(settings.seed)

    @property
    def unseen(self) -> list[int]:
        """Tokens that the model has not been fed yet."""
        return self._text[self.num_seen :]

    @property
    def takes_single_tokens(self) -> bool:
        """Whether it is fed one token at a time: its prompt is in the cache, or each logit of it is wanted."""
        return self.settings.prompt_logprobs or self.num_seen >= len(self.prompt)

    def take_logits(self, logits: Tensor) -> bool:
        """Choose the next token from the `[vocab]` logits after the last one seen; false if the prompt continues."""
        num_top = self.settings.num_logprobs
        if self.num_seen < len(self._text):
            if self.settings.prompt_logprobs:
                self.prompt_logprobs.append(TokenLogprobs.of(self._text[self.num_seen], logits, num_top or 0))
            return False
        token = choose_token(logits, self.settings, self._draws, prompt=self.prompt, written=self.tokens)
        self.tokens.append(token)
        self._text.append(token)
        if num_top is not None:
            self.logprobs.append(TokenLogprobs.of(token, logits, num_top))
        if token in self.settings.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.settings.max_new_tokens:
            self.finish_reason = "length"
        return True


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
        self._decodes = sorted((shape[0], name) for name, shape in shapes.items() if name.startswith("decode_"))
        self._prefills = sorted((shape[1], name) for name, shape in shapes.items() if name.startswith("prefill_"))
        states = RankManifest.read(model.folder / rank_folder(0)).states
        if not self._decodes or not self._prefills or "cache.keys_0" not in states:
            raise ValueError(
                f"the model with programs {', '.join(model.programs)} was not traced for generation; make it with "
                "compile_generator"
            )
        self.batch_size, largest = self._decodes[-1]
        signature = model.programs[largest]
        self._num_blocks, self._block_size = states["cache.keys_0"].shape[:2]
        self._table_length = signature.inputs[2].shape[1]
        self.max_length = self._table_length * self._block_size
        self.vocab_size = signature.outputs[0].shape[-1]
        self._pool = BlockPool(self._num_blocks)
        self._running: list[RunningSequence] = []

    @property
    def num_free(self) -> int:
        """Sequences that may join."""
        return self.batch_size - len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs."""
        return not self._running

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
                f"max_length={self.max_length} that the model was compiled with; ask for "
                f"{max(0, self.max_length - len(ids))} or fewer, or compile it with a larger max_length"
            )
        outside = [token for token, _ in settings.logit_bias if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"logit_bias is for token {outside[0]}, outside the vocabulary 0..{self.vocab_size - 1}")
        return ids

    def add(self, prompt: Any, settings: SamplingSettings) -> RunningSequence:
        """Let a prompt join the batch.

        Raises:
            TypeError: as `check`.
            ValueError: as `check`; or the batch is full.
        """
        ids = self.check(prompt, settings)
        if not self.num_free:
            raise ValueError(f"all {self.batch_size} rows of the batch are taken; step until one is free")
        sequence = RunningSequence(settings, ids, self._block_size)
        self._running.append(sequence)
        return sequence

    def remove(self, sequence: RunningSequence) -> None:
        """Take out a sequence that is no longer needed; does nothing if it has left already."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._pool.give_back(sequence.blocks)

    def step(self) -> list[RunningSequence]:
        """Feed the next part of one prompt, and a token of each other sequence. Those that finish or fail leave.

        Returns:
            Those that got a token, or a failure; not those whose prompt continues in the next step.

        Raises:
            WorkerError: a worker failed.
            FloatingPointError: the logits have NaNs, which are in the cache, too. After either, `clear` the engine.
        """
        singles = [sequence for sequence in self._running if sequence.takes_single_tokens]
        prompt = next((sequence for sequence in self._running if not sequence.takes_single_tokens), None)
        extended = []
        if prompt is not None:
            self._find_blocks(prompt)
            unseen = len(prompt.unseen)
            length, program = next((it for it in self._prefills if it[0] >= unseen), self._prefills[-1])
            extended += self._feed(program, [prompt], 1, length)
        if singles:
            for sequence in singles:
                self._find_blocks(sequence)
            size, program = next(it for it in self._decodes if it[0] >= len(singles))
            extended += self._feed(program, singles, size, 1)
        return extended

    def _find_blocks(self, sequence: RunningSequence) -> None:
        """Blocks for all that the sequence may come to: those of a known beginning, and new ones."""
        if sequence.blocks:
            return
        if not sequence.settings.prompt_logprobs:
            # The prompt's last token is fed in any case: the logits after it are wanted.
            sequence.blocks = self._pool.share(sequence.digests.first(len(sequence.prompt) - 1))
        sequence.num_seen = sequence.num_shared = len(sequence.blocks) * self._block_size
        needed = -(-(len(sequence.prompt) + sequence.settings.max_new_tokens) // self._block_size)
        sequence.blocks += self._pool.take(needed - len(sequence.blocks))

    def _feed(
        self, program: str, sequences: Sequence[RunningSequence], size: int, length: int
    ) -> list[RunningSequence]:
        """Run a program for up to `length` tokens of each of up to `size` sequences."""
        # Padding stands before the tokens, so that the last column is the last token of each row.
        input_ids = torch.zeros(size, length, dtype=torch.long)
        positions = torch.full((size, length), self.max_length - 1)
        tables = torch.zeros(size, self._table_length, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens = sequence.unseen[:length]
            input_ids[row, length - len(tokens) :] = torch.tensor(tokens)
            positions[row, length - len(tokens) :] = torch.arange(len(tokens)) + sequence.num_seen
            tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
            sequence.num_seen += len(tokens)
        logits = self._model.run(program, input_ids, positions, tables)
        return [sequence for row, sequence in enumerate(sequences) if self._take(sequence, logits[row])]

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
        self._forget_all()
        self._model.restart()

    def _forget_all(self) -> None:
        self._running = []
        self._pool = BlockPool(self._num_blocks)
