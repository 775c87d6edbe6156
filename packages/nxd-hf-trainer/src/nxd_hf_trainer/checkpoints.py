"""What Trainer saves and loads at a layout.

`save_model` writes the folder that one process would have written. A `checkpoint-N` has Trainer's own files, and in
`nxd/` the model and the optimizer as a checkpoint of nxd-ckpt, which loads at any layout. Of Trainer's methods
`save_model` is public; the parts of `_save_checkpoint` and `train` that are replaced here have no public form.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nxd_engine import NxDModel, has_checkpoint, load_checkpoint, save_checkpoint
from nxd_engine.hugging_face import save_pretrained
from nxd_state import all_ranks, get_group, is_peft_model
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from nxd_hf_trainer.guards import whole_tensors
from nxd_hf_trainer.models import parallel_model_in
from nxd_hf_trainer.optimizers import unwrapped_optimizer
from nxd_hf_trainer.processes import is_main_process, wait_for_everyone
from nxd_hf_trainer.replacing import Replacement, replaced

_OURS = "nxd"  # the folder of the checkpoint of nxd-ckpt inside of a `checkpoint-N`

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


@contextmanager
def trainer_saves_ours(*, hugging_face_checkpoints: bool) -> Iterator[None]:
    """Context in which Trainer saves and loads parallel models and optimizers.

    Args:
        hugging_face_checkpoints: whether each `checkpoint-N` has the model as a Hugging Face folder, too.
    """
    replacements: dict[str, Replacement] = {
        "save_model": partial(_save_model, with_folder=hugging_face_checkpoints),
        "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
        "_save_rng_state": _save_rng_state,
        "_load_from_checkpoint": _load_from_checkpoint,
        "_load_optimizer_and_scheduler": _load_optimizer_and_scheduler,
        "_load_best_model": _load_best_model,
        "is_world_process_zero": lambda _: lambda trainer: is_main_process(),
    }
    with replaced(Trainer, replacements):
        yield


def _parallel_model(trainer: Trainer) -> NxDModel | None:
    """Return the model that Trainer trains; None if it has prepared none."""
    return parallel_model_in(trainer.model_wrapped)


def _save_model(own: Any, *, with_folder: bool) -> Any:
    def save_model(trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False) -> None:
        model = _parallel_model(trainer)
        if model is None:
            own(trainer, output_dir, _internal_call)
            wait_for_everyone()
            return
        folder = Path(trainer.args.output_dir if output_dir is None else output_dir)
        if is_peft_model(trainer.model):
            _write_adapters(trainer.model, model, folder)
        elif with_folder or trainer.args.save_only_model or not _internal_call:
            _write_weights(model, folder)
        if is_main_process():
            _write_companions(trainer, folder)
        wait_for_everyone()
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    return save_model


def _write_adapters(own: Any, model: NxDModel, folder: Path) -> None:
    """Write the adapters as PEFT does."""
    tensors = whole_tensors(own, model)
    if is_main_process():
        own.save_pretrained(folder, state_dict=tensors)


def _write_weights(model: NxDModel, folder: Path) -> None:
    """Write config and weights; files of an earlier model are replaced once the new ones are complete."""
    staging = folder / ".saving"
    if is_main_process():
        shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    with all_ranks():
        save_pretrained(model, staging)
    if is_main_process():
        written = {path.name for path in staging.iterdir()}
        for name in sorted(written):
            os.replace(staging / name, folder / name)
        for stale in {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern) if path.name not in written}:
            stale.unlink()
        staging.rmdir()


def _write_companions(trainer: Trainer, folder: Path) -> None:
    """Write what Trainer saves beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = trainer.model
    if not is_peft_model(model):
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    processing = trainer.processing_class
    if processing is None:
        processing = getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(folder)
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)


def _save_optimizer_and_scheduler(own: Any) -> Any:
    def save(trainer: Trainer, output_dir: str) -> None:
        model = _parallel_model(trainer)
        if model is None:
            own(trainer, output_dir)
            return
        with all_ranks():
            save_checkpoint(
                _place(output_dir),
                model=model,
                optimizer=unwrapped_optimizer(trainer.optimizer),
                frozen_weights=not is_peft_model(trainer.model),  # which the script loads again
            )
        if is_main_process():
            torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    return save


def _save_rng_state(own: Any) -> Any:
    def save(trainer: Trainer, output_dir: str) -> None:
        if not any(get_group(axis).rank for axis in ("tp", "cp", "pp")):  # the other ranks of a replica draw the same
            own(trainer, output_dir)
        wait_for_everyone()

    return save


def _load_from_checkpoint(own: Any) -> Any:
    def load(trainer: Trainer, resume_from_checkpoint: str, model: Any = None) -> None:
        # Trainer calls it before it prepares the model: a checkpoint of ours is loaded with the optimizer instead.
        if not _is_ours(resume_from_checkpoint):
            if _parallel_model(trainer) is not None:
                raise ValueError(
                    f"{resume_from_checkpoint} has no {_OURS}/ folder, so this trainer, whose model is split already, "
                    "cannot load it; start the script from this checkpoint"
                )
            own(trainer, resume_from_checkpoint, model)

    return load


def _load_optimizer_and_scheduler(own: Any) -> Any:
    def load(trainer: Trainer, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not _is_ours(checkpoint):
            raise ValueError(
                f"{checkpoint} was saved without a layout: its optimizer's states are one process's; resume it "
                "without nxd run's layout, or start anew from its weights (model_name_or_path)"
            )
        model = _parallel_model(trainer)
        with all_ranks():
            load_checkpoint(_place(checkpoint), model=model, optimizer=unwrapped_optimizer(trainer.optimizer))
        scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
        trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    return load


def _load_best_model(own: Any) -> Any:
    def load(trainer: Trainer) -> None:
        best, model = trainer.state.best_model_checkpoint, _parallel_model(trainer)
        if model is None or not _is_ours(best):
            raise ValueError(
                f"the best checkpoint {best} has no {_OURS}/ folder to load the model from: save_only_model=True "
                "leaves it out, and cannot be combined with load_best_model_at_end"
            )
        with all_ranks():
            load_checkpoint(_place(best), model=model)
            unwrapped_optimizer(trainer.optimizer).refresh_master_weights()

    return load


def _is_ours(checkpoint: str) -> bool:
    with all_ranks():
        return has_checkpoint(_place(checkpoint))


def _place(checkpoint: str) -> str:
    return os.path.join(checkpoint, _OURS)
