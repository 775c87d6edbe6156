"""Converts between whole weights and the shards of all ranks.

A model created inside `nxd_state.planned_world`, as one of the planned ranks, has that rank's shapes and shard
metadata. The metadata of the other ranks follows, because all shards have the same shape.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from nxd_state import ShardSpec, get_shard_spec, shard_along
from nxd_state.parameter_marks import get_partition
from torch import Tensor, nn

from nxd_trace.exporting import named_tensors
from nxd_trace.manifest import RankManifest, rank_folder
from nxd_trace.model import TensorParallelModel
from nxd_trace.weights import Weights, as_source, read_weights, save_safetensors


def rank_spec(name: str, tensor: Tensor, rank: int) -> ShardSpec | None:
    """Return the shard metadata of a parameter on another rank; None if every rank holds the whole parameter."""
    spec = get_shard_spec(tensor)
    if spec is None:
        return None
    first = spec.pieces[0]
    dim, size, stride = get_partition(tensor) or (0, 1, 1)

    def spec_of(rank: int) -> ShardSpec:
        length = spec.local_shape[dim] * size
        return shard_along(first.logical_shape, dim, rank=rank, size=size, stride=stride, padded_length=length)

    is_plain = all(not piece.name and piece.copies == 1 for piece in spec.pieces)
    if not is_plain or spec not in map(spec_of, range(size)):
        raise ValueError(
            f"{name} is fused or replicated, so the other ranks' parts cannot be derived from one; pass "
            "parallel_model_trace a function that builds the model on each rank"
        )
    return spec_of(rank)


def rank_weights(
    checkpoint: Mapping[str, Tensor],
    model: nn.Module,
    ranks: Sequence[int],
    *,
    folder: str | Path | None = None,
) -> list[dict[str, Tensor]]:
    """Return each rank's shards of a whole model's weights.

    Args:
        checkpoint: whole tensors by name; tensors that the model lacks are ignored, and missing buffers are skipped.
        model: the model of one of the ranks; it may be on the meta device.
        ranks: tensor-parallel ranks to return shards of.
        folder: folder to also write `tp<rank>_sharded_checkpoint.safetensors` to.

    Returns:
        For each rank, tensors by the model's names, in the dtypes of the checkpoint.

    Raises:
        ValueError: a parameter is missing or has another shape.
    """
    parameters = dict(model.named_parameters())
    tensors = {name: it for name, it in named_tensors(model) if name in checkpoint or name in parameters}
    missing = sorted(name for name in tensors if name not in checkpoint)
    if missing:
        raise ValueError(f"the checkpoint lacks {missing[0]} ({len(missing)} tensors in all); rename its tensors")
    shards = [{name: _part(name, checkpoint[name], it, rank) for name, it in tensors.items()} for rank in ranks]
    if folder is not None:
        write_rank_weights(shards, folder, first_rank=ranks[0])
    return shards


def write_rank_weights(shards: Sequence[Mapping[str, Tensor]], folder: str | Path, *, first_rank: int = 0) -> None:
    """Write each rank's weights as `tp<rank>_sharded_checkpoint.safetensors` to a folder, created if missing."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for rank, of_rank in enumerate(shards, first_rank):
        tensors = {name: tensor.contiguous() for name, tensor in of_rank.items()}
        save_safetensors(tensors, Path(folder) / f"tp{rank}_sharded_checkpoint.safetensors")


def _part(name: str, whole: Tensor, tensor: Tensor, rank: int) -> Tensor:
    spec = rank_spec(name, tensor, rank)
    expected = tuple(tensor.shape) if spec is None else spec.pieces[0].logical_shape
    if tuple(whole.shape) != expected:
        raise ValueError(f"{name} has shape {list(whole.shape)} in the checkpoint but {list(expected)} in the model")
    if spec is None:
        return whole.detach().clone()
    part = whole.new_zeros(spec.local_shape)
    spec.copy_from_logical(whole, part)
    return part


def whole_weights(shards: Sequence[Mapping[str, Tensor]], model: TensorParallelModel) -> dict[str, Tensor]:
    """Return whole tensors from all ranks' shards: the inverse of `rank_weights`.

    Args:
        shards: tensors of each rank, by the model's names.
        model: a traced or loaded model.

    Raises:
        ValueError: the number of ranks differs, or the model lacks a tensor or has it in another shape.
    """
    if len(shards) != model.num_ranks:
        raise ValueError(f"weights of {len(shards)} ranks were passed, but the model has {model.num_ranks} ranks")
    wholes: dict[str, Tensor] = {}
    for rank, of_rank in enumerate(shards):
        stored = RankManifest.read(model.folder / rank_folder(rank))
        for name, tensor in of_rank.items():
            if name in stored.states:
                continue
            weight = stored.weights.get(name)
            if weight is None or tuple(tensor.shape) != weight.shape:
                found = "lacks it" if weight is None else f"has {list(weight.shape)}"
                raise ValueError(f"{name} has shape {list(tensor.shape)} for rank {rank}, but the model {found}")
            spec = weight.spec(name)
            for logical, shape in spec.logical_shapes.items():
                if logical not in wholes:
                    wholes[logical] = tensor.new_zeros(shape)
            spec.copy_to_logical(tensor, wholes)
    return wholes


def shard_checkpoint(weights: Weights, model: TensorParallelModel) -> list[dict[str, Tensor]]:
    """Return each rank's shards of some weights, without passing them to the workers.

    Args:
        weights: weights, as for `TensorParallelModel.replace_weights`.
        model: a traced or loaded model; its workers need not run.

    Returns:
        For each rank, tensors by the model's names.

    Raises:
        ValueError: the weights do not match the model.
    """
    shards = []
    with as_source(weights) as source:
        for rank in range(model.num_ranks):
            stored = RankManifest.read(model.folder / rank_folder(rank)).weights
            tensors = {
                name: torch.empty(weight.shape, dtype=getattr(torch, weight.dtype)) for name, weight in stored.items()
            }
            filled = read_weights(stored, source, tensors.__getitem__)
            shards.append({name: tensors[name] for name in filled})
    return shards
