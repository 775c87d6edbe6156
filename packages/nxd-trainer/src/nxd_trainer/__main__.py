"""`python -m nxd_trainer` is `nxd`: how the ranks of a launch are started."""

import sys

from nxd_trainer.cli import main

sys.exit(main())
