"""`python -m nxd_ckpt.cli` is `nxd-ckpt`."""

import sys

from nxd_ckpt.cli.main import main

sys.exit(main())
