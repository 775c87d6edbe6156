"""`python -m nxd_trainer` runs `nxd`; other launchers, such as torchrun, start ranks with it."""

import nxd_cli.__main__  # noqa: F401 - runs the command
