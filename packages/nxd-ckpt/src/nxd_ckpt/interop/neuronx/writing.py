"""Writes the v1 and v2 layouts, plain or xser, for NeuronX Distributed to load."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.files import make_folders, new_file, sync_folder, write_fully
from nxd_ckpt.interop.neuronx.rank_files import (
    BEGUN_MARKER,
    DONE_MARKER,
    INFO_SUFFIX,
    TENSORS_SUFFIX,
    USER_CONTENT,
    V1_CONTENT,
    Rank,
    save_skeleton,
    v1_name,
    v2_name,
)
from nxd_ckpt.interop.neuronx.sharding import (
    Degrees,
    Pieces,
    Placement,
    Sharding,
    local_shape_of,
    placements,
    sharding_of,
)
from nxd_ckpt.interop.source import Progress, TensorSource, converted, fill, ignore_progress
from nxd_ckpt.stores import check_tag


@dataclass(frozen=True, slots=True)
class _LocalPlan:
    """One tensor of one rank: its shape, dtype and the source of its elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: list[Placement]


def write_neuronx(
    source: TensorSource,
    path: "str | os.PathLike[str]",
    tag: str | None = None,
    *,
    sharding: Mapping[str, Sharding],
    tensor_parallel_size: int,
    pipeline_stage_of: Callable[[str], int] = lambda name: 0,
    layout: Literal["v1", "v2"] = "v2",
    xser: bool = False,
    dtype: torch.dtype | None = None,
    user_content: Any = None,
    progress: Progress = ignore_progress,
) -> None:
    """Write a source's tensors as the model of a NeuronX Distributed checkpoint. Optimizer states are not written.

    Memory: plain, the model of one rank; xser, the largest tensor of one rank.

    Args:
        source: the tensors to write.
        path: v2: the folder of the tags; v1: the folder to pass to `parallel_layers.load`.
        tag: name of the checkpoint; required for v2, not allowed for v1.
        sharding: how each tensor is split, by name or pattern. The key of `Pieces` is the ranks' name of the fused
            tensor; its whole tensors come from the source.
        tensor_parallel_size: number of ranks to split over.
        pipeline_stage_of: function from a tensor's name on the ranks to the pipeline rank that holds it.
        layout: "v2" is the layout of `save_checkpoint`, "v1" that of `parallel_layers.save`.
        xser: whether each tensor gets its own file.
        dtype: dtype to convert floating-point tensors to; default: as stored.
        user_content: plain values that the library's `load_checkpoint` returns; v2 only.
        progress: function called after each tensor of each rank.

    Raises:
        ValueError: the sharding does not match, the tag is not allowed, or a checkpoint already exists.
        CheckpointError: the source cannot be read.
    """
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size} is not a number of ranks; use 1 or more")
    if (tag is None) == (layout == "v2"):
        raise ValueError("layout='v2' needs a tag, layout='v1' takes none")
    folder = os.path.abspath(path) if tag is None else os.path.join(os.path.abspath(path), check_tag(tag))
    if os.path.isdir(folder) and os.listdir(folder):
        raise ValueError(f"{folder} already exists and is not empty; remove it or choose another place")
    plans = _plan(source, sharding, tensor_parallel_size, pipeline_stage_of, dtype)
    make_folders(folder)
    if layout == "v2":
        _write_marker(folder, BEGUN_MARKER)
    for rank, local in plans.items():
        file = os.path.join(folder, "model", v2_name(rank)) if layout == "v2" else os.path.join(folder, v1_name(rank))
        if layout == "v1" and not xser:
            file = os.path.join(file, V1_CONTENT)
        make_folders(os.path.dirname(file))
        write = _write_xser if xser else _write_plain
        write(file, source, local, wrap=layout == "v1", with_info=layout == "v2", progress=progress)
    if layout == "v2":
        if user_content is not None:
            _save(user_content, os.path.join(folder, USER_CONTENT))
        _write_marker(folder, DONE_MARKER)
    sync_folder(folder)


def _plan(
    source: TensorSource,
    sharding: Mapping[str, Sharding],
    tp_size: int,
    stage_of: Callable[[str], int],
    dtype: torch.dtype | None,
) -> dict[Rank, list[_LocalPlan]]:
    fused = {name: rule for name, rule in sharding.items() if isinstance(rule, Pieces)}
    taken = {whole for rule in fused.values() for whole in rule.global_shapes}
    if lacking := sorted(taken - set(source.tensors)):
        raise ValueError(f"the sharding refers to {', '.join(lacking)}, which the source lacks")
    names = [*fused, *(name for name in source.tensors if name not in taken)]
    stages = {name: stage_of(name) for name in names}
    plans: dict[Rank, list[_LocalPlan]] = {
        Rank(pp, 0, tp, 0): [] for pp in range(1 + max(stages.values(), default=0)) for tp in range(tp_size)
    }
    for name in names:
        rule = sharding_of(name, sharding)
        first = source.tensors[next(iter(rule.global_shapes)) if isinstance(rule, Pieces) else name]
        for tp_rank in range(tp_size):
            at = Degrees(tp_size, tp_rank)
            shape = local_shape_of(name, first.global_shape, rule, at)
            found = placements(name, shape, rule, at)
            for placement in found:
                _check_shape(source, placement)
            plan = _LocalPlan(name, shape, converted(first.dtype, dtype), found)
            plans[Rank(stages[name], 0, tp_rank, 0)].append(plan)
    return plans


def _check_shape(source: TensorSource, placement: Placement) -> None:
    stored = source.tensors[placement.name].global_shape
    if placement.global_shape != stored:
        raise ValueError(
            f"{placement.name!r} is {list(stored)}, but the sharding is for {list(placement.global_shape)}; "
            "pass global_size= if ranks hold padding"
        )


def _local_tensor(source: TensorSource, plan: _LocalPlan) -> torch.Tensor:
    tensor = torch.zeros(plan.shape, dtype=plan.dtype, device="cpu")
    for placement in plan.placements:
        box = Box(placement.offsets, placement.local.shape)
        fill(source, placement.name, box, tensor[placement.local.slices])
    return tensor


def _write_plain(
    file: str, source: TensorSource, plans: list[_LocalPlan], *, wrap: bool, with_info: bool, progress: Progress
) -> None:
    state = {}
    for plan in plans:
        state[plan.name] = _local_tensor(source, plan)
        progress(plan.name, state[plan.name].nbytes)
    _save({"model": state} if wrap else state, file)


def _write_xser(
    file: str, source: TensorSource, plans: list[_LocalPlan], *, wrap: bool, with_info: bool, progress: Progress
) -> None:
    placeholders = {plan.name: torch.empty(plan.shape, dtype=plan.dtype, device="meta") for plan in plans}
    make_folders(file + TENSORS_SUFFIX)
    with _synced(file) as stream:
        numbered = save_skeleton({"model": placeholders} if wrap else placeholders, stream)
    for number, plan in zip(numbered, plans, strict=True):
        tensor = _local_tensor(source, plan)
        _save(tensor, os.path.join(file + TENSORS_SUFFIX, f"tensor_{number}.pt"))
        progress(plan.name, tensor.nbytes)
    if with_info:
        info = {number: {"dtype": tensor.dtype, "shape": tensor.shape} for number, tensor in numbered.items()}
        _save(info, file + INFO_SUFFIX)


def _save(content: Any, file: str) -> None:
    with _synced(file) as stream:
        torch.save(content, stream)


@contextmanager
def _synced(file: str) -> Iterator[IO[bytes]]:
    with open(file, "xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(os.path.dirname(file))


def _write_marker(folder: str, name: str) -> None:
    with new_file(os.path.join(folder, name)) as fd:
        write_fully(fd, b"1")
    sync_folder(folder)
