"""`nxd train` in which rank 1 raises in its third step. Run under torchrun with the arguments of `nxd`."""

import os
import sys

from nxd_cli import main
from nxd_trainer.training import step

compute_gradients = step.compute_gradients


def failing_compute_gradients(state):
    if state.step == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("made to fail in step 3")
    return compute_gradients(state)


step.compute_gradients = failing_compute_gradients
sys.exit(main())
