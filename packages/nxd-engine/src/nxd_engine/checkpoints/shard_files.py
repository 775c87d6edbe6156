"""`parallel_layers.save` and `load`: a torch file per model-parallel rank, as NeuronX Distributed writes them (v1).

For atomic checkpoints that load at other degrees, use `save_checkpoint` and `load_checkpoint`. Objects that could run
code when unpickled are neither loaded nor saved.
"""

import io
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from nxd_ckpt import CheckpointError, ShardedTensor
from nxd_ckpt.coordinator import coordinator_for, on_every_rank
from nxd_ckpt.interop.neuronx.rank_files import (
    TENSORS_SUFFIX,
    V1_CONTENT,
    Rank,
    load_rank_file,
    save_skeleton,
    v1_files,
    v1_name,
)
from nxd_ckpt.interop.safe_pickle import load_torch_file
from nxd_pipeline import NxDPPModel
from nxd_state import active_group, splits_experts, values_changed
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_engine.checkpoints.fill import check_names
from nxd_engine.checkpoints.state import CheckpointState, model_state, parameters_in_checkpoint
from nxd_engine.checkpoints.stored_values import check_readable
from nxd_engine.rank_sync import agree, is_first_replica
from nxd_engine.unwrap import plain_model, tied_names

NXD_SKIP_RENDEZVOUS = "NXD_SKIP_RENDEZVOUS"  # a variable of NeuronX Distributed, without effect here


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the folder of a file if it does not exist."""
    os.makedirs(os.path.dirname(os.fspath(filename)) or ".", exist_ok=True)


def save(
    state_dict: Mapping[str, Any],
    save_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Write each model-parallel rank's content; of several replicas, the first one's. Called by all ranks.

    Args:
        state_dict: nested dicts and lists of tensors and plain values, such as `{"model": model.state_dict()}`;
        save_dir: a local folder that all ranks share. This rank's files in it are
            replaced.
        save_serially: write one rank at a time, so that a host needs memory for only one of them.
        save_xser: write a file for each tensor.
        down_cast_bf16: write float32 and float64 tensors as bfloat16.
        master_dp_only: only the first replica writes. With False every replica writes its own files, for `load` with
            the same argument.

    Raises:
        ValueError: something could only be read back by running code, or ranks disagree; nothing was written.
        CheckpointError: a rank could not write; on all ranks.
    """
    coordinator = coordinator_for(None)
    tp, pp = active_group("tp"), active_group("pp")
    folder = os.fspath(save_dir)
    doing = f"saving to {folder}"

    def describe_call() -> dict[str, object]:
        _check_plain(state_dict)
        if master_dp_only and splits_experts():
            raise ValueError(
                "master_dp_only=True would leave out the experts of other replicas; pass False, or use save_checkpoint"
            )
        return {"save_serially": bool(save_serially), "master_dp_only": bool(master_dp_only)}

    agree(coordinator, "checking the arguments of parallel_layers.save", describe_call)

    def write() -> None:
        path = os.path.join(folder, v1_name(Rank(pp.rank, 0, tp.rank, 0)) + _of_replica(master_dp_only))
        content = _detached(state_dict, torch.bfloat16 if down_cast_bf16 else None)
        (write_xser if save_xser else _write_plain)(content, path)

    num_turns = tp.size * pp.size if save_serially else 1
    own_turn = pp.rank * tp.size + tp.rank if save_serially else 0
    writes = is_first_replica() or not master_dp_only
    for turn in range(num_turns):
        on_every_rank(coordinator, doing, write if writes and turn == own_turn else _wait_for_others)


def load(
    load_dir: str | os.PathLike[str],
    model_or_optimizer: nn.Module | Optimizer | None = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = False,
) -> Any:
    """Read files of `save`, here or in NeuronX Distributed, written at the same degrees. Called by all ranks.

    Args:
        load_dir: the folder that was given to `save`. With `sharded=False`, a file.
        model_or_optimizer: the model or optimizer to fill from `model_key`.
        model_key: the key of the model's state in the saved content; None if the content is that state.
        load_xser: accepted for scripts that pass it; the format is detected from the files.
        sharded: False if one file holds the whole model, of which each rank takes its part. This needs the model, and
            the file must have the model's names.
        strict: require the same names in the file and the model; otherwise the names in both are loaded.
        master_dp_only: as for `save`; with False each replica reads its own file.
        weights_only: accepted for scripts that pass it; loading never runs code.

    Returns:
        The saved content, without the part that the model or optimizer was filled from.

    Raises:
        ValueError: `sharded=False` without a model, or the ranks' calls differ.
        CheckpointError: a file is missing, damaged, from other degrees, does not fit, or would have to run code; on all
            ranks.
    """
    coordinator = coordinator_for(None)
    doing = f"loading from {os.fspath(load_dir)}"
    target = plain_model(model_or_optimizer) if isinstance(model_or_optimizer, nn.Module) else model_or_optimizer

    def describe_call() -> dict[str, object]:
        given = None if target is None else "a model or an optimizer"
        return {"model_or_optimizer": given, "sharded": bool(sharded), "master_dp_only": bool(master_dp_only)}

    agree(coordinator, "checking the arguments of parallel_layers.load", describe_call)
    if not sharded:
        model = on_every_rank(coordinator, doing, lambda: _as_module(target), error_type=ValueError)
        content = on_every_rank(coordinator, doing, lambda: load_torch_file(_whole_file(load_dir)))
        state = on_every_rank(coordinator, doing, lambda: _part(content, model_key))
        own = on_every_rank(coordinator, doing, lambda: model_state(model))
        check_names(state, own, tied_names(model), os.fspath(load_dir), coordinator, can_be_lax=False)
        on_every_rank(coordinator, doing, lambda: _slice_into(own, state))
        values_changed(it for _, it in parameters_in_checkpoint(model))
        return _rest(content, model_key)
    content = on_every_rank(coordinator, doing, lambda: load_rank_file(_own_file(load_dir, master_dp_only)))
    if target is None:
        return content
    state = on_every_rank(coordinator, doing, lambda: _part(content, model_key))
    on_every_rank(coordinator, doing, lambda: _load_state(target, state, strict=strict))
    return _rest(content, model_key)


def _check_plain(state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if `load` would refuse a value that is not a tensor."""
    stream = io.BytesIO()
    try:
        torch.save(_replace_tensors(state_dict, lambda tensor: None), stream)
    except Exception as error:  # pickling asks foreign objects
        raise ValueError(f"state_dict cannot be saved: {type(error).__name__}: {error}; keep plain values") from error
    check_readable("state_dict", stream.getvalue())


def _detached(content: Mapping[str, Any], wide_dtype: torch.dtype | None) -> Any:
    """Copy tensors to the CPU, without the rest of their storage; a tensor that occurs twice stays one tensor."""
    known: dict[tuple[object, ...], Tensor] = {}

    def detach(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in known or not tensor.numel():
            wide = tensor.dtype in (torch.float32, torch.float64)
            copy = tensor.detach().to("cpu", wide_dtype if wide else None)
            known[key] = copy.clone() if copy.untyped_storage().nbytes() != copy.nbytes else copy
        return known[key]

    return _replace_tensors(content, detach)


def _replace_tensors(content: Any, replace: Callable[[Tensor], Any]) -> Any:
    if isinstance(content, Tensor):
        return replace(content)
    if isinstance(content, Mapping):
        return {key: _replace_tensors(value, replace) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_replace_tensors(value, replace) for value in content)
    return content


def _write_plain(content: Any, path: str) -> None:
    if os.path.isfile(path):  # an earlier xser save
        os.remove(path)
        shutil.rmtree(path + TENSORS_SUFFIX, ignore_errors=True)
    os.makedirs(path, exist_ok=True)
    write_file(content, os.path.join(path, V1_CONTENT))


def write_xser(content: Any, path: str) -> None:
    """Write a rank's content with a file for each tensor. The skeleton is written last and marks it complete."""
    if os.path.isdir(path):  # an earlier plain save
        shutil.rmtree(path)
    if os.path.isfile(path):
        os.remove(path)
    shutil.rmtree(path + TENSORS_SUFFIX, ignore_errors=True)
    os.makedirs(path + TENSORS_SUFFIX)
    skeleton = io.BytesIO()
    for number, tensor in save_skeleton(content, skeleton).items():
        write_file(tensor, os.path.join(path + TENSORS_SUFFIX, f"tensor_{number}.pt"))
    with open(path + ".new", "wb") as file:
        file.write(skeleton.getvalue())
    os.replace(path + ".new", path)


def write_file(content: Any, path: str) -> None:
    """Write a rank's content to a file, atomically."""
    torch.save(content, path + ".new")
    os.replace(path + ".new", path)


def _wait_for_others() -> None:
    """Another rank's turn."""


def _of_replica(master_dp_only: bool) -> str:
    return "" if master_dp_only else f"_dp_rank_{active_group('dp').rank:02d}"


def _own_file(load_dir: str | os.PathLike[str], master_dp_only: bool) -> str:
    tp, pp = active_group("tp"), active_group("pp")
    if not master_dp_only:
        path = os.path.join(os.fspath(load_dir), v1_name(Rank(pp.rank, 0, tp.rank, 0)) + _of_replica(False))
        if not os.path.exists(path):
            raise CheckpointError(f"{path} is missing; load with master_dp_only=True, or at the degrees of the save")
        return os.path.join(path, V1_CONTENT) if os.path.isdir(path) else path
    files = v1_files(os.fspath(load_dir))
    if not files:
        raise CheckpointError("it holds no files of parallel_layers.save")
    saved = (1 + max(rank.tp for rank in files), 1 + max(rank.pp for rank in files))
    if saved != (tp.size, pp.size):
        raise CheckpointError(
            f"it was saved at TP {saved[0]} x PP {saved[1]}, but this run has TP {tp.size} x PP {pp.size}; use "
            "the same degrees, or load_checkpoint, which loads at any"
        )
    return files[Rank(pp.rank, 0, tp.rank, 0)]


def _whole_file(load_dir: str | os.PathLike[str]) -> str:
    path = os.fspath(load_dir)
    return os.path.join(path, V1_CONTENT) if os.path.isdir(path) else path


def _as_module(target: object) -> nn.Module:
    if not isinstance(target, nn.Module):
        raise ValueError(f"sharded=False needs the model, whose tensors say which parts to read; got {target!r}")
    return target


def _part(content: Any, model_key: str | None) -> Mapping[str, Any]:
    part = content if model_key is None else content.get(model_key) if isinstance(content, dict) else None
    if not isinstance(part, Mapping):
        there = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"no state under model_key={model_key!r}; found: {there}")
    return part


def _rest(content: Any, model_key: str | None) -> dict[str, Any]:
    return {key: value for key, value in content.items() if model_key is not None and key != model_key}


def _load_state(target: nn.Module | Optimizer, state: Mapping[str, Any], *, strict: bool) -> None:
    if isinstance(target, Optimizer) and "param_groups" not in state:
        raise CheckpointError("it is not an optimizer's state; pass the model_key= that the optimizer was saved under")
    if isinstance(target, NxDPPModel):
        target.load_local_state_dict(state, strict=strict)
    elif isinstance(target, Optimizer):
        target.load_state_dict(dict(state))
    else:
        target.load_state_dict(dict(state), strict=strict)


@torch.no_grad()
def _slice_into(own: CheckpointState, state: Mapping[str, Any]) -> None:
    for name, tensor in own.items():
        whole = state[name]
        if not isinstance(whole, Tensor):
            raise CheckpointError(f"{name} is a {type(whole).__name__}; it must be a tensor")
        shape = tuple(tensor.global_shape if isinstance(tensor, ShardedTensor) else tensor.shape)
        if tuple(whole.shape) != shape:
            raise CheckpointError(f"{name} is {list(whole.shape)}, but {list(shape)} in the model")
    for name, tensor in own.items():
        if isinstance(tensor, ShardedTensor):
            for shard in tensor.shards:
                shard.tensor.copy_(state[name][shard.box.slices])
        else:
            tensor.copy_(state[name])
