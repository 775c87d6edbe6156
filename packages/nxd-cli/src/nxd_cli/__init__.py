"""The command `nxd` and what its commands share: ranks that are started, errors of the user, what is shown."""

from nxd_cli.dispatch import main

__version__ = "0.1.0"

__all__ = ["main"]
