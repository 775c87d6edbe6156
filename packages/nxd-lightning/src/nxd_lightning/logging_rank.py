"""`NeuronTQDMProgressBar` and `NeuronTensorBoardLogger`: one rank shows and writes; it need not be rank 0.

It is the strategy's `logging_rank`: the last stage's first rank, or rank 0 with `log_rank0`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nxd_lightning.lightning_package import check_spelling, lightning

_TQDMProgressBar: Any = lightning("callbacks").TQDMProgressBar
_TensorBoardLogger: Any = lightning("loggers").TensorBoardLogger
_rank_zero_only: Any = lightning("utilities.rank_zero").rank_zero_only


class NeuronTQDMProgressBar(_TQDMProgressBar):
    """Lightning's progress bar, on the logging rank."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach to the Trainer; raises TypeError if it belongs to the other Lightning package."""
        check_spelling(trainer)
        super().setup(trainer, pl_module, stage)
        if trainer.global_rank == getattr(trainer.strategy, "logging_rank", 0):
            self.enable()
        else:
            self.disable()


class NeuronTensorBoardLogger(_TensorBoardLogger):
    """Lightning's TensorBoard logger, on the logging rank.

    Args:
        save_dir: folder of the logs.
        log_rank0: whether to write from rank 0, whatever the module says; otherwise from the strategy's `logging_rank`.
        **options: as for `TensorBoardLogger`, such as `name` and `version`.

    Attributes:
        print_step: accepted without effect.
    """

    def __init__(self, save_dir: Any, *, log_rank0: bool = False, **options: Any) -> None:
        super().__init__(save_dir, **options)
        self.log_rank0 = log_rank0
        self.print_step = -1
        self._is_writer: bool | None = None

    def choose_writer(self, *, is_writer: bool, broadcast: Callable[[Any], Any]) -> None:
        """Choose whether this rank writes, to a folder that all ranks agree on. Called by all ranks.

        Args:
            is_writer: whether this is the one rank that writes.
            broadcast: function that returns the first rank's value on every rank.
        """
        self._is_writer = is_writer
        self._version = broadcast(self.version)

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer; a stand-in that does nothing on other ranks."""
        with self._writer_as_rank_zero():
            return super().experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write scalars."""
        with self._writer_as_rank_zero():
            super().log_metrics(metrics, step)

    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Write hyperparameters."""
        with self._writer_as_rank_zero():
            super().log_hyperparams(params, metrics, step)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the model's graph."""
        with self._writer_as_rank_zero():
            super().log_graph(model, input_array)

    def save(self) -> None:
        """Flush to disk."""
        with self._writer_as_rank_zero():
            super().save()

    def finalize(self, status: str) -> None:
        """Write the rest and close."""
        with self._writer_as_rank_zero():
            super().finalize(status)

    @contextmanager
    def _writer_as_rank_zero(self) -> Iterator[None]:
        """Run as rank zero: Lightning's loggers write where this number is 0."""
        rank = _rank_zero_only.rank
        if self._is_writer is not None:
            _rank_zero_only.rank = 0 if self._is_writer else 1
        try:
            yield
        finally:
            _rank_zero_only.rank = rank
