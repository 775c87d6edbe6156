"""`python -m nxd_cli` is `nxd`; the launcher starts its ranks with it."""

import os
import signal
import sys

if "RANK" in os.environ and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the command handles Ctrl-C itself, Ctrl-C ends the rank at once: importing torch swallows a
    # KeyboardInterrupt, and the other ranks would wait for this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from nxd_cli import main

sys.exit(main())
