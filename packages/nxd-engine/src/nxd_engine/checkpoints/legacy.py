"""Loading checkpoints of NeuronX Distributed: v2 and v1, plain and xser, with ZeRO-1 or without.

Their files hold each rank's tensors. The shard metadata of the model to fill says how these fit together. If the
saving run had as many tensor-parallel ranks, the current metadata describes its tensors. Otherwise a parallel layer's
tensors are assumed to be split evenly along the dimension in which their shape differs; fused and repeated heads cannot
be recognized then. Experts are assumed to be split evenly over the expert-parallel ranks that saved them.
"""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from nxd_ckpt import CheckpointError, ShardedTensor
from nxd_ckpt.coordinator import coordinator_for, on_every_rank
from nxd_ckpt.interop.neuronx import Piece, Pieces, Sharding, Split, open_neuronx
from nxd_ckpt.interop.neuronx.rank_files import Rank, load_rank_file, v1_files, v2_files
from nxd_ckpt.interop.safe_pickle import load_torch_file
from nxd_ckpt.interop.source import TensorSource
from nxd_layers.experts import ExpertLinear
from nxd_lora import LoraModel
from nxd_pipeline import NxDPPModel
from nxd_state import ShardSpec, active_group, all_gather_object, get_shard_spec
from torch import nn
from torch.optim import Optimizer

from nxd_engine.adapters import settle_adapters, wanted_tensors
from nxd_engine.checkpoints.fill import check_names, check_shapes, fill_state
from nxd_engine.checkpoints.find import Found
from nxd_engine.checkpoints.legacy_heads import CopiedHeads, copied_heads
from nxd_engine.checkpoints.optimizer_state import allocate_optimizer_state, optimizer_state, settle_optimizer_state
from nxd_engine.checkpoints.state import CheckpointState, logical_name, model_state, parameters_in_checkpoint
from nxd_engine.checkpoints.stored_values import apply_settings, group_names
from nxd_engine.unwrap import tied_names

_Value = TypeVar("_Value")
_Specs = Mapping[str, ShardSpec]
_Shape = tuple[int, ...]

_V1_MODEL_KEY = "model"
_USER_CONTENT = "user_content.pt"


@dataclass(frozen=True)
class _Files:
    """The model's files by rank."""

    layout: str
    by_rank: Mapping[Rank, str]

    @property
    def tensor_parallel_size(self) -> int:
        return 1 + max(rank.tp for rank in self.by_rank)

    @property
    def pipeline_size(self) -> int:
        return 1 + max(rank.pp for rank in self.by_rank)

    def tensors_of(self, pp_rank: int, tp_rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that a rank of a stage saved; they stay in the file until they are read."""
        content = load_rank_file(self.by_rank[Rank(pp_rank, 0, tp_rank, 0)])
        state = content.get(_V1_MODEL_KEY, content) if self.layout == "v1" else content
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def shapes_of_stage(self, pp_rank: int) -> dict[str, _Shape]:
        """Return the shapes of the tensors that the first tensor-parallel rank of a stage saved."""
        return {name: tuple(value.shape) for name, value in self.tensors_of(pp_rank, 0).items()}


def load_legacy_checkpoint(
    found: Found,
    folder: str,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    scheduler: Any,
    *,
    adapters: LoraModel | None,
    strict: bool,
    optimizer_settings: bool,
) -> Any:
    """Fill the given objects, as `load_checkpoint` does. Called by all ranks.

    Args:
        found: the checkpoint.
        folder: its files, or a copy of them, on this machine.
        model: the model; its shard metadata says how the ranks' tensors fit together.
        optimizer: an optimizer with the same parameter groups as the one that was saved.
        scheduler: a scheduler, whose `load_state_dict` is called.
        adapters: the model's adapters, or None; they are reset.
        strict: as for `load_checkpoint`.
        optimizer_settings: as for `load_checkpoint`.

    Returns:
        The user content, None if there is none.

    Raises:
        CheckpointError: it is incomplete or damaged, does not fit, or would have to run code; on all ranks.
    """
    coordinator = coordinator_for(None)
    where = f"checkpoint {found.folder} of NeuronX Distributed"
    doing = f"loading {where}"
    user_content = on_every_rank(coordinator, doing, lambda: _read_user_content(folder))
    files = on_every_rank(coordinator, doing, lambda: _files(found.layout, folder))
    if model is None:
        if optimizer is not None or scheduler is not None:
            raise CheckpointError(f"{doing} needs model=, whose metadata says how the ranks' tensors fit together")
        return user_content
    if optimizer is not None:
        on_every_rank(coordinator, doing, lambda: _check_states_of_experts(files, folder))
    own_groups = on_every_rank(coordinator, doing, lambda: [] if optimizer is None else group_names(model, optimizer))
    groups = all_gather_object(own_groups, active_group("pp"))
    experts = _of_all_stages(_splits_of_experts(model))
    copied = _of_all_stages(copied_heads(dict(_named_modules(model))))
    specs = all_gather_object(_of_all_stages(_specs(model)), active_group("tp"))

    def open_source() -> TensorSource:
        stages = [files.shapes_of_stage(stage) for stage in range(files.pipeline_size)]
        shapes = {name: shape for stage in stages for name, shape in stage.items()}
        sharding = _sharding_of_model(model, experts, specs, shapes, files.tensor_parallel_size)
        if files.tensor_parallel_size == len(specs):
            sharding |= _tiled_heads(copied, files)
        names = None if optimizer is None else _parameter_names(stages, groups, tied_names(model))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"leaving out .*user_content")  # it is read separately
            return open_neuronx(folder, sharding=sharding, parameter_names=names)

    source = on_every_rank(coordinator, doing, open_source)
    own = on_every_rank(coordinator, doing, lambda: wanted_tensors(adapters, {}, model_state(model), where))
    if strict:
        check_names(source.tensors, own, tied_names(model), where, coordinator)
    objects = source.objects
    on_every_rank(coordinator, doing, lambda: _check_objects(objects, optimizer, scheduler))
    into = {name: tensor for name, tensor in own.items() if name in source.tensors}
    on_every_rank(coordinator, doing, lambda: check_shapes(source, into))
    if optimizer is not None:
        into |= on_every_rank(coordinator, doing, lambda: _make_room(source, model, optimizer))
    on_every_rank(coordinator, doing, lambda: fill_state(source, into))
    settle_adapters(adapters, {})
    if optimizer is not None:
        settle_optimizer_state(optimizer, {})
        if optimizer_settings:
            apply_settings(objects["optimizer"]["param_groups"], optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(objects["scheduler"])
    return user_content


def _read_user_content(folder: str) -> Any:
    """Read plain values and tensors only, whatever the file holds."""
    path = os.path.join(folder, _USER_CONTENT)
    if not os.path.isfile(path):  # v1 has none
        return None
    try:
        return load_torch_file(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. If you trust it, read it with nxd_ckpt.interop.neuronx.read_user_content(trust=True), and move "
            "the file away to load the rest"
        ) from error


def _files(layout: str, folder: str) -> _Files:
    by_rank = v1_files(folder) if layout == "v1" else v2_files(os.path.join(folder, "model"))
    if not by_rank:
        raise CheckpointError("it holds no model files")
    return _Files(layout, by_rank)


def _check_states_of_experts(files: _Files, folder: str) -> None:
    """Refuse ZeRO-1 states of split experts: they name only data-parallel ranks, over which experts are also split."""
    of_optimizer = v2_files(os.path.join(folder, "optim")) if files.layout == "v2" else {}
    if any(rank.ep for rank in files.by_rank) and of_optimizer and not any(rank.ep for rank in of_optimizer):
        raise CheckpointError(
            "its optimizer states were saved by ZeRO-1 over ranks that also split the experts, and do not say which "
            "rank has which expert; leave out optimizer="
        )


def _parameter_names(
    stages: Sequence[Mapping[str, object]], groups_of_ranks: Sequence[Sequence[Sequence[str]]], tied: Mapping[str, str]
) -> dict[int, list[str]]:
    """Return the names in the order of each saved stage's optimizer: by group, then as in the model."""
    if len(stages) > 1 and tied:
        raise CheckpointError(
            f"the weights {sorted(tied)} are tied, and the optimizer states of {len(stages)} stages do not say "
            "which stage had them; leave out optimizer="
        )
    num_groups = max(len(groups) for groups in groups_of_ranks)
    by_group = [[name for groups in groups_of_ranks for name in groups[index]] for index in range(num_groups)]
    names = [name for group in by_group for name in group]
    return {rank: [name for name in names if name in held] for rank, held in enumerate(stages)}


def _check_objects(objects: Mapping[str, Any], optimizer: Optimizer | None, scheduler: object) -> None:
    if scheduler is not None and "scheduler" not in objects:
        raise CheckpointError("it holds no scheduler state made of plain values; leave out scheduler=")
    if optimizer is None:
        return
    groups = objects.get("optimizer", {}).get("param_groups", [])
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"its optimizer has {len(groups)} parameter groups, this one has {len(optimizer.param_groups)}; "
            "use the same groups"
        )


def _make_room(source: TensorSource, model: nn.Module, optimizer: Optimizer) -> CheckpointState:
    stored = {name: (info.dtype, info.global_shape) for name, info in source.tensors.items()}
    allocate_optimizer_state(model, optimizer, stored)
    return optimizer_state(model, optimizer)


def _of_all_stages(own: Mapping[str, _Value]) -> dict[str, _Value]:
    """Merge the entries of all stages, since every rank reads all stages' files. Called by all ranks of a pipeline.

    Without this, a rank would mistake the fused tensors of other stages for tensors of the model.
    """
    return {name: value for stage in all_gather_object(own, active_group("pp")) for name, value in stage.items()}


def _specs(model: nn.Module) -> dict[str, ShardSpec]:
    return {name: spec for name, p in parameters_in_checkpoint(model) if (spec := get_shard_spec(p)) is not None}


def _sharding_of_model(
    model: nn.Module,
    experts: Mapping[str, Split],
    specs_of_ranks: Sequence[_Specs],
    saved_shapes: Mapping[str, _Shape],
    saved_tp_size: int,
) -> dict[str, Sharding]:
    """Return, for each sharded tensor of the model, how the ranks that saved it held it.

    Args:
        model: the model to fill.
        experts: how the experts' weights are split, for all stages.
        specs_of_ranks: the shard metadata of all stages' parameters on each tensor-parallel rank.
        saved_shapes: shapes of the tensors that the first tensor-parallel rank saved.
        saved_tp_size: number of tensor-parallel ranks of the saving run.
    """
    rules: dict[str, Sharding] = dict(experts)
    specs_of_ranks = [{name: spec for name, spec in specs.items() if name not in rules} for specs in specs_of_ranks]
    if saved_tp_size == len(specs_of_ranks):
        return rules | {name: _pieces(name, [specs[name] for specs in specs_of_ranks]) for name in specs_of_ranks[0]}
    owners = _owners(model)
    for name, spec in specs_of_ranks[0].items():
        if any(piece.name for piece in spec.pieces):
            raise CheckpointError(
                f"{name} fuses several tensors, and it is unknown how {saved_tp_size} ranks split them; "
                f"load it with tensor_parallel_size={saved_tp_size} and save it again; that loads anywhere"
            )
    for name, tensor in model_state(model).items():
        shape = tuple(tensor.global_shape if isinstance(tensor, ShardedTensor) else tensor.shape)
        if name not in rules and name in saved_shapes and saved_shapes[name] != shape:
            rules[name] = _split(name, owners.get(name), shape, saved_shapes[name], saved_tp_size)
    return rules


def _tiled_heads(layers: Mapping[str, CopiedHeads], files: _Files) -> dict[str, Pieces]:
    """Return how the ranks hold the layers whose copied heads are in tiled order in the checkpoint."""
    rules: dict[str, Pieces] = {}
    for stage in range(files.pipeline_size) if layers else ():
        first_ranks = [files.tensors_of(stage, tp_rank) for tp_rank in range(2)]
        for layer in layers.values():
            if all(name in first_ranks[0] for name in layer.held) and layer.is_tiled(first_ranks):
                rules |= layer.tiled()
    return rules


def _pieces(name: str, specs: Sequence[ShardSpec]) -> Pieces:
    pieces = [piece for spec in specs for piece in spec.pieces]
    return Pieces(
        specs[0].local_shape,
        {logical_name(name, piece.name): piece.logical_shape for piece in pieces},
        [
            [
                Piece(logical_name(name, piece.name), piece.local.offset, piece.local.shape, piece.logical.offset)
                for piece in spec.pieces
            ]
            for spec in specs
        ],
    )


def _named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    modules: Iterable[tuple[str, nn.Module]]
    modules = model.local_named_modules() if isinstance(model, NxDPPModel) else model.named_modules()
    return modules


def _splits_of_experts(model: nn.Module) -> dict[str, Split]:
    """Return how NeuronX Distributed splits fused expert weights: over its tensor- and expert-parallel ranks."""
    return {
        f"{prefix}.weight": Split(module.partition_dim, stride=module.stride, expert_dim=0)
        for prefix, module in _named_modules(model)
        if isinstance(module, ExpertLinear)
    }


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parallel layer that each tensor belongs to, by the tensor's name."""
    return {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in _named_modules(model)
        if hasattr(module, "tensor_parallel_size")
        for name, _ in module.named_parameters(recurse=False)
    }


def _split(name: str, owner: nn.Module | None, shape: _Shape, saved: _Shape, saved_tp_size: int) -> Split:
    dims = [dim for dim, sizes in enumerate(zip(shape, saved, strict=False)) if sizes[0] != sizes[1]]
    stride = int(getattr(owner, "stride", 1))
    if owner is None or len(shape) != len(saved) or len(dims) != 1 or saved[dims[0]] * saved_tp_size < shape[dims[0]]:
        raise CheckpointError(
            f"{name} is {list(shape)} here and {list(saved)} on each of {saved_tp_size} ranks, which is not an even "
            "split of a parallel layer; load it into the layers that were saved"
        )
    is_padded = saved[dims[0]] * saved_tp_size != shape[dims[0]]
    return Split(dims[0], stride=stride, global_size=shape[dims[0]] if is_padded else None)
