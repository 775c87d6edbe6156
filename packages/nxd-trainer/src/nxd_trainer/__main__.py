"""`python -m nxd_trainer` is `nxd`: how other launchers, such as torchrun, start its ranks."""

import nxd_cli.__main__  # noqa: F401 - it runs the command
