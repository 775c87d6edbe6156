"""`assert_same_training`: tests that a function trains alike on several ranks and in one process."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from nxd_parity.compare import compare
from nxd_parity.ranks import Job, run_ranks
from nxd_parity.recording import Recording
from nxd_parity.sides import steps_of

SPREAD = 2  # runs of the reference with noise


def assert_same_training(
    reference: Callable[[], object],
    candidate: Callable[..., object],
    *,
    ranks: int = 2,
    layouts: Sequence[Mapping[str, Any]] = ({},),
    steps: int | None = None,
    dtype: torch.dtype = torch.float64,
    folder: Path | str | None = None,
    timeout: float = 300.0,
) -> None:
    """Check that training on several ranks computes what it computes in one process.

    Both functions train a few steps. Each runs in processes of its own, with the seeds of random, numpy and torch at
    0: the reference in one without a process group; the candidate on each of `ranks`, in an initialized default group
    (gloo), once for each of `layouts`. They are pickled by cloudpickle, so that they may be local functions.

    Args:
        reference: trains in one process.
        candidate: trains on a rank; it is called with the arguments of a layout.
        ranks: number of ranks.
        layouts: keyword arguments of the candidate, such as `[{"tp": 2}, {"pp": 2}]`.
        steps: how many steps to compare; by default all.
        dtype: the default dtype. In float64, requests for float32 become float64 (`InFloat64`), so that a difference is
            a mistake. In others the reference runs twice more with rounding noise, to learn what rounding explains.
        folder: keeps the recordings, in a new folder in it, if something differs; by default they are deleted.
        timeout: seconds that a run may take.

    Raises:
        AssertionError: something differs, or the numbers of steps do; has the report of each layout that differs.
        ValueError: an argument is not positive, there is no layout, or no model is called.
        RuntimeError: a rank fails or a run takes too long; has the traceback of each rank.
        ImportError: cloudpickle is not installed.
    """
    __tracebackhide__ = True  # pytest shows the report, not this code
    if ranks < 1 or (steps is not None and steps < 1) or timeout <= 0 or not layouts:
        raise ValueError(
            f"ranks={ranks}, steps={steps}, timeout={timeout}, layouts={layouts}; pass positive numbers, and at least "
            "one layout"
        )
    with ExitStack() as stack:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="nxd-parity-", dir=folder))
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        job = Job(steps=steps, dtype=dtype, timeout=timeout)
        run_ranks(reference, {}, 1, path / "reference", job)
        spread = []
        if dtype != torch.float64:
            for noise in range(1, SPREAD + 1):
                spread.append(path / f"reference-noise-{noise}")
                run_ranks(reference, {}, 1, spread[-1], job, noise=noise)
        problems = []
        for number, layout in enumerate(layouts):
            of_layout = path / f"candidate-{number}"
            run_ranks(candidate, layout, ranks, of_layout, job)
            report = compare(path / "reference", of_layout, spread=spread)
            has_all = steps_of(Recording(of_layout)) == steps_of(Recording(path / "reference"))
            if not report.agrees or not has_all:
                call = ", ".join(f"{name}={value!r}" for name, value in layout.items())
                problems.append(f"candidate({call}) on {ranks} ranks trains differently\n{report}")
        if problems and folder is not None:
            stack.pop_all()  # of what deletes the recordings
        if problems:
            raise AssertionError("\n\n".join(problems))
