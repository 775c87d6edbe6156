"""Inside a process of a program that `nxd-parity run` has started: records it until its end."""

import os
from multiprocessing.util import Finalize
from pathlib import Path

from nxd_parity.record import record

UNRECORDED = "unrecorded-"


def begin(*, folder: str, steps: int, noise: int | None, float64: bool) -> None:
    """Record this process until `steps` are over, or until it ends.

    Args:
        folder: the folder of the recording of all ranks.
        steps: number of steps.
        noise: see `record`.
        float64: whether the process computes in float64, which it does already.
    """
    recording = record(folder, steps=steps, noise=noise)
    try:
        recording.__enter__()
    except FileExistsError as error:  # a second process of that rank, such as an evaluation after training
        Path(folder, f"{UNRECORDED}{os.getpid()}").write_text(str(error), encoding="utf-8")
        return
    # Forks of multiprocessing call no functions of atexit; all processes call these.
    Finalize(None, recording.__exit__, (None, None, None), exitpriority=0)
