"""The console script `nxd-ckpt`: look at checkpoints, check, compare and convert them, and keep their folder tidy."""

from nxd_ckpt.cli.main import main

__all__ = ["main"]
