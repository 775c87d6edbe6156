"""Checkpoints of transformers' `Trainer` through this package: sharded, in the background, incremental, at any layout.

    class MyTrainer(NxdCheckpoints, Trainer): ...

    trainer = MyTrainer(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

`save_strategy` and `save_steps` set when checkpoints are written, `save_total_limit` how many are kept. A callback is
not enough for that: it cannot tell the Trainer from which step and data to resume. So the methods that write, read and
choose the best checkpoint are overridden.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nxd_ckpt.asynchronous.handle import AsyncSave
from nxd_ckpt.asynchronous.saving import async_save
from nxd_ckpt.catalog import latest, list_checkpoints
from nxd_ckpt.coordinator import coordinator_for, on_rank_zero
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.loading import load
from nxd_ckpt.random_states import RandomStates
from nxd_ckpt.reader import open_checkpoint
from nxd_ckpt.retention import delete
from nxd_ckpt.saving import save
from nxd_ckpt.training_state import VALUES_FILE, PerRank, read_values

_TRAINER_STATE = "trainer_state.json"  # as the Trainer names it
_TAG = re.compile(r"checkpoint-\d+")


class NxdCheckpoints:
    """A mixin to list before `Trainer` among the bases of a class.

    Checkpoints are stored in `args.output_dir`, with tags such as "checkpoint-500". They hold the model, optimizer,
    scheduler, float16 scaler, the random generators of each rank, and the state of the Trainer and its callbacks; the
    Trainer skips data as usual. They do not hold the config, tokenizer and arguments, which the script already has. The
    best checkpoint is kept and loaded according to the arguments. DeepSpeed manages its own states and is refused.

    Attributes:
        nxd_background: write checkpoints while training continues.
        nxd_incremental: reference data that the previous checkpoint already holds, such as frozen weights.
    """

    nxd_background: bool = False
    nxd_incremental: bool = False

    _nxd_tag: str | None = None
    _nxd_save: AsyncSave | None = None
    _nxd_limit: int | None = None
    _nxd_last: tuple[str, str] = ("", "")

    def train(self: Any, resume_from_checkpoint: "str | bool | None" = None, *args: Any, **kwargs: Any) -> Any:
        """Train like `Trainer.train`.

        Args:
            resume_from_checkpoint: True for the newest checkpoint in `args.output_dir`, a tag, or a path that ends with
                a tag there.
            args: other positional arguments of `Trainer.train`.
            kwargs: other keyword arguments of `Trainer.train`.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not match; or the last one could not be written.
            ValueError: the arguments request something that these checkpoints do not support.
        """
        self._nxd_check()
        self._nxd_tag = None
        train = super().train  # type: ignore[misc]
        with self._nxd_limit_of_checkpoints():
            if not resume_from_checkpoint:
                result = train(None, *args, **kwargs)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    self._nxd_tag = self._nxd_find(resume_from_checkpoint)
                    content = open_checkpoint(self.args.output_dir, self._nxd_tag).read_extra(_TRAINER_STATE)
                    with open(os.path.join(folder, _TRAINER_STATE), "wb") as file:
                        file.write(content)
                    result = train(folder, *args, **kwargs)
            self._nxd_finish()
            if self._nxd_limit == 1 and self.state.best_model_checkpoint is not None:
                self._nxd_drop(*os.path.split(self.state.best_model_checkpoint))
        return result

    def _nxd_check(self: Any) -> None:
        if self.is_deepspeed_enabled:
            raise ValueError(
                "DeepSpeed manages its own states; use its checkpoints, with Trainer and without NxdCheckpoints"
            )
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise ValueError(
                f"hub_strategy={str(self.args.hub_strategy)!r} would push checkpoints as transformers writes them; use "
                "hub_strategy='end', which pushes the model at the end"
            )

    @contextmanager
    def _nxd_limit_of_checkpoints(self: Any) -> Iterator[None]:
        """Hide `save_total_limit` from the Trainer, which would remove folders that other checkpoints reference."""
        self._nxd_limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = self._nxd_limit

    def _nxd_find(self: Any, wish: "str | bool") -> str:
        if wish is not True:
            return os.path.basename(os.path.normpath(str(wish)))

        def newest() -> str:
            found = latest(self.args.output_dir)
            if found is None:
                raise CheckpointError(f"there is no checkpoint in {self.args.output_dir} to resume from")
            return found.tag

        tag: str = on_rank_zero(coordinator_for(None), "finding the checkpoint to resume from", newest)
        return tag

    def _nxd_state(self: Any) -> dict[str, Any]:
        model = self.model_wrapped
        state = {
            "model": model.module if isinstance(model, nn.DataParallel) else model,
            "random": PerRank(RandomStates()),
        }
        if not self.args.save_only_model:
            if getattr(self.accelerator, "scaler", None) is not None:
                state["scaler"] = self.accelerator.scaler
            optimizer, scheduler = self.optimizer, self.lr_scheduler
            state["optimizer"] = getattr(optimizer, "optimizer", optimizer)
            state["scheduler"] = getattr(scheduler, "scheduler", scheduler)
        return state

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """Called by the Trainer when a checkpoint is due."""
        self._nxd_finish()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        root, tag = self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}"
        self._nxd_note_best(root, tag)
        self._nxd_note_callbacks()
        arguments = {
            "step": self.state.global_step,
            "extra": {_TRAINER_STATE: _trainer_state(self.state)},
            "overwrite": True,
            "incremental": self.nxd_incremental,
        }
        self._nxd_last = (root, tag)
        if self.nxd_background:
            self._nxd_save = async_save(root, tag, self._nxd_state(), **arguments)
        else:
            save(root, tag, self._nxd_state(), **arguments)
            self._nxd_drop(root, tag)

    def _nxd_note_best(self: Any, root: str, tag: str) -> None:
        """Record the best checkpoint in the Trainer's state; the one being saved is not complete yet."""
        step = getattr(self.state, "best_global_step", None)
        if step and self.args.save_strategy != "no":
            best = f"checkpoint-{step}"
            is_there: bool = on_rank_zero(
                coordinator_for(None),
                "looking for the best checkpoint",
                lambda: best == tag or any(info.tag == best for info in list_checkpoints(root)),
            )
            if is_there:
                self.state.best_model_checkpoint = os.path.join(root, best)

    def _nxd_note_callbacks(self: Any) -> None:
        """Record the states of callbacks, such as early stopping, in the Trainer's state."""
        from transformers.trainer_callback import ExportableState  # noqa: PLC0415

        states: dict[str, list[Any]] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        for name, found in states.items():
            self.state.stateful_callbacks[name] = found if len(found) > 1 else found[0]

    def _nxd_finish(self: Any) -> None:
        if self._nxd_save is not None:
            under_way, self._nxd_save = self._nxd_save, None
            under_way.wait()
            self._nxd_drop(*self._nxd_last)

    def _nxd_drop(self: Any, root: str, tag: str) -> None:
        """Remove the oldest checkpoints over the limit, never the best, nor `tag`, nor pinned ones."""
        limit, best = self._nxd_limit, self.state.best_model_checkpoint
        if not limit or limit < 0:
            return
        protected = {tag, os.path.basename(best)} if best else {tag}

        def drop() -> None:
            found = [info for info in list_checkpoints(root) if _TAG.fullmatch(info.tag) and not info.pinned]
            by_age = sorted(found, key=lambda info: info.committed_at)
            removable = [info.tag for info in by_age if info.tag not in protected]
            for old in removable[: max(0, len(found) - max(limit, len(protected)))]:
                delete(root, old)

        on_rank_zero(coordinator_for(None), "dropping old checkpoints", drop)

    def _load_best_model(self: Any) -> None:
        """Called by the Trainer at the end, for `load_best_model_at_end`."""
        self._nxd_finish()
        load(*os.path.split(self.state.best_model_checkpoint), into={"model": self._nxd_state()["model"]}, strict=False)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: the model is loaded together with its optimizer once both are prepared."""

    def _load_optimizer_and_scheduler(self: Any, checkpoint: "str | None") -> None:
        if checkpoint is not None and self._nxd_tag is not None:
            state = self._nxd_state()
            del state["random"]  # loaded when the data is skipped
            if "scaler" in state and not self._nxd_has_scaler():  # it was not saved in float16
                del state["scaler"]
            load(self.args.output_dir, self._nxd_tag, into=state, strict=not self.args.save_only_model)

    def _nxd_has_scaler(self: Any) -> bool:
        checkpoint = open_checkpoint(self.args.output_dir, self._nxd_tag)
        return VALUES_FILE in checkpoint.extra and any(
            path.partition(".")[0] == "scaler" for path in read_values(checkpoint.read_extra(VALUES_FILE))
        )

    def _load_rng_state(self: Any, checkpoint: "str | None") -> None:
        if checkpoint is not None and self._nxd_tag is not None:
            state = {"random": PerRank(RandomStates())}
            load(self.args.output_dir, self._nxd_tag, into=state, strict=False)


def _trainer_state(state: Any) -> bytes:
    """Return the content that `TrainerState.save_to_json` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, _TRAINER_STATE)
        state.save_to_json(path)
        with open(path, "rb") as file:
            return file.read()
