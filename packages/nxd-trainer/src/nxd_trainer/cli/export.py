"""`nxd export`: write a Hugging Face folder from a checkpoint."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import parse, reports_user_errors

from nxd_trainer.cli.arguments import add_checkpoint
from nxd_trainer.recipe.sections import DTYPE_NAMES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nxd export")
    add_checkpoint(parser)
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype of the weights; as stored if unset")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="folder of the same model, for its config and tensor names, its tokenizer if the checkpoint has none, and "
        "the base weights of an adapter; unset: the checkpoint's own description",
    )
    parser.add_argument(
        "--ema", action="store_true", help="write the moving average of the weights, from a run with train.ema_decay"
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file, such as 500MiB (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the folder and print its path."""
    options = parse(_parser(), arguments)
    from nxd_trainer.export import export_hugging_face  # noqa: PLC0415
    from nxd_trainer.from_recipe import DTYPES  # noqa: PLC0415

    dtype = None if options.dtype is None else DTYPES[options.dtype]
    target = reports_user_errors(
        lambda: export_hugging_face(
            options.checkpoints,
            options.target,
            options.tag,
            like=options.like,
            dtype=dtype,
            max_shard_size=options.max_shard_size,
            averaged=options.ema,
        )
    )
    weights = sorted(target.glob("*.safetensors"))
    written = str(weights[0]) if len(weights) == 1 else f"{len(weights)} files of weights"
    print(f"wrote {target / 'config.json'} and {written}")
    return 0
