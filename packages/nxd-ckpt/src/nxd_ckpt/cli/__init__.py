"""The console script `nxd-ckpt`: inspect, verify, compare and convert checkpoints, and clean up their folder."""

from nxd_ckpt.cli.main import main

__all__ = ["main"]
