"""The `nxd` command and the helpers that its commands share: launching ranks, user errors and output."""

from nxd_cli.dispatch import main

__version__ = "0.1.0"

__all__ = ["main"]
