"""`nxd run`: run a training script as it is."""

import argparse
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import UserError, add_nproc, make_parser, parse, started_ranks


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "run",
        "Run a Python script like `python SCRIPT`, on several ranks of this machine if --nproc is given. "
        "If torch-xla is not installed, the script can still import it; its calls are carried out by "
        "torch.distributed. Under torchrun: torchrun ... -m nxd_cli run SCRIPT.",
        usage="nxd run [--nproc N] SCRIPT [ARGUMENT ...]",
        examples=["nxd run train.py", "nxd run --nproc 4 train.py --steps 100"],
        exit_codes="those of SCRIPT; 1 a rank has failed; 2 user error",
    )
    add_nproc(parser)
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "script_arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the script, in the ranks that the command line asks for."""
    options = parse(_parser(), arguments)
    script = Path(options.script)
    if not script.is_file():
        raise UserError(f"{script} is not a file; pass the Python script to run")
    code = started_ranks(options.nproc, "run", arguments)
    if code is not None:
        return code

    from nxd_neuronx.xla_stand_in import install  # noqa: PLC0415 - it loads torch

    install()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as it is while a rank loads its modules
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [options.script, *options.script_arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    runpy.run_path(options.script, run_name="__main__")
    return 0
