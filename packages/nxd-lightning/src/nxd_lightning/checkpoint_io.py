"""`NeuronCheckpointIO`: a Lightning checkpoint as a checkpoint of nxd, which loads at any layout.

The folder `<name>.ckpt` holds model and optimizer as `nxd.save_checkpoint` writes them, and Lightning's other state
(loops, callbacks, schedulers, hyperparameters) as user content.
"""

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any

from nxd_engine import (
    CheckpointError,
    checkpoint_parts,
    delete_checkpoint,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torch import Tensor, nn

from nxd_lightning.lightning_package import CheckpointIOBase, lightning

# A checkpoint that no Trainer wrote is presented to Lightning as having model, optimizer and scheduler only.
_NOTHING_OF_LIGHTNING: dict[str, Any] = {
    "epoch": 0,
    "global_step": 0,
    "pytorch-lightning_version": lightning().__version__,
    "state_dict": {},
    "optimizer_states": [],
    "lr_schedulers": [],
}
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class NeuronCheckpointIO(CheckpointIOBase):
    """Reads and writes the checkpoints of a Trainer with `NeuronXLAStrategy`.

    Args:
        save_load_xser: passed on as `use_xser`; both forms are the same here.
        weights_only: accepted without effect; nothing that is read here can run code.
    """

    def __init__(self, save_load_xser: bool = True, weights_only: bool = False) -> None:
        super().__init__()
        self.save_load_xser = save_load_xser

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint atomically: it is complete or absent. Called by all ranks.

        Args:
            checkpoint: Lightning's state; the first rank's is saved. Hyperparameters that are not plain values, such
                as functions, are omitted with a warning.
            path: the folder for the checkpoint.
            storage_options: `model`, `optimizer` and `scheduler`, as for `nxd.save_checkpoint`.

        Raises:
            ValueError: Lightning's state holds values that could only be read back by running code.
            CheckpointError: on all ranks: a rank could not write.
        """
        root, tag = os.path.split(_visible(path))
        content = dict(checkpoint)
        if "optimizer_states" in checkpoint:  # the optimizer itself is saved by the names of its parameters
            keys = ("loss_scaler", "stochastic_rounding")
            states = [{key: it[key] for key in keys if key in it} for it in checkpoint["optimizer_states"]]
            content["optimizer_states"] = [it for it in states if it]
        for key in _HYPER_PARAMETERS:
            if key in content:
                content[key] = _plain_parameters(content[key])
        save_checkpoint(root, tag, user_content=content, use_xser=self.save_load_xser, **(storage_options or {}))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return Lightning's state in a checkpoint. Called by all ranks.

        Args:
            path: a checkpoint, or a folder of checkpoints, whose newest is used; also of `nxd.save_checkpoint`.
            map_location: accepted without effect; tensors are loaded to the model's device.
            weights_only: accepted without effect; nothing that is read here can run code.

        Raises:
            CheckpointError: on all ranks: there is no checkpoint, or it is damaged.
        """
        try:
            checkpoint_parts(_resolved(path))  # raises if there is none: Lightning loads the requested one
        except CheckpointError as error:
            if not os.path.isfile(_resolved(path)):
                raise
            raise CheckpointError(
                f"{path} is a file, as a plain Trainer writes, and a checkpoint here is a folder; begin from its "
                "weights: in your model_fn, load "
                'torch.load(path, weights_only=True)["state_dict"] without the prefix "model." into the model before '
                "you return it (the page Predict, clip and write your own steps in Lightning shows how)"
            ) from error
        content = load_checkpoint(_resolved(path))
        if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
            return copy.deepcopy(_NOTHING_OF_LIGHTNING)
        return content

    def fill(self, path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True, **others: Any) -> None:
        """Fill a model, and an `optimizer` and a `scheduler` if given, from a checkpoint. Called by all ranks.

        If the checkpoint lacks one of these, it keeps its state, with a warning; checkpoints of `nxd train`, for
        example, have no scheduler.

        Raises:
            CheckpointError: on all ranks: there is no checkpoint, or it does not fit.
        """
        lacking = sorted(others.keys() - checkpoint_parts(_resolved(path)))
        if lacking:
            warnings.warn(f"{path} has no {' and no '.join(lacking)}; these start fresh", stacklevel=2)
        found = {name: value for name, value in others.items() if name not in lacking}
        load_checkpoint(_resolved(path), model=model, strict=strict, **found)
        if "optimizer" in lacking:
            others["optimizer"].refresh_master_weights()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, or a link to one, if it exists. Called by one rank."""
        if os.path.islink(path):
            os.unlink(path)
        elif has_checkpoint(_visible(path)):
            delete_checkpoint(_visible(path))


def _resolved(path: str | os.PathLike[str]) -> str:
    """Resolve links: `save_last="link"` creates links, whose names are not tags."""
    return os.path.realpath(path) if os.path.islink(path) else _visible(path)


def _visible(path: str | os.PathLike[str]) -> str:
    """Undo the dot with which Lightning hides temporary checkpoints; no tag begins with a dot."""
    root, name = os.path.split(os.fspath(path))
    return os.path.join(root, name.lstrip(".") or name)


def _plain_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in parameters.items() if _is_plain(value)}
    left_out = sorted(parameters.keys() - plain.keys())
    if left_out:
        warnings.warn(
            f"the hyperparameters {', '.join(left_out)} are not plain values and are omitted from the checkpoint; pass "
            "them again when you load it, or exclude them with save_hyperparameters(ignore=...)",
            stacklevel=2,
        )
    return plain


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str)
