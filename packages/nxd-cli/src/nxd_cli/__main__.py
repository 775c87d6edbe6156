"""`python -m nxd_cli` is `nxd`: how the ranks of a launch are started."""

import os
import signal
import sys

if "RANK" in os.environ and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the command handles a Ctrl-C itself, it ends the rank at once: torch's import swallows a KeyboardInterrupt,
    # and the other ranks would wait for this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from nxd_cli import main

sys.exit(main())
