"""Lightning's `CheckpointIO` for its own strategies: `Trainer(plugins=[NxdCheckpointIO()])`.

Lightning passes one nested dict per checkpoint, with whole tensors on the first rank. It becomes a checkpoint of this
package: tensors are named by their path in the dict, and everything else is described in JSON. Nothing is ever
unpickled. The strategy of `nxd_lightning` has its own `CheckpointIO`, which writes shards.
"""

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from nxd_ckpt.coordinator import ThisProcess
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.reader import Checkpoint, open_checkpoint
from nxd_ckpt.retention import delete
from nxd_ckpt.saving import save

_CONTENT = "lightning.json"
_MAY_BE_LEFT_OUT = ("hyper_parameters", "datamodule_hyper_parameters")


class NxdCheckpointIO:
    """Writes and reads the checkpoints of a Trainer; each is a folder that is either complete or absent.

    Args:
        incremental: reference data that the newest checkpoint in the same folder already holds, such as frozen weights.

    Raises:
        ImportError: Lightning is not installed.
    """

    def __init__(self, *, incremental: bool = False) -> None:
        _checkpoint_io().register(type(self))
        self.incremental = incremental

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: "str | os.PathLike[str]", storage_options: Any = None
    ) -> None:
        """Write a checkpoint from this process alone, replacing one at the same path.

        Args:
            checkpoint: nested dicts, lists and tuples of tensors, numbers and strings. Hyperparameters of other types
                are left out with a warning.
            path: the folder for the checkpoint.
            storage_options: must be None.

        Raises:
            ValueError: it holds something that could only be read back by running code; names it.
            CheckpointError: it cannot be written.
        """
        if storage_options is not None:
            raise ValueError(f"NxdCheckpointIO does not support storage_options={storage_options!r}; leave them out")
        tensors: dict[str, torch.Tensor] = {}
        content: dict[str, Any] = {}
        for key, value in checkpoint.items():
            try:
                content[key] = _described(value, key, tensors)
            except ValueError as error:
                if key not in _MAY_BE_LEFT_OUT:
                    raise
                warnings.warn(f"{error}; all of {key} is left out of the checkpoint", stacklevel=2)
        root, tag = os.path.split(os.fspath(path))
        step = checkpoint.get("global_step")
        save(
            root,
            tag,
            tensors,
            step=step if type(step) is int and step >= 0 else None,
            extra={_CONTENT: json.dumps(content).encode()},
            overwrite=True,
            incremental=self.incremental,
            process_group=ThisProcess(),
        )

    def load_checkpoint(
        self, path: "str | os.PathLike[str]", map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the dict of a checkpoint with its tensors on the CPU; Lightning moves them.

        Args:
            path: the path of the checkpoint.
            map_location: the device for tensors, if it is a device or its name.
            weights_only: ignored; nothing that is read here can run code.

        Raises:
            CheckpointError: there is no checkpoint written by this class, or it is damaged.
        """
        checkpoint = open_checkpoint(*os.path.split(os.fspath(path)))
        if _CONTENT not in checkpoint.extra:
            raise CheckpointError(f"{os.fspath(path)} was not written by NxdCheckpointIO: it has no {_CONTENT}")
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        try:
            content = json.loads(checkpoint.read_extra(_CONTENT))
            return {key: _restored(value, checkpoint, device) for key, value in content.items()}
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{_CONTENT} of {os.fspath(path)} cannot be used: {error}") from error

    def remove_checkpoint(self, path: "str | os.PathLike[str]") -> None:
        """Delete a checkpoint; data that other checkpoints reference stays."""
        delete(*os.path.split(os.fspath(path)))

    def teardown(self) -> None:
        """Do nothing; no file is kept open."""


def _checkpoint_io() -> Any:
    """Return Lightning's abstract class, which only needs to be registered as a base."""
    try:
        from lightning.pytorch.plugins.io import CheckpointIO  # noqa: PLC0415
    except ImportError:
        try:
            from pytorch_lightning.plugins.io import CheckpointIO  # noqa: PLC0415
        except ImportError as error:
            raise ImportError("nxd_ckpt.interop.lightning needs Lightning: pip install lightning") from error
    return CheckpointIO


def _described(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encode a value as JSON: plain values unchanged, others as [kind, content]. Tensors are added to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        while path in tensors:  # another's, such as that of {"a.b": ...} and {"a": {"b": ...}}
            path += "'"
        tensors[path] = value
        return ["tensor", path]
    if isinstance(value, Mapping):
        pairs = []
        for key, part in value.items():
            if not isinstance(key, str | int):
                raise ValueError(f"{path} has the key {key!r} of type {type(key).__name__}; use strings or numbers")
            pairs.append([key, _described(part, f"{path}.{key}", tensors)])
        return ["dict", pairs]
    if isinstance(value, list | tuple):
        parts = [_described(part, f"{path}.{number}", tensors) for number, part in enumerate(value)]
        return ["tuple" if isinstance(value, tuple) else "list", parts]
    raise ValueError(
        f"{path} is a {type(value).__name__}, which could only be read back by running code; use numbers, strings, "
        "tensors, and dicts and lists of them"
    )


def _restored(value: Any, checkpoint: Checkpoint, device: "str | torch.device") -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        return checkpoint.read(content).to(device)
    if kind == "dict":
        return {key: _restored(part, checkpoint, device) for key, part in content}
    parts = [_restored(part, checkpoint, device) for part in content]
    return tuple(parts) if kind == "tuple" else parts
