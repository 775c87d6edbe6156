"""`NeuronHooksCallback`: writes inputs, outputs and gradients of chosen layers, to compare a run with another."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nxd_state import get_group
from torch import Tensor, nn

from nxd_lightning.lightning_package import check_spelling, lightning

_Callback: Any = lightning("callbacks").Callback


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
        for (layer, kind), tensors in seen.items():
            folder = Path(self.hooks_dump_base_directory, layer, f"global_step_{step}")
            folder.mkdir(parents=True, exist_ok=True)
            for end, tensor in zip(("input", "output"), tensors, strict=True):
                if tensor is None:  # this input needs no gradient
                    continue
                host = tensor.cpu()
                value = host.float().norm().item() if self.dump_only_norms else host
                form = "norm" if self.dump_only_norms else "raw"
                torch.save(value, folder / f"{_place()}_{kind}_{end}_{form}.pt")
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


def _place() -> str:
    return "_".join(f"{axis.upper()}_{get_group(axis).rank}" for axis in ("dp", "tp", "pp"))
