"""A script's command for the ZeRO-1 states of old checkpoints: from shards of replicas to whole ones, and to others.

`load_checkpoint` reads states of any number of replicas, so nothing needs it before a run here.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.interop.neuronx.rank_files import TENSORS_SUFFIX, Rank, v2_files, v2_name
from nxd_ckpt.interop.neuronx.xser import load_rank_file
from nxd_engine.checkpoints.shard_files import write_file, write_xser
from torch import Tensor

_WHOLE = "full_"


def _optimizer_folder(args: argparse.Namespace) -> str:
    folder = os.path.join(args.input_dir, "optim")
    if not os.path.isdir(folder):
        raise ValueError(f"{args.input_dir} has no folder optim; pass the folder of one checkpoint")
    return folder


def is_full(args: argparse.Namespace) -> bool:
    """Whether `<input_dir>/optim` holds whole states."""
    return any(name.startswith("full") for name in os.listdir(_optimizer_folder(args)))


def is_xser(args: argparse.Namespace) -> bool:
    """Whether `<input_dir>/optim` holds a file for each tensor."""
    return any(name.endswith(TENSORS_SUFFIX) for name in os.listdir(_optimizer_folder(args)))


def get_parallel_info(args: argparse.Namespace) -> tuple[int, int, int]:
    """Data-, tensor- and pipeline-parallel degrees of `<input_dir>/optim`; 0 replicas for whole states.

    Raises:
        ValueError: there are no such files.
        CheckpointError: a rank's file is missing.
    """
    files = _files(args)
    degrees = [1 + max(getattr(rank, axis) for rank in files) for axis in ("dp", "tp", "pp")]
    return (0 if is_full(args) else degrees[0]), degrees[1], degrees[2]


def merge_optim_dp_checkpoints(args: argparse.Namespace, tp_rank: int, pp_rank: int) -> dict[str, Any]:
    """The whole state of a tensor- and pipeline-parallel rank, from its replicas' shards.

    Raises:
        ValueError: a shard is not of ZeRO-1, or does not fit.
        CheckpointError: a file cannot be read.
    """
    files = _files(args)
    ranks = sorted(rank for rank in files if (rank.tp, rank.pp) == (tp_rank, pp_rank))
    shards = [load_rank_file(files[rank]) for rank in ranks]
    if not all(isinstance(it, dict) and {"base_state", "shape_info"} <= it.keys() for it in shards):
        raise ValueError(f"the states in {args.input_dir}/optim are not ZeRO-1 states; they need no conversion")
    base_state = {
        number: {key: _merged([it["base_state"][number][key] for it in shards], shape, key) for key in values}
        for number, values in shards[0]["base_state"].items()
        for shape in [list(shards[0]["shape_info"][number])]
    }
    return {**shards[0], "base_state": base_state}


def split_and_save_ckpts(args: argparse.Namespace, merged_ckpt: dict[str, Any], tp_rank: int, pp_rank: int) -> None:
    """Write the shards of `args.new_dp_size` replicas to `<output_dir>/optim`."""
    for replica in range(args.new_dp_size):
        base_state = {
            number: {key: _shard(value, replica, args.new_dp_size, key) for key, value in values.items()}
            for number, values in merged_ckpt["base_state"].items()
        }
        _write(args, {**merged_ckpt, "base_state": base_state}, v2_name(Rank(pp_rank, 0, tp_rank, replica)))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: see its `--help`.

    Raises:
        ValueError: options or files do not fit.
        CheckpointError: a file cannot be read.
    """
    parser = argparse.ArgumentParser(description="Convert ZeRO-1 states between numbers of replicas.")
    parser.add_argument("--input_dir", required=True, help="folder of one checkpoint, with its folder optim")
    parser.add_argument("--output_dir", required=True, help="folder to write optim to")
    parser.add_argument("--num_workers", type=int, default=1, help="has no effect")
    parser.add_argument("--dp_size", type=int, help="number of replicas to shard for")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--convert_to_full", action="store_true", help="convert to whole states")
    target.add_argument("--convert_to_sharded", action="store_true", help="convert to the shards of --dp_size replicas")
    args = parser.parse_args(arguments)
    whole = is_full(args)
    if args.convert_to_full and whole:
        raise ValueError(f"{args.input_dir} already holds whole states; --convert_to_sharded splits them")
    if args.convert_to_sharded and (args.dp_size is None or args.dp_size < 1):
        raise ValueError(f"--convert_to_sharded needs --dp_size, the number of replicas; got {args.dp_size}")
    args.is_xser, args.new_dp_size = is_xser(args), args.dp_size
    files = _files(args)
    _, tp_size, pp_size = get_parallel_info(args)
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            if whole:
                state = load_rank_file(files[Rank(pp_rank, 0, tp_rank, 0)])
            else:
                state = merge_optim_dp_checkpoints(args, tp_rank, pp_rank)
            if args.convert_to_full:
                _write(args, state, f"{_WHOLE}tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt")
            else:
                split_and_save_ckpts(args, state, tp_rank, pp_rank)


def _files(args: argparse.Namespace) -> dict[Rank, str]:
    """The ranks' files; whole states are those of replica 0."""
    folder = _optimizer_folder(args)
    if not is_full(args):
        files = v2_files(folder)
    else:
        files = {}
        for path in Path(folder).glob(f"{_WHOLE}tp_rank_*_pp_rank_*.pt"):
            tp_rank, pp_rank = (int(part) for part in path.stem.split("_") if part.isdecimal())
            files[Rank(pp_rank, 0, tp_rank, 0)] = str(path)
    if not files:
        raise ValueError(f"{folder} holds no rank files dp_rank_00_tp_rank_00_pp_rank_00.pt; pass another folder")
    return files


def _merged(values: Sequence[Any], shape: Sequence[int], key: str) -> Any:
    if key == "step" or not isinstance(values[0], Tensor) or not values[0].dim():
        return values[0]
    whole = torch.cat(list(values))[: shape[0]]
    if list(whole.shape) != list(shape):
        raise ValueError(
            f"the shards of {key!r} add up to {list(whole.shape)}, not {list(shape)}; a replica is missing"
        )
    return whole


def _shard(value: Any, replica: int, replicas: int, key: str) -> Any:
    if key == "step" or not isinstance(value, Tensor) or not value.dim():
        return value
    rows = -(-value.shape[0] // replicas)
    own = value[replica * rows : (replica + 1) * rows]
    padding = own.new_zeros((rows - own.shape[0], *own.shape[1:]))
    return torch.cat([own, padding])


def _write(args: argparse.Namespace, state: dict[str, Any], name: str) -> None:
    folder = os.path.join(args.output_dir, "optim")
    os.makedirs(folder, exist_ok=True)
    (write_xser if args.is_xser else write_file)(state, os.path.join(folder, name))
