"""The callbacks and the logger: progress bar, TensorBoard, and dumps of chosen layers.

The progress bar and the logger work on one rank, the strategy's `logging_rank`: the last stage's first rank, or rank 0
with `log_rank0`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from nxd_state import get_group
from torch import Tensor, nn

from nxd_lightning.lightning_package import check_spelling, lightning

_Callback: Any = lightning("callbacks").Callback
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


class NeuronHooksCallback(_Callback):
    """Dumps tensors of layers every this many steps.

    Files are `<folder>/<layer>/global_step_<n>/DP_<d>_TP_<t>_PP_<p>_<what>_<raw or norm>.pt`, where `what` is
    `layer_input`, `layer_output`, `grad_input` or `grad_output`, of the step's last microbatch.

    Args:
        cfg: options as attributes. `hooks` enables the callback. `target_layers`: names of layers, separated by
            commas; `hooks_interval`: steps between dumps; `enable_activation_dumps` and `enable_grad_dumps`: kinds of
            tensors; `dump_only_norms`: 2-norms instead of tensors; `dump_only_master_rank`: on rank 0 only;
            `master_print_model_layers`: rank 0 prints the names of all layers;
            `enable_tb_logging_master_rank_activation_norms` and `..._grad_norms`: log norms as well, if only those of
            rank 0 are dumped; `hooks_dump_base_directory`: the folder, by default
            `hooks_outputs/<SLURM_JOB_ID>/hooks_dumps`.

    Raises:
        ValueError: `hooks_interval` is not positive.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.hooks = bool(cfg.hooks)
        self.target_layers: list[str] = []
        if not self.hooks:
            return
        self.target_layers = [name.strip() for name in (cfg.target_layers or "").split(",") if name.strip()]
        self.hooks_interval = int(cfg.hooks_interval)
        if self.hooks_interval < 1:
            raise ValueError(f"hooks_interval={cfg.hooks_interval!r} is not a number of steps; use 1 or more")
        default = f"hooks_outputs/{os.environ.get('SLURM_JOB_ID')}/hooks_dumps"
        self.hooks_dump_base_directory = str(getattr(cfg, "hooks_dump_base_directory", None) or default)
        self.master_print_model_layers = bool(cfg.master_print_model_layers)
        self.dump_only_master_rank = bool(cfg.dump_only_master_rank)
        self.dump_only_norms = bool(cfg.dump_only_norms)
        self.enable_activation_dumps = bool(cfg.enable_activation_dumps)
        self.enable_grad_dumps = bool(cfg.enable_grad_dumps)
        only_norms_of_master = self.dump_only_norms and self.dump_only_master_rank
        self._logged = {
            "layer": only_norms_of_master and bool(cfg.enable_tb_logging_master_rank_activation_norms),
            "grad": only_norms_of_master and bool(cfg.enable_tb_logging_master_rank_grad_norms),
        }
        self._seen: dict[tuple[str, str], tuple[Tensor | None, Tensor | None]] = {}
        self._handles: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach to the Trainer; raises TypeError if it belongs to the other Lightning package."""
        check_spelling(trainer)
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the layers; those of other pipeline stages are watched by their ranks."""
        if not self.hooks:
            return
        modules = dict(pl_module.model.named_modules())
        if self.master_print_model_layers and trainer.global_rank == 0:
            print("\n".join(["Printing Model Layers:", *modules]))
        for name in self.target_layers:
            if name in modules:
                self._watch(name, modules[name], trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Write the tensors of the step."""
        if not self.hooks or not self._seen:
            return
        seen, self._seen = self._seen, {}
        step = trainer.global_step
        place = "_".join(f"{axis.upper()}_{get_group(axis).rank}" for axis in ("dp", "tp", "pp"))
        for (layer, kind), tensors in seen.items():
            folder = Path(self.hooks_dump_base_directory, layer, f"global_step_{step}")
            folder.mkdir(parents=True, exist_ok=True)
            for end, tensor in zip(("input", "output"), tensors, strict=True):
                if tensor is None:  # this input needs no gradient
                    continue
                host = tensor.cpu()
                value = host.float().norm().item() if self.dump_only_norms else host
                form = "norm" if self.dump_only_norms else "raw"
                torch.save(value, folder / f"{place}_{kind}_{end}_{form}.pt")
                if self._logged[kind]:
                    name = f"{'activation' if kind == 'layer' else 'grad'}_{end}_norm"
                    pl_module.log(name, value, on_step=True, on_epoch=False, logger=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hooks."""
        for handle in getattr(self, "_handles", []):
            handle.remove()
        self._handles = []

    def _watch(self, name: str, layer: nn.Module, trainer: Any) -> None:
        if self.enable_activation_dumps:
            self._handles.append(layer.register_forward_hook(self._hook(name, "layer", trainer)))
        if self.enable_grad_dumps:
            self._handles.append(layer.register_full_backward_hook(self._hook(name, "grad", trainer)))

    def _hook(self, name: str, kind: str, trainer: Any) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            due = trainer.global_step % self.hooks_interval == 0
            if due and (trainer.global_rank == 0 or not self.dump_only_master_rank):
                self._seen[name, kind] = (_first(inputs), _first(outputs))

        return hook


def _first(value: Any) -> Tensor | None:
    """Return a copy of the first tensor in a layer's input or output."""
    found = value[0] if isinstance(value, tuple | list) and value else value
    return found.detach().clone() if isinstance(found, Tensor) else None
