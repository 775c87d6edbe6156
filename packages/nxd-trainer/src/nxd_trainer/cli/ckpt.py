"""`nxd ckpt`: the commands of nxd-ckpt, which takes the rest of the line itself."""

import argparse

from nxd_trainer.cli.command import Commands


def add_parser(commands: Commands) -> None:
    """Add `ckpt` to the commands."""
    parser = commands.add_parser("ckpt", help="look at, check, compare and convert checkpoints (as nxd-ckpt)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `nxd-ckpt` with what follows `nxd ckpt`, its `--help` included."""
    from nxd_ckpt.cli import main  # noqa: PLC0415

    return main(options.arguments[1:])
