"""What `Accelerator.save_state` writes: Accelerate's own files, and each model with its optimizer in a folder of nxd/.

Accelerate writes the states of models and optimizers as one process has them. So they are kept from it: they are saved
and loaded by nxd-ckpt, at any layout. Schedulers, samplers, random generators and objects of the script stay with it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from nxd_engine import NxDModel, NxDOptimizer, has_checkpoint, load_checkpoint, save_checkpoint
from nxd_state import all_ranks, is_peft_model

from nxd_hf_trainer.models import SplitModels, parallel_model_in
from nxd_hf_trainer.optimizers import unwrapped_optimizer

_OURS = "nxd"


def save_state_at_a_layout(own: Any, models: SplitModels) -> Any:
    """Return a `save_state` that all ranks call."""

    def save_state(accelerator: Accelerator, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        with _without_parallel_parts(accelerator) as parts:
            pairs = _paired(*parts, models)
            folder: str = own(accelerator, output_dir, *args, **kwargs)
        with all_ranks():
            for place, (model, optimizer) in _places(folder, pairs):
                with_base = not is_peft_model(models.module_of(model))
                save_checkpoint(place, model=model, optimizer=optimizer, frozen_weights=with_base)
        return folder

    return save_state


def load_state_at_a_layout(own: Any, models: SplitModels) -> Any:
    """Return a `load_state` that all ranks call; it raises a ValueError for a folder saved without a layout."""

    def load_state(accelerator: Accelerator, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        pairs = _paired(accelerator._models, accelerator._optimizers, models)
        folders: list[str] = []

        def check(_: Any, folder: str) -> None:  # called before anything is loaded
            folders.append(folder)
            with all_ranks():
                if not all(has_checkpoint(place) for place, _ in _places(folder, pairs)):
                    raise ValueError(
                        f"{folder} lacks states of prepared models in {_OURS}/, as if it was saved without a layout or "
                        "for other models; load it without a layout, or start anew from its weights"
                    )

        hook = accelerator.register_load_state_pre_hook(check)
        try:
            with _without_parallel_parts(accelerator):
                own(accelerator, input_dir, *args, **kwargs)
        finally:
            hook.remove()
        with all_ranks():
            for place, (model, optimizer) in _places(folders[0], pairs):
                load_checkpoint(place, model=model, optimizer=optimizer)

    return load_state


def _paired(
    models: Sequence[Any], optimizers: Sequence[Any], split: SplitModels
) -> list[tuple[NxDModel, NxDOptimizer | None]]:
    """Return each parallel model with the optimizer that has its parameters.

    Raises:
        ValueError: several optimizers have parameters of one model.
    """
    pairs: list[tuple[NxDModel, NxDOptimizer | None]] = []
    inner = [unwrapped_optimizer(it) for it in optimizers]
    for model in filter(None, map(parallel_model_in, models)):
        own = [it for it in inner if model in split.models_of(p for group in it.param_groups for p in group["params"])]
        if len(own) > 1:
            raise ValueError(
                f"{len(own)} optimizers train a {type(split.module_of(model)).__name__}, whose states save_state "
                "cannot keep apart; use one optimizer with several groups"
            )
        pairs.append((model, own[0] if own else None))
    return pairs


def _places(folder: str, pairs: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(os.path.join(folder, _OURS, f"model_{number}"), pair) for number, pair in enumerate(pairs)]


@contextmanager
def _without_parallel_parts(accelerator: Accelerator) -> Iterator[tuple[list[Any], list[Any]]]:
    """Context in which an Accelerator has no models and optimizers, which its `save_state` has no other way to omit."""
    parts = accelerator._models, accelerator._optimizers
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield parts
    finally:
        accelerator._models, accelerator._optimizers = parts
