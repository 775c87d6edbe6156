"""A script's own values (scheduler, user content) in a checkpoint: nothing in there can run code when it is read.

What JSON gives back as it was lies in the manifest, the rest as a file of torch's that its restricted unpickler reads.
"""

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from nxd_ckpt import Checkpoint, CheckpointError
from nxd_ckpt.interop.safe_pickle import load_torch_stream

# What a checkpoint's values are called, besides the description of its model.
SETTINGS = "optimizer_settings"
SCHEDULER = "scheduler"
USER_CONTENT = "user_content"
METRICS = "metrics"

_SUFFIX = ".pt"


def pack_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The arguments `objects` and `extra` of `nxd_ckpt.save` that keep these values; None is left out.

    Raises:
        ValueError: a value holds what could only be read by running code.
    """
    objects: dict[str, Any] = {}
    extra: dict[str, bytes] = {}
    for name, value in values.items():
        if is_exact_in_json(value):
            if value is not None:
                objects[name] = value
        else:
            extra[name + _SUFFIX] = _torch_bytes(name, value)
    return objects, extra


def holds_value(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a value of this name was saved."""
    return name in _objects(checkpoint) or name + _SUFFIX in checkpoint.extra


def unpack_value(checkpoint: Checkpoint, name: str) -> Any:
    """A value as it was saved, None if there is none.

    Raises:
        CheckpointError: it is damaged, or asks for something that could run code.
    """
    if name + _SUFFIX not in checkpoint.extra:
        return _objects(checkpoint).get(name)
    content = io.BytesIO(checkpoint.read_extra(name + _SUFFIX))
    return load_torch_stream(content, f"{name + _SUFFIX} of checkpoint {checkpoint.tag!r}")


def is_exact_in_json(value: object) -> bool:
    """Whether JSON gives this back with the same types; a tuple would come back as a list."""
    if type(value) is dict:
        return all(type(key) is str and is_exact_in_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(is_exact_in_json, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def check_readable(what: str, content: bytes) -> None:
    """Raise ValueError if the restricted unpickler would refuse what `torch.save` wrote."""
    try:
        load_torch_stream(io.BytesIO(content), what)
    except CheckpointError as error:
        raise ValueError(
            f"{error}; keep plain values and tensors only: of an argparse.Namespace vars(it), of an object its numbers "
            "and strings"
        ) from error


def _torch_bytes(name: str, value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # pickling asks foreign objects
        raise ValueError(f"{name} cannot be saved: {type(error).__name__}: {error}; keep plain values") from error
    check_readable(name, stream.getvalue())
    return stream.getvalue()


def _objects(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.objects if isinstance(checkpoint.objects, dict) else {}
