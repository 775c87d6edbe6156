"""Values in a checkpoint other than named tensors; reading them can never run code.

These are the scheduler, user content and the settings of the optimizer's groups. Values that JSON restores exactly are
in the manifest, the rest in a file that torch's restricted unpickler reads. Settings are stored by parameter names, so
they fit any layout. A `state_dict` saved without a model only numbers its parameters, so it loads only at the degrees
of the save.
"""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nxd_ckpt import Checkpoint, CheckpointError
from nxd_ckpt.interop.safe_pickle import load_torch_stream
from nxd_state import active_group, splits_experts
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_engine.checkpoints.state import OPTIMIZER_DICT_PREFIX, modules_with_extra_state, parameters_in_checkpoint
from nxd_engine.rank_sync import is_first_replica

# Names of a checkpoint's values, apart from the description of its model.
SETTINGS = "optimizer_settings"
SCHEDULER = "scheduler"
TRAINED_ONLY = "trained_only"  # the checkpoint has no weights that did not train
USER_CONTENT = "user_content"
METRICS = "metrics"
EXTRA_STATES = "extra_states"  # of modules
OTHER_STATE = "other_optimizer_state"

Settings = Mapping[str, Any]

_SUFFIX = ".pt"


def pack_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the arguments `objects` and `extra` of `nxd_ckpt.save` that store these values; None is left out."""
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
    """Return a value as it was saved, None if there is none."""
    if name + _SUFFIX not in checkpoint.extra:
        return _objects(checkpoint).get(name)
    content = io.BytesIO(checkpoint.read_extra(name + _SUFFIX))
    return load_torch_stream(content, f"{name + _SUFFIX} of checkpoint {checkpoint.tag!r}")


def is_exact_in_json(value: object) -> bool:
    """Whether JSON restores this with the same types; a tuple would come back as a list."""
    if type(value) is dict:
        return all(type(key) is str and is_exact_in_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(is_exact_in_json, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def check_readable(what: str, content: bytes) -> None:
    """Raise ValueError if the restricted unpickler would refuse these bytes of `torch.save`."""
    try:
        load_torch_stream(io.BytesIO(content), what)
    except CheckpointError as error:
        raise ValueError(
            f"{error}; save plain values and tensors only: vars(namespace) of an argparse.Namespace, or an object's "
            "numbers and strings"
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


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group, on this rank."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters_in_checkpoint(model)}
    strangers = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        raise ValueError(
            f"the optimizer holds parameters of shape {strangers[:3]} that the model does not have; pass the model "
            "that it was made for"
        )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def group_settings(names: Sequence[Sequence[str]], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return index, names and settings of this rank's parameter groups."""
    return [
        {"index": index, "names": list(group), "settings": savable_settings(optimizer.param_groups[index])}
        for index, group in enumerate(names)
    ]


def extra_states(model: nn.Module | None) -> dict[str, Any]:
    """Return the extra states of this rank's modules, by name."""
    found = {} if model is None else modules_with_extra_state(model)
    return {name: module.get_extra_state() for name, module in found.items()}


def digests_of(states: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each extra state; empty except on first replicas, whose states are saved."""
    digests = {name: hashlib.sha256(_torch_bytes(name, value)).hexdigest() for name, value in states.items()}
    return digests if is_first_replica() else {}


def check_equal_states(digests_of_ranks: Sequence[Mapping[str, str]], doing: str) -> None:
    """Compare the extra states that several ranks would save.

    Raises:
        ValueError: tensor-parallel ranks have different states of a module; the same text on all ranks.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            holder, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"{doing} failed: {name} differs between rank {rank} and rank {holder}, but one value is saved for "
                    "all tensor-parallel ranks; keep it the same on all of them, or make it a buffer with a shard_spec"
                )


def set_extra_states(model: nn.Module, states: Any, *, strict: bool) -> None:
    """Give modules their extra states."""
    modules = modules_with_extra_state(model)
    for name, value in (states or {}).items():
        if name in modules:
            modules[name].set_extra_state(value)
        elif strict and active_group("pp").size == 1:
            raise CheckpointError(f"it holds {name}, which no module of the model uses; pass strict=False to ignore it")


def savable_settings(group: Settings) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def match_settings(stored: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[Settings]:
    """Return the stored settings for each group of these names; a group that is empty here is matched by its index."""
    return [_match_group(stored, index, set(group)) for index, group in enumerate(names)]


def _match_group(stored: Sequence[Mapping[str, Any]], index: int, names: set[str]) -> Settings:
    found = [entry for entry in stored if names.intersection(entry["names"])]
    found = found or [entry for entry in stored if not names and entry["index"] == index]
    if not found:
        raise ValueError(
            f"the checkpoint has no settings for parameter group {index} with {sorted(names)[:3]}; "
            "pass an optimizer like the one that was saved, or leave it out"
        )
    settings: Settings = found[0]["settings"]
    if any(repr(entry["settings"]) != repr(settings) for entry in found):
        raise ValueError(
            f"parameters of group {index} ({sorted(names)[:3]}, ...) were saved in groups with different settings; "
            "create the optimizer with the groups that it was saved with"
        )
    return settings


def apply_settings(settings: Sequence[Settings], optimizer: Optimizer) -> None:
    """Give each group its settings; a setting that is a tensor, such as a learning rate on a device, stays one."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key] = torch.full_like(group[key], float(value))  # groups may share the current tensor
            else:
                group[key] = value


def dict_state(state: Mapping[str, Any], *, zero1: bool) -> dict[str, Tensor]:
    """Return the one tensor, uint8 `[bytes]`, that this rank saves; none if another replica saves the same state.

    Args:
        state: an optimizer's `state_dict()`.
        zero1: whether each replica has its own state; it also does if experts are split over replicas.
    """
    if not _is_of_each_rank(zero1) and not is_first_replica():
        return {}
    stream = io.BytesIO()
    torch.save(state, stream)
    check_readable("the optimizer's state", stream.getvalue())
    return {_own_name(zero1=zero1): torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)}


def holds_dict_state(checkpoint: Checkpoint) -> bool:
    """Whether an optimizer's state was saved per rank, as a `state_dict`."""
    return any(name.startswith(OPTIMIZER_DICT_PREFIX) for name in checkpoint.tensors)


def read_dict_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the `state_dict` that this rank, or its first replica, saved."""
    for zero1 in (True, False):
        name = _own_name(zero1=zero1)
        if name in checkpoint.tensors:
            content = io.BytesIO(checkpoint.read(name).numpy().tobytes())
            state: dict[str, Any] = load_torch_stream(content, f"{name} of checkpoint {checkpoint.tag!r}")
            return state
    found = sorted(
        name.removeprefix(OPTIMIZER_DICT_PREFIX)
        for name in checkpoint.tensors
        if name.startswith(OPTIMIZER_DICT_PREFIX)
    )
    raise CheckpointError(
        f"checkpoint {checkpoint.tag!r} has the optimizer's state as dicts of {', '.join(found[-4:])}, but none for "
        "this rank; use the degrees of that run, or save the optimizer itself and the model, which load at any degrees"
    )


def _own_name(*, zero1: bool) -> str:
    """Return this rank's name; it includes the degrees, since the same rank of another layout has other parameters."""
    axes = ("pp", "tp", "dp", "cp") if _is_of_each_rank(zero1) else ("pp", "tp")
    groups = [(axis, active_group(axis)) for axis in axes]
    return OPTIMIZER_DICT_PREFIX + "-".join(
        f"{axis}_rank_{group.rank:02d}_of_{group.size:02d}" for axis, group in groups
    )


def _is_of_each_rank(zero1: bool) -> bool:
    return zero1 or splits_experts()
