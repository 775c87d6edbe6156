"""`nxd import`: make a checkpoint from a Hugging Face folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import parse, reports_user_errors

from nxd_trainer.recipe.sections import DTYPE_NAMES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nxd import")
    parser.add_argument("folder", type=Path, help="Hugging Face folder with safetensors and config.json")
    parser.add_argument("checkpoints", type=Path, help="folder of checkpoints to write to")
    parser.add_argument("--tag", default="imported", help="name of the checkpoint (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype of the weights; as stored if unset")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the checkpoint and print its path."""
    options = parse(_parser(), arguments)
    from nxd_engine.hugging_face import import_hugging_face  # noqa: PLC0415

    from nxd_trainer.from_recipe import DTYPES  # noqa: PLC0415

    dtype = None if options.dtype is None else DTYPES[options.dtype]
    reports_user_errors(lambda: import_hugging_face(options.folder, options.checkpoints, options.tag, dtype=dtype))
    print(f"wrote {options.checkpoints / options.tag}")
    return 0
