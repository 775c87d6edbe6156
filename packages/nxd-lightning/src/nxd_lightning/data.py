"""`TextDataModule`: the demo's text as batches of token ids, in an order that does not depend on the layout."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nxd_lightning.lightning_package import lightning

try:
    from nxd_data import (
        Batch,
        HeldOutLoader,
        PackedSequences,
        TrainLoader,
        build_corpus,
        load_tokenizer,
        open_corpus,
        pack_corpus,
    )
except ModuleNotFoundError as error:
    raise ImportError(
        "TextDataModule reads text with nxd-data, which is not installed; pip install 'nxd-lightning[text]'"
    ) from error

_LightningDataModule: Any = lightning().LightningDataModule

VOCABULARY_MULTIPLE = 64


class TextBatch(NamedTuple):
    """The tokens of one batch on a rank, by the names of a model's inputs."""

    input_ids: Tensor  # [microbatch/dp, seq], int64
    labels: Tensor  # [microbatch/dp, seq], int64: the inputs shifted by one token


class TextDataModule(_LightningDataModule):
    """Text files, tokenized once, packed and sharded over the replicas; the same data and order as `nxd train`.

    Args:
        path: text file or folder; None: the sources of the running Python's standard library.
        sequence_length: tokens in a sequence.
        global_batch_size: sequences in an optimizer step, over all replicas.
        grad_accum_steps: batches in an optimizer step.
        held_out_fraction: share of the sequences kept for validation and tests.
        eval_batches: global batches in a validation.
        tokenizer: a Hugging Face tokenizer.json; None: one token per byte.
        cache_folder: folder for tokenized text.
        seed: random seed of the order.

    Attributes:
        vocab_size: rows of an embedding for all tokens.

    Raises:
        ValueError: there is no such tokenizer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        sequence_length: int = 128,
        global_batch_size: int = 8,
        grad_accum_steps: int = 1,
        held_out_fraction: float = 0.05,
        eval_batches: int = 4,
        tokenizer: str | os.PathLike[str] | None = None,
        cache_folder: str | os.PathLike[str] = "runs/tokens",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.path = None if path is None else Path(path)
        self.sequence_length = sequence_length
        self.held_out_fraction = held_out_fraction
        self.eval_batches = eval_batches
        self.cache_folder = Path(cache_folder)
        self.seed = seed
        self._batches: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "gradient_accumulation_steps": grad_accum_steps,
        }
        self._tokenizer = load_tokenizer(None if tokenizer is None else Path(tokenizer))
        self._parts: tuple[PackedSequences, PackedSequences] | None = None
        self.vocab_size = -(-self._tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def prepare_data(self) -> None:
        """Tokenize the text, unless it is in the cache; called by one rank of each host."""
        self._build()

    def setup(self, stage: str) -> None:
        """Open the tokens; raises ValueError if there is too little text."""
        if self._parts is None:
            self._parts = pack_corpus(
                open_corpus(self._build()),
                sequence_length=self.sequence_length,
                held_out_fraction=self.held_out_fraction,
            )

    def train_dataloader(self) -> "ResumableBatches":
        """Return batches to train on; they resume where a checkpoint was saved."""
        train, _ = self._sequences
        return ResumableBatches(TrainLoader(train, seed=self.seed, **self._batches, **self._replica), len(train))

    def val_dataloader(self) -> "HeldOutBatches":
        """Return the same held-out batches each time."""
        _, held_out = self._sequences
        loader = HeldOutLoader(held_out, num_batches=self.eval_batches, **self._batches, **self._replica)
        return HeldOutBatches(loader)

    def test_dataloader(self) -> "HeldOutBatches":
        """Return the batches of `val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> "HeldOutBatches":
        """Return the batches of `val_dataloader`."""
        return self.val_dataloader()

    def _build(self) -> Path:
        return build_corpus(self.path, self._tokenizer, cache_folder=self.cache_folder)

    @property
    def _sequences(self) -> tuple[PackedSequences, PackedSequences]:
        if self._parts is None:
            raise RuntimeError("the text is not open; call setup, as a Trainer does")
        return self._parts

    @property
    def _replica(self) -> dict[str, Any]:
        strategy = self.trainer.strategy
        return {"dp_rank": strategy.data_parallel_rank, "dp_size": strategy.data_parallel_size}


class HeldOutBatches:
    """The batches of a loader, the same each time."""

    def __init__(self, loader: HeldOutLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[TextBatch]:
        return map(_text_of, self._loader)


class ResumableBatches:
    """An epoch of a loader's batches at a time; the next epoch continues with the samples that follow.

    Args:
        loader: yields the batches of optimizer steps, without end.
        num_samples: samples in an epoch; a remainder after whole steps begins the next epoch.

    Raises:
        ValueError: there are fewer samples than in a step.
    """

    def __init__(self, loader: TrainLoader, num_samples: int) -> None:
        self._loader = loader
        before = loader.samples_consumed
        self._batches_of_a_step = len(loader.next_step())
        samples_of_a_step = loader.samples_consumed - before
        loader.samples_consumed = before
        if num_samples < samples_of_a_step:
            raise ValueError(
                f"there are only {num_samples} training sequences, fewer than global_batch_size={samples_of_a_step}; "
                "add text or lower one of global_batch_size and sequence_length"
            )
        self._steps = num_samples // samples_of_a_step
        self._steps_taken = 0

    def __len__(self) -> int:
        return self._steps * self._batches_of_a_step

    def __iter__(self) -> Iterator[TextBatch]:
        while self._steps_taken < self._steps:
            batches = self._loader.next_step()
            self._steps_taken += 1
            yield from map(_text_of, batches)
        self._steps_taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the start of the next step as plain numbers; the same on every rank."""
        return {**self._loader.state_dict(), "steps_taken": self._steps_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`.

        Raises:
            ValueError: the state belongs to other data, or another sequence length or seed.
        """
        self._loader.load_state_dict({name: value for name, value in state.items() if name != "steps_taken"})
        self._steps_taken = state["steps_taken"]


def _text_of(batch: Batch) -> TextBatch:
    return TextBatch(batch.input_ids, batch.labels)
