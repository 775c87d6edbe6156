"""The console script `nxd`: one file per command, each with `add_parser(commands)` and `run(options)`.

Commands only read the command line and print; the work is done elsewhere and imported when it is needed, so that
`nxd --help` answers at once.
"""

from nxd_trainer.cli.main import main

__all__ = ["main"]
