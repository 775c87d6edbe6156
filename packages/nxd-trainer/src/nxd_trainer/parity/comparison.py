"""`compare`: records a layout and one process, and compares them by `nxd_parity`."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from nxd_engine.config import ensure_model_parallel
from nxd_parity import Finding, InFloat64, Report
from nxd_parity import compare as compare_recordings
from nxd_parity.events import GRADIENT, LOSS, PARAMETER
from nxd_parity.recording import Recording
from nxd_state import (
    ParallelDegrees,
    all_gather_object,
    destroy_model_parallel,
    get_device,
    get_group,
    get_mesh,
    get_world_group,
    initialize_model_parallel,
)

from nxd_trainer.parity.case import ParityCase, check_batches, checked_config
from nxd_trainer.parity.layout import LayoutRun
from nxd_trainer.parity.one_process import record_one_process

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
PRECISIONS = (*TOLERANCES, torch.bfloat16)
SPREAD = 4  # runs of one process with rounding noise, where no tolerance is given and it is not float64

T = TypeVar("T")


def compare(
    case: ParityCase,
    *,
    dtype: torch.dtype = torch.float64,
    rtol: float | None = None,
    resume_at: int = 0,
    reference_device: torch.device | str | None = None,
    folder: Path | str | None = None,
) -> Report:
    """Train a few steps in the case's layout and, on rank 0, in one process; compare them tensor by tensor.

    Recorded are the weights before the first step, and of each step outputs of modules and their gradients, the loss,
    gradients before clipping, their norm, optimizer states and weights. Dropout is off. Call it on all ranks, with or
    without a mesh; it destroys the mesh.

    Args:
        case: the case to compare.
        dtype: dtype of weights and inputs. float64 separates errors from rounding; then nothing is computed in float32,
            whatever a model asks for. In float32 and bfloat16 one process trains four times more with rounding noise:
            differences within the spread of these runs are rounding.
        rtol: tolerance, relative to the largest value of a tensor, instead of noise; by default 1e-10 in float64, 1e-5
            or the spread in float32, the spread in bfloat16.
        resume_at: if it is not 0, the ranks train this many steps as replicas, save a checkpoint, and load it at the
            layout. The steps after it are compared with those of one process that was not interrupted.
        reference_device: where the one process computes; by default where the ranks do.
        folder: a new folder, which all ranks share, that keeps both recordings; by default a temporary one.

    Returns:
        The report, the same on every rank.

    Raises:
        ValueError: the case is invalid, or its degrees or batches do not fit the ranks.
        RuntimeError: rank 0 failed in the one-process run, or in the comparison.
    """
    if rtol is not None and not 0 <= rtol < 1:
        raise ValueError(f"rtol={rtol} is out of range; use at least 0 and less than 1")
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype={dtype} cannot be compared in; use one of {', '.join(map(str, PRECISIONS))}")
    if not 0 <= resume_at < max(len(case.batches), 1):
        raise ValueError(
            f"resume_at={resume_at} leaves none of {len(case.batches)} steps to compare; use 0 to "
            f"{len(case.batches) - 1}"
        )
    config = checked_config(case)
    destroy_model_parallel()
    try:
        job = _Job(case, config, dtype, rtol, resume_at)
        return job.run(None if reference_device is None else torch.device(reference_device), folder)
    finally:
        destroy_model_parallel()


@dataclass(frozen=True)
class _Job:
    case: ParityCase
    config: Mapping[str, Any]
    dtype: torch.dtype
    rtol: float | None
    resume_at: int

    @property
    def _noises(self) -> Sequence[int]:
        """The seeds of runs of one process with rounding noise."""
        return range(1, SPREAD + 1) if self.rtol is None and self.dtype != torch.float64 else ()

    def run(self, reference_device: torch.device | None, folder: Path | str | None) -> Report:
        degrees = ParallelDegrees.of_config(self.config)
        ensure_model_parallel(degrees)  # degrees that do not fit raise here, before any work
        check_batches(self.case, get_group("dp").size)
        if self.resume_at:
            check_batches(self.case, get_world_group().size)
        destroy_model_parallel()
        # In this mesh every rank is a whole replica: layers act as ordinary ones, and nothing is communicated.
        initialize_model_parallel()
        is_first = get_world_group().rank == 0
        path = _on_first_rank("making a folder", lambda: Path(folder or tempfile.mkdtemp(prefix="nxd-parity-")))
        try:
            device = get_device() if reference_device is None else reference_device
            _on_first_rank("the one-process run", lambda: self._record_one_process(device, path))
            if self.resume_at:
                self._save_checkpoint(path / "checkpoint")
            destroy_model_parallel()
            ensure_model_parallel(degrees)
            with self._precision():
                run = LayoutRun(self.case, self.config, self.dtype)
                if self.resume_at:
                    run.load(path / "checkpoint")
                notes = run.record(self.case.batches[self.resume_at :], path / "layout")
            all_gather_object(None, get_world_group())  # all ranks have written
            return _on_first_rank("the comparison", lambda: self._report(path, notes))
        finally:
            if folder is None and is_first:
                shutil.rmtree(path, ignore_errors=True)

    def _precision(self) -> AbstractContextManager[object]:
        return InFloat64() if self.dtype == torch.float64 else nullcontext()

    def _record_one_process(self, device: torch.device, path: Path) -> None:
        with self._precision():
            for noise in (None, *self._noises):
                folder = path / ("one-process" if noise is None else f"one-process-noise-{noise}")
                record_one_process(self.case, self.config, self.dtype, device, folder, self.resume_at, noise)

    def _save_checkpoint(self, folder: Path) -> None:
        """Train the first steps as replicas, in the mesh that there is, and save a checkpoint."""
        names = ("input_names", "output_loss_value_spec")
        of_model = {name: value for name, value in (self.config["pipeline_config"] or {}).items() if name in names}
        config = {**self.config, **ParallelDegrees().as_config(), "pipeline_config": of_model or None}
        with self._precision():
            run = LayoutRun(self.case, config, self.dtype)
            run.train(self.case.batches[: self.resume_at])
            run.save(folder)

    def _report(self, path: Path, notes: Sequence[str]) -> Report:
        rtol = TOLERANCES.get(self.dtype) if self.rtol is None else self.rtol
        spread = [path / f"one-process-noise-{noise}" for noise in self._noises]
        report = compare_recordings(path / "one-process", path / "layout", spread=spread, rtol=rtol)
        layout = ParallelDegrees.of_mesh(get_mesh(), sequence_parallel=self.config["sequence_parallel"]).describe()
        bounds = ([] if rtol is None else [f"tolerance {rtol:g}"]) + ["rounding noise"] * bool(spread)
        report.reference = f"one process ({str(self.dtype).removeprefix('torch.')}, {' or '.join(bounds)})"
        report.candidate = layout
        if self.resume_at:
            report.notes.append(
                f"resumed from a checkpoint of {report.ranks} replicas after step {self.resume_at}: step 0 is what was "
                "loaded, step 1 the first after it"
            )
        report.notes += notes
        missing = _missing(path)
        if missing is not None and report.agrees:
            report.findings.append(missing)
        return report


def _missing(path: Path) -> Finding | None:
    """Return the first loss, gradient or parameter of one process that no rank of the layout has."""
    kinds = (PARAMETER, LOSS, GRADIENT)
    reference, layout = Recording(path / "one-process"), Recording(path / "layout")
    found = {(it.step, it.kind, it.name) for of_rank in layout.tensors for it in of_rank}
    for it in reference.tensors[0]:
        if it.kind in kinds and (it.step, it.kind, it.name) not in found:
            return Finding(it.step, it.kind, it.name, detail="no rank has it; names are those of a checkpoint")
    return None


def _on_first_rank(what: str, act: Callable[[], T]) -> T:
    """Call a function on rank 0 while the other ranks wait; all return what it returned, or raise."""
    failure: Exception | None = None
    result: Any = None
    if get_world_group().rank == 0:
        try:
            result = act()
        except Exception as error:  # the other ranks learn of it, and all stop
            failure = error
    cause = None if failure is None else f"{type(failure).__name__}: {failure}"
    told, is_mistake, result = all_gather_object((cause, isinstance(failure, ValueError), result), get_world_group())[0]
    if failure is not None:
        raise failure
    if told is not None:
        raise (ValueError if is_mistake else RuntimeError)(f"{what} failed on rank 0: {told}")
    returned: T = result
    return returned
