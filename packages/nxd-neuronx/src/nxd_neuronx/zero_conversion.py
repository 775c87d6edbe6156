"""The command that converts ZeRO-1 states of old checkpoints between numbers of replicas.

`load_checkpoint` reads states of any number of replicas, so a run here does not need it.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.interop.neuronx.rank_files import TENSORS_SUFFIX, Rank, load_rank_file, v2_files, v2_name
from nxd_engine.checkpoints.shard_files import write_file, write_xser
from torch import Tensor

_WHOLE = "full_"

State = dict[str, Any]  # of a rank's file


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; see its `--help`.

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
    folder = os.path.join(args.input_dir, "optim")
    if not os.path.isdir(folder):
        raise ValueError(f"{args.input_dir} has no folder optim; pass the folder of one checkpoint")
    names = os.listdir(folder)
    is_whole = any(name.startswith(_WHOLE) for name in names)
    if args.convert_to_full and is_whole:
        raise ValueError(f"{args.input_dir} already holds whole states; --convert_to_sharded splits them")
    if args.convert_to_sharded and (args.dp_size is None or args.dp_size < 1):
        raise ValueError(f"--convert_to_sharded needs --dp_size, the number of replicas; got {args.dp_size}")
    write = write_xser if any(name.endswith(TENSORS_SUFFIX) for name in names) else write_file
    output = os.path.join(args.output_dir, "optim")
    os.makedirs(output, exist_ok=True)
    files = _whole_files(folder) if is_whole else v2_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no rank files dp_rank_00_tp_rank_00_pp_rank_00.pt; pass another folder")
    for pp_rank in range(1 + max(rank.pp for rank in files)):
        for tp_rank in range(1 + max(rank.tp for rank in files)):
            own = sorted(rank for rank in files if (rank.tp, rank.pp) == (tp_rank, pp_rank))
            states = [load_rank_file(files[rank]) for rank in own]
            whole = states[0] if is_whole else _merged(states, folder)
            if args.convert_to_full:
                write(whole, os.path.join(output, f"{_WHOLE}tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"))
                continue
            for replica in range(args.dp_size):
                shard = _shard(whole, replica, args.dp_size)
                write(shard, os.path.join(output, v2_name(Rank(pp_rank, 0, tp_rank, replica))))


def _whole_files(folder: str) -> dict[Rank, str]:
    """The files of whole states, as those of replica 0."""
    files = {}
    for path in Path(folder).glob(f"{_WHOLE}tp_rank_*_pp_rank_*.pt"):
        tp_rank, pp_rank = (int(part) for part in path.stem.split("_") if part.isdecimal())
        files[Rank(pp_rank, 0, tp_rank, 0)] = str(path)
    return files


def _merged(shards: Sequence[State], folder: str) -> State:
    """The whole state of a tensor- and pipeline-parallel rank, from its replicas' shards."""
    if not all(isinstance(it, dict) and {"base_state", "shape_info"} <= it.keys() for it in shards):
        raise ValueError(f"the states in {folder} are not ZeRO-1 states; they need no conversion")

    def merged(number: Any, key: str, first: Tensor) -> Tensor:
        shape = list(shards[0]["shape_info"][number])
        whole = torch.cat([it["base_state"][number][key] for it in shards])[: shape[0]]
        if list(whole.shape) != shape:
            raise ValueError(f"the shards of {key!r} add up to {list(whole.shape)}, not {shape}; a replica is missing")
        return whole

    return _mapped(shards[0], merged)


def _shard(state: State, replica: int, replicas: int) -> State:
    """One replica's rows of each tensor, padded to the same number for all replicas."""

    def shard(number: Any, key: str, whole: Tensor) -> Tensor:
        rows = -(-whole.shape[0] // replicas)
        own = whole[replica * rows : (replica + 1) * rows]
        return torch.cat([own, own.new_zeros((rows - own.shape[0], *own.shape[1:]))])

    return _mapped(state, shard)


def _mapped(state: State, function: Callable[[Any, str, Tensor], Tensor]) -> State:
    """The state with `function` applied to the tensors that are sharded over replicas."""
    base_state = {
        number: {
            key: function(number, key, value) if isinstance(value, Tensor) and value.dim() and key != "step" else value
            for key, value in values.items()
        }
        for number, values in state["base_state"].items()
    }
    return {**state, "base_state": base_state}
