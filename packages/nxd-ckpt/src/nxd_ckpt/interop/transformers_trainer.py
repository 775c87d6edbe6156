"""Checkpoints of transformers' `Trainer` through this package: sharded, in the background, incremental, at any layout.

    class MyTrainer(NxdCheckpoints, Trainer): ...

    trainer = MyTrainer(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

When a checkpoint is written is as `save_strategy` and `save_steps` say, and how many stay as `save_total_limit`. A
callback is not enough for that: it cannot tell the Trainer at which step and which data to go on. So two methods that
write and three that read are overridden. Nothing of transformers is imported here.
"""

import json
import os
import tempfile
from typing import Any

from nxd_ckpt.asynchronous.handle import AsyncSave
from nxd_ckpt.asynchronous.saving import async_save
from nxd_ckpt.catalog import latest
from nxd_ckpt.coordinator import coordinator_for, on_rank_zero
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.loading import load
from nxd_ckpt.random_states import RandomStates
from nxd_ckpt.reader import open_checkpoint
from nxd_ckpt.retention import retain
from nxd_ckpt.saving import save
from nxd_ckpt.training_state import PerRank

_TRAINER_STATE = "trainer_state.json"  # as the Trainer names it


class NxdCheckpoints:
    """To be named before `Trainer` among the bases of a class.

    Checkpoints lie in `args.output_dir`, with tags such as "checkpoint-500". They hold model, optimizer, scheduler, the
    random generators of each rank, and the Trainer's own state; data is skipped by the Trainer as usual.

    Attributes:
        nxd_background: write them while training goes on.
        nxd_incremental: reference what the checkpoint before holds already, such as frozen weights.
    """

    nxd_background: bool = False
    nxd_incremental: bool = False

    _nxd_tag: str | None = None
    _nxd_save: AsyncSave | None = None

    def train(self: Any, resume_from_checkpoint: "str | bool | None" = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`.

        Args:
            resume_from_checkpoint: True for the newest checkpoint in `args.output_dir`, a tag, or a path that ends with
                a tag there.
            args: further ones of `Trainer.train`.
            kwargs: likewise.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not fit; or the last one could not be written.
        """
        self._nxd_tag = None
        train = super().train  # type: ignore[misc]
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
        return result

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
        state = {"model": self.model_wrapped, "random": PerRank(RandomStates())}
        if not self.args.save_only_model:
            optimizer, scheduler = self.optimizer, self.lr_scheduler
            state["optimizer"] = getattr(optimizer, "optimizer", optimizer)
            state["scheduler"] = getattr(scheduler, "scheduler", scheduler)
        return state

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """Called by the Trainer when it is time for a checkpoint."""
        self._nxd_finish()
        self.store_flos()
        tag = f"checkpoint-{self.state.global_step}"
        content = json.dumps(_trainer_state(self.state)).encode()
        arguments = {
            "step": self.state.global_step,
            "extra": {_TRAINER_STATE: content},
            "overwrite": True,
            "incremental": self.nxd_incremental,
        }
        if self.nxd_background:
            self._nxd_save = async_save(self.args.output_dir, tag, self._nxd_state(), **arguments)
        else:
            save(self.args.output_dir, tag, self._nxd_state(), **arguments)
            self._nxd_drop()

    def _nxd_finish(self: Any) -> None:
        if self._nxd_save is not None:
            under_way, self._nxd_save = self._nxd_save, None
            under_way.wait()
            self._nxd_drop()

    def _nxd_drop(self: Any) -> None:
        if self.args.save_total_limit:
            on_rank_zero(
                coordinator_for(None),
                "dropping old checkpoints",
                lambda: retain(self.args.output_dir, keep_last=self.args.save_total_limit),
            )

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the model is loaded with its optimizer, once both are prepared."""

    def _load_optimizer_and_scheduler(self: Any, checkpoint: "str | None") -> None:
        if checkpoint is not None and self._nxd_tag is not None:
            state = self._nxd_state()
            del state["random"]  # when the data is skipped
            load(self.args.output_dir, self._nxd_tag, into=state, strict=not self.args.save_only_model)

    def _load_rng_state(self: Any, checkpoint: "str | None") -> None:
        if checkpoint is not None and self._nxd_tag is not None:
            state = {"random": PerRank(RandomStates())}
            load(self.args.output_dir, self._nxd_tag, into=state, strict=False)


def _trainer_state(state: Any) -> dict[str, Any]:
    """What `TrainerState.save_to_json` would write."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, _TRAINER_STATE)
        state.save_to_json(path)
        with open(path, encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
    return content
