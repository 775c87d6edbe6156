"""`nxd train` in which rank 1 raises in its third step. Run under torchrun with the arguments of `nxd`."""

import os
import sys

from nxd_trainer.cli import main
from nxd_trainer.training import run

train_step = run.train_step


def failing_train_step(state):
    if state.step == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("made to fail in step 3")
    return train_step(state)


run.train_step = failing_train_step
sys.exit(main())
