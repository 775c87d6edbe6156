"""`nxd run`: run a training script as it is, perhaps at a layout.

What other packages do before a script runs are entry points of the group "nxd.run": "stand_in" (nxd-neuronx), without
arguments, makes torch-xla importable where it is not installed; "trainers" (nxd-hf-trainer) takes the layout that the
command line gives, as keyword arguments.
"""

import argparse
import math
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from nxd_cli.command import UserError, add_nproc, make_parser, parse, reports_user_errors, started_ranks

GROUP = "nxd.run"
_SIZES_OF_A_REPLICA = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "run",
        "Run a Python script like `python SCRIPT`, on several ranks of this machine if --nproc is given. "
        "If torch-xla is not installed, the script can still import it; its calls are carried out by "
        "torch.distributed. With a layout, transformers' Trainer, TRL's trainers and Accelerate train at that layout. "
        "Under torchrun: torchrun ... -m nxd_cli run SCRIPT.",
        usage="nxd run [--nproc N] [LAYOUT ...] SCRIPT [ARGUMENT ...]",
        examples=[
            "nxd run train.py",
            "nxd run --nproc 4 train.py --steps 100",
            "nxd run --nproc 4 --tensor-parallel-size 2 --zero-stage 1 sft.py",
        ],
        exit_codes="those of SCRIPT; 1 a rank has failed; 2 user error",
    )
    add_nproc(parser)
    _add_layout(parser.add_argument_group("layout of the script's trainer (needs nxd-hf-trainer)"))
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "script_arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    return parser


def _add_layout(group: "argparse._ArgumentGroup") -> None:
    unset = argparse.SUPPRESS  # a flag that is not given is not in the layout
    sizes = {
        "--tensor-parallel-size": "ranks that split each layer",
        "--pipeline-parallel-size": "ranks over which the layers are distributed",
        "--num-microbatches": "parts of a batch that are in the pipeline at the same time",
        "--context-parallel-size": "ranks that split each sequence",
        "--expert-parallel-size": "ranks that split the experts of a layer",
        "--shard-group-size": "neighboring replicas over which ZeRO shards; the others mirror them",
    }
    for flag, told in sizes.items():
        group.add_argument(flag, type=int, metavar="N", default=unset, help=told)
    group.add_argument(
        "--zero-stage",
        type=int,
        choices=range(4),
        default=unset,
        help="shard over the replicas: 1 the optimizer's states, 2 also gradients, 3 also parameters",
    )
    group.add_argument(
        "--zero-offload",
        choices=("optimizer", "parameters"),
        default=unset,
        help="keep the optimizer's states, or parameters too, in host memory",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=unset,
        help="split activations between blocks along the sequence",
    )
    group.add_argument(
        "--hugging-face-checkpoints",
        action="store_true",
        default=unset,
        help="each checkpoint-N also has the model as a Hugging Face folder",
    )


def main(arguments: Sequence[str]) -> int:
    """Run the script, in the ranks that the command line asks for."""
    options = vars(parse(_parser(), arguments))
    nproc, name, script_arguments = options.pop("nproc"), options.pop("script"), options.pop("script_arguments")
    script = Path(name)
    if not script.is_file():
        raise UserError(f"{script} is not a file; pass the Python script to run")
    installed = {found.name: found for found in entry_points(group=GROUP)}
    if options and "trainers" not in installed:
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in options)
        raise UserError(f"{flags}: a layout needs nxd-hf-trainer, which is not installed; pip install nxd-hf-trainer")
    _check_sizes(options, int(os.environ.get("WORLD_SIZE", "1")) if nproc is None else nproc)
    code = started_ranks(nproc, "run", arguments)
    if code is not None:
        return code
    if options:
        begin = installed["trainers"].load()
        reports_user_errors(lambda: begin(**options))
    elif "stand_in" in installed:  # not beside a trainer, which would take the stand-in for an accelerator
        installed["stand_in"].load()()
    _run(script, name, script_arguments)
    return 0


def _check_sizes(options: Mapping[str, Any], ranks: int) -> None:
    """Raise a UserError if the ranks cannot be divided into replicas of these sizes."""
    sizes = {name: options[name] for name in _SIZES_OF_A_REPLICA if name in options}
    given = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
    if any(size < 1 for size in sizes.values()):
        raise UserError(f"{given}: sizes are 1 or more")
    if ranks % (needed := math.prod(sizes.values())):
        raise UserError(
            f"{given}: {ranks} ranks cannot be divided into replicas of {needed}; start a multiple of {needed}, as "
            f"with --nproc {needed}"
        )


def _run(script: Path, name: str, arguments: Sequence[str]) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as it is while a rank loads its modules
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    runpy.run_path(name, run_name="__main__")
