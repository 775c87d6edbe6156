"""`nxd-ckpt convert`: converts a checkpoint from any format to any other."""

import fnmatch
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from nxd_ckpt.cli.formats import Opened, Place, opened
from nxd_ckpt.cli.report import Report, human_size, progress_bar
from nxd_ckpt.files import is_remote
from nxd_ckpt.interop import (
    Selection,
    as_extra,
    companions_in,
    read_companions,
    save_source,
    write_companions,
    write_hugging_face,
    write_neuronx,
    write_torch_dcp,
)
from nxd_ckpt.interop.neuronx import LLAMA, Sharding, Split, is_gate_up, split_gate_up
from nxd_ckpt.interop.neuronx.sharding import sharding_of
from nxd_ckpt.interop.source import Part, Progress, TensorSource, num_bytes
from nxd_ckpt.training_state import VALUES_FILE, read_values

TargetKind = Literal["nxd", "hf", "dcp", "neuronx-v1", "neuronx-v2"]
TARGET_KINDS: tuple[TargetKind, ...] = get_args(TargetKind)

_PREFIXES_OF_TRAINING = ("optimizer/", "optimizer_state_dict/", "rng/")  # as nxd-trainer and NeuronX name them
_STATE_OF_PARAMETER = re.compile(r"(?:.*\.)?state\.(.+)\.[^.]+")  # in nested states and torch's state dicts

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
}


@dataclass(frozen=True)
class Target:
    """Where to write a checkpoint and in which format; options that do not apply to the format stay unset.

    Args:
        path: a folder; for the nxd format also a URL.
        kind: the format.
        tag: name of the checkpoint in the folder, for nxd and neuronx-v2.
        dtype: dtype to convert floating-point tensors to.
        step: step number, for nxd; default: that of the source.
        max_shard_size: largest size of a file, for hf.
        sharding: how tensors are split over tensor-parallel ranks, for neuronx; for hf, `LLAMA` also splits fused
            weights into those of a Hugging Face Llama.
        tensor_parallel_size: number of tensor-parallel ranks, for neuronx.
        stages: pipeline rank by name pattern, for neuronx; names that match no pattern go to rank 0.
        xser: whether each tensor gets its own file, for neuronx.
    """

    path: str
    kind: TargetKind
    tag: str | None = None
    dtype: torch.dtype | None = None
    step: int | None = None
    max_shard_size: str = "5GB"
    sharding: Mapping[str, Sharding] | None = None
    tensor_parallel_size: int = 1
    stages: Mapping[str, int] | None = None
    xser: bool = False


def convert(place: Place, target: Target, *, include: list[str], exclude: list[str], part: str | None = None) -> Report:
    """Convert one checkpoint, with one tensor in memory at a time.

    Args:
        place: where it is.
        target: where and how to write it.
        include: shell patterns of the tensors to write; none: all.
        exclude: shell patterns of the tensors to leave out.
        part: the path whose tensors are written, without the path in their names; None: all.

    Raises:
        ValueError: an option that the target format needs is missing, or the target already exists.
        CheckpointError: the source cannot be read.
    """
    _check(target)
    with opened(place) as found:
        model_only = target.kind in ("hf", "neuronx-v1", "neuronx-v2") and not include
        whole = found.source if part is None else Part(found.source, part)
        left_out = _states_of_training(whole.tensors) if model_only else []
        source: TensorSource = Selection(whole, tuple(include), tuple(exclude), frozenset(left_out))
        if target.kind == "hf" and target.sharding is LLAMA:
            source = split_gate_up(source)
        total = sum(num_bytes(info) for info in source.tensors.values())
        with progress_bar("convert", total) as advance:
            _write(source, target, found, advance)
    data = {"from": found.kind, "to": target.kind, "target": target.path, "num_tensors": len(source.tensors)}
    line = f"wrote {len(source.tensors)} tensors ({human_size(total)} as stored) to {target.path} as {target.kind}"
    lines = [line]
    if found.kind == "neuronx":
        lines += _whole_shapes(found.source, place.sharding or {})
    if left_out:
        lines.append(
            f"left out {len(left_out)} training tensors, such as {left_out[0]}, which are not part of the model; "
            "pass --include '*' to write them too"
        )
    fused = [name for name in source.tensors if is_gate_up(name)]
    if target.kind == "hf" and fused:
        lines.append(
            f"{fused[0]} holds gate and up together, which transformers reads for a Phi-3 and not for a Llama; for a "
            "Llama pass --sharding llama, which splits it into gate_proj and up_proj"
        )
    lines += _values_left(found, target.kind)
    keys = {name.split(".")[0] for name in source.tensors}
    if target.kind == "hf" and len(keys) == 1:
        (key,) = keys
        lines.append(f"all names begin with {key}.; pass --part {key} to leave it out of the names")
    return Report({**data, "bytes_read": total, "left_out": left_out}, lines)


def _whole_shapes(source: TensorSource, sharding: Mapping[str, Sharding]) -> list[str]:
    """Return a line with the shape of one tensor for each kind of rule, since files of ranks cannot contradict one."""
    first: dict[Sharding, str] = {}
    for name, info in source.tensors.items():
        rule = sharding_of(name, sharding)
        if isinstance(rule, Split) and rule.dim is not None:
            first.setdefault(rule, f"{name} {list(info.global_shape)}, dimension {rule.dim}")
    return [f"check the whole shapes: {'; '.join(first.values())}. `nxd ckpt inspect` shows all"] if first else []


def _states_of_training(names: Collection[str]) -> list[str]:
    """Return the optimizer and random state tensors, by the names that nxd-ckpt, its trainers and torch use."""

    def is_state(name: str) -> bool:
        match = _STATE_OF_PARAMETER.fullmatch(name)
        owners = (match[1], f"model.{match[1]}") if match else ()
        return name.startswith(_PREFIXES_OF_TRAINING) or any(owner in names for owner in owners)

    return [name for name in names if is_state(name)]


def _check(target: Target) -> None:
    if target.kind in ("nxd", "neuronx-v2") and not target.tag:
        raise ValueError(f"--to {target.kind} needs --target-tag, the checkpoint's name in {target.path}")
    if target.kind.startswith("neuronx") and target.sharding is None:
        raise ValueError(f"--to {target.kind} needs --sharding llama, or a JSON file, to split tensors over ranks")
    if is_remote(target.path) and target.kind != "nxd":
        raise ValueError(f"{target.path} is a URL; write {target.kind} to a folder and copy that")


def _write(source: TensorSource, target: Target, found: Opened, progress: Progress) -> None:
    if target.kind == "hf":
        companions = _companions(found)
        write_hugging_face(
            source, target.path, dtype=target.dtype, max_shard_size=target.max_shard_size, progress=progress
        )
        # Files that already exist were put there by the user.
        missing = [name for name in companions if not os.path.lexists(os.path.join(target.path, name))]
        write_companions({name: companions[name] for name in missing}, target.path)
    elif target.kind == "dcp":
        write_torch_dcp(source, target.path, dtype=target.dtype, progress=progress)
    elif target.kind == "nxd":
        extra = _extra(found)
        original = found.checkpoint
        save_source(
            source,
            target.path,
            target.tag or "",
            dtype=target.dtype,
            step=_step_of(found) if target.step is None else target.step,
            extra=extra,
            rank_objects=None if original is None else original.rank_objects,
            progress=progress,
        )
    else:
        write_neuronx(
            source,
            os.path.abspath(target.path),
            target.tag if target.kind == "neuronx-v2" else None,
            sharding=target.sharding or {},
            tensor_parallel_size=target.tensor_parallel_size,
            pipeline_stage_of=_stage_of(target.stages or {}),
            layout="v2" if target.kind == "neuronx-v2" else "v1",
            xser=target.xser,
            dtype=target.dtype,
            progress=progress,
        )


def _step_of(found: Opened) -> int | None:
    """Return the step of an nxd checkpoint, or the value "step" of another one."""
    if found.checkpoint is not None:
        return found.checkpoint.step
    step = found.source.objects.get("step") if isinstance(found.source.objects, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def _values_left(found: Opened, kind: TargetKind) -> list[str]:
    """Return a line about the values of a state, such as a scheduler's, between nxd's format and torch's."""
    if kind == "dcp" and found.checkpoint is not None and VALUES_FILE in found.checkpoint.extra:
        first = next(iter(read_values(found.checkpoint.read_extra(VALUES_FILE))), None)
        if first is not None:
            return [f"values that are no tensors, such as {first}, are not written; `inspect` shows them"]
    if kind == "nxd" and found.kind == "dcp" and isinstance(found.source.objects, dict) and found.source.objects:
        first = next(iter(found.source.objects))
        return [
            f"values that are no tensors, such as {first}, are kept as objects, which `load(into=...)` does not read; "
            "see the page Convert checkpoints"
        ]
    return []


def _companions(found: Opened) -> Mapping[str, bytes]:
    """Return the tokenizer, chat template and generation config files next to the tensors."""
    if found.checkpoint is not None:
        return companions_in(found.checkpoint)
    return read_companions(found.path) if found.kind == "hf" and os.path.isdir(found.path) else {}


def _extra(found: Opened) -> Mapping[str, bytes]:
    """Return the extra files for an nxd checkpoint: those of the source, or a model's companion files."""
    if found.checkpoint is None:
        return as_extra(_companions(found))
    return {name: found.checkpoint.read_extra(name) for name in found.checkpoint.extra}


def _stage_of(stages: Mapping[str, int]) -> Callable[[str], int]:
    def stage_of(name: str) -> int:
        return next((stage for pattern, stage in stages.items() if fnmatch.fnmatchcase(name, pattern)), 0)

    return stage_of
