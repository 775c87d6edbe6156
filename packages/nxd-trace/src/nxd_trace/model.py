"""`TensorParallelModel`: a traced model, called like a function, that computes in one worker process per rank."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Self

from torch import Tensor, nn

from nxd_trace.buckets import BucketKernel, BucketModelConfig, choose_bucket, load_kernel
from nxd_trace.compilers import choose_compiler
from nxd_trace.errors import WorkerError
from nxd_trace.exporting import RANK_WEIGHTS
from nxd_trace.manifest import MANIFEST, WEIGHTS, ModelManifest, RankManifest, rank_folder
from nxd_trace.programs import Signature, TensorSpec, flatten
from nxd_trace.weights import Weights, WeightSource, as_source, check_fit, find_misfits, open_safetensors, tied_names
from nxd_trace.workers.communication import ReadState, ReplaceWeights, ResetState, Serve, SharedTensors, WriteState
from nxd_trace.workers.group import WorkerGroup
from nxd_trace.workers.pickling import check_not_in_worker, dumps_for_workers


class TensorParallelModel(nn.Module):
    """A traced model whose shards are in worker processes.

    It has one or several programs, which share weights and state. `model(...)` selects one by bucket or by the shapes
    of the inputs, `model.run("decode", ...)` by name. State, such as a key-value cache, stays in the workers between
    calls.

    Calls run one after the other, even from several threads. A call returns the outputs of rank 0, on the CPU. `close`,
    or leaving a `with` block, ends the processes; they also end when the model is garbage-collected or this process
    ends, for whatever reason.

    `parallel_model_trace`, `ModelBuilder` and `parallel_model_load` create it.

    Args:
        folder: folder of the model, whose manifest has been checked.
        bucket_config: bucket configuration of the trace.
        workers: running workers; None starts new ones.
        temporary: the folder, if it is to be removed with the model.

    Attributes:
        tp_degree: number of ranks per replica.
        num_ranks: number of worker processes.
        programs: signatures of the programs, by name.
        folder: folder of the programs and weights.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bucket_config: BucketModelConfig | None = None,
        workers: WorkerGroup | None = None,
        temporary: TemporaryDirectory[str] | None = None,
    ) -> None:
        super().__init__()
        manifest = ModelManifest.read(folder)
        self._manifest = manifest
        self._compiler = choose_compiler(manifest.compiler)
        self._bucket_config = bucket_config
        self.folder = folder
        self.tp_degree = manifest.tp_degree
        self.num_ranks = manifest.num_ranks
        self.programs: Mapping[str, Signature] = {program.name: program for program in manifest.programs}
        self._indices = {program.name: index for index, program in enumerate(manifest.programs)}
        self._kernel: BucketKernel | None = None
        if manifest.buckets is not None:
            self._kernel = load_kernel(manifest.buckets, folder, bucket_config, manifest.programs)
        self._lock = threading.RLock()
        self._temporary = temporary
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._workers: WorkerGroup | None = None
        self._start(workers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program that matches these inputs, or the program of their bucket.

        Args:
            *args: inputs, nested as in the trace.
            **kwargs: keyword inputs, nested as in the trace.

        Returns:
            The model's output on rank 0; with buckets, for the padded inputs.

        Raises:
            ValueError: the inputs match no program, or are longer than the largest bucket.
            WorkerError: a worker raised or died, or the model is closed.
        """
        if self._kernel is not None:
            inputs, _ = flatten([args, kwargs], "inputs")
            bucket, padded = choose_bucket(self._kernel, self._manifest.programs, inputs)
            return self._call(bucket, padded)
        index = self._fitting_program(args, kwargs)
        return self._call(index, self._manifest.programs[index].flat_inputs(args, kwargs))

    def run(self, program: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program of this name.

        Raises:
            ValueError: there is no such program, or the inputs do not match it.
            WorkerError: a worker raised or died, or the model is closed.
        """
        if program not in self._indices:
            raise ValueError(f"there is no program {program!r}; this model has {', '.join(self._indices)}")
        return self._call(self._indices[program], self.programs[program].flat_inputs(args, kwargs))

    def reset_state(self) -> None:
        """Reset the state to its initial values.

        Raises:
            WorkerError: a worker died, or the model is closed.
        """
        self._check_apart("state")
        with self._lock:
            self._running_workers().ask_all(ResetState(), "resetting the state")

    def read_state(self, name: str, rank: int = 0) -> Tensor:
        """Return a copy of one rank's shard of a state tensor.

        Raises:
            WorkerError: there is no such state, a worker died, or the model is closed.
        """
        self._check_apart("state")
        with self._lock:
            state: Tensor = self._running_workers().ask({rank: ReadState(name)}, "reading state")[rank]
            return state

    def write_state(self, name: str, value: Tensor, rank: int = 0) -> None:
        """Overwrite one rank's shard of a state tensor.

        Raises:
            ValueError: the rank has no such state, or the value has another shape or dtype.
            WorkerError: a worker died, or the model is closed.
        """
        self._check_apart("state")
        with self._lock:
            ranks = range(self.num_ranks)
            found = RankManifest.read(self.folder / rank_folder(rank)).states.get(name) if rank in ranks else None
            if found is None:
                raise ValueError(f"rank {rank} has no state {name!r}; `read_weights` returns weights")
            if not (spec := TensorSpec(found.shape, found.dtype)).fits(value):
                raise ValueError(
                    f"{name} is {spec} on rank {rank}, but the new value is {TensorSpec.of(value)}; pass one of the "
                    "same shape and dtype"
                )
            self._running_workers().ask({rank: WriteState(name, value.detach().cpu())}, "writing state")

    def read_weights(self, rank: int = 0) -> dict[str, Tensor]:
        """Return a copy of one rank's weights, by their names in its shard of the model.

        Raises:
            ValueError: there is no such rank.
            ModelFolderError: the model's folder has changed or is gone.
        """
        if rank not in range(self.num_ranks):
            raise ValueError(f"rank={rank} is outside the model's {self.num_ranks} ranks")
        with self._lock, open_safetensors(self.folder / rank_folder(rank) / WEIGHTS) as stored:
            names = set(stored.keys()) - RANK_WEIGHTS.keys()  # not the model's
            return {name: stored.get_tensor(name).clone() for name in sorted(names)}

    def replace_weights(self, weights: Weights) -> None:
        """Replace the weights without compiling; each rank reads only its shard.

        Args:
            weights: logical tensors, with the names and shapes of the unsharded model: a safetensors file or a folder
                of them, a dict of tensors, or an open checkpoint (`nxd_ckpt.open_checkpoint(...)`). Missing buffers and
                the state keep their values. Floating-point numbers are converted to the model's dtype; integers must
                have that dtype. Only a checkpoint may hold more than the model, such as an optimizer's state; a dict
                may have tied weights under each of their names.

        Raises:
            ValueError: the weights are inlined in the programs, or the new ones do not match; the message lists every
                mismatch, and the model keeps its weights.
            WorkerError: a worker raised, died or was stopped.
        """
        self.check_replaceable()
        with self._lock, as_source(weights) as source:
            workers = self._running_workers()
            self._check_fit(weights, source)
            temporary = TemporaryModelFolder()
            folder = Path(temporary.name)
            copy_model(self.folder, folder, without=WEIGHTS)
            request = ReplaceWeights(dumps_for_workers(source, "the source of weights"), str(folder))
            workers.ask_all(request, "replacing the weights")
            self._manifest = self._manifest.write(folder)
            self.folder = folder
            if self._temporary is not None:
                self._temporary.cleanup()
            self._temporary = temporary
            self._watch(workers)

    def check_replaceable(self) -> None:
        """Raise ValueError if the weights are part of the programs, so that `replace_weights` cannot work."""
        if self._manifest.inline_weights:
            raise ValueError(
                "this model was traced with inline_weights_to_neff=True, so its weights belong to its programs; trace "
                "it with inline_weights_to_neff=False to replace them"
            )
        self._check_apart("weights")

    def restart(self) -> None:
        """End the remaining workers and start new ones; the state is reset.

        Raises:
            ModelFolderError: the model's folder has changed or is gone.
        """
        with self._lock:
            self._end()
            self._manifest.check(self.folder)
            self._start(None)

    def check_workers(self) -> None:
        """Check whether the workers can answer, without a call.

        Raises:
            WorkerError: a worker has ended or is stopped, or the model is closed.
        """
        with self._lock:
            workers = self._running_workers()
            if not workers.can_answer:
                workers.ask_all(ResetState(), "checking the workers")  # raises, unless the worker continued meanwhile

    def close(self) -> None:
        """End the worker processes. Calls then raise; `restart` starts new ones."""
        with self._lock:
            self._end()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank; empty while they are not running."""
        workers = self._workers
        return workers.pids if workers is not None and workers.is_open else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def extra_repr(self) -> str:
        """Return the degree, compiler and programs."""
        return f"tp_degree={self.tp_degree}, compiler={self._manifest.compiler!r}, programs={list(self.programs)}"

    def _check_apart(self, what: str) -> None:
        if self._compiler.holds_tensors:
            raise ValueError(
                f"programs of compiler {self._compiler.name!r} hold their {what} on the device, where they cannot be "
                "accessed; restart() resets the state, and another trace can use other weights"
            )

    def _check_fit(self, weights: Weights, source: WeightSource) -> None:
        ranks = [RankManifest.read(self.folder / rank_folder(rank)) for rank in range(self.num_ranks)]
        misfits = [misfit for rank in ranks for misfit in find_misfits(rank.weights, source)]
        if isinstance(weights, str | Path | Mapping):
            known = {
                logical
                for rank in ranks
                for name, it in rank.weights.items()
                for logical in it.spec(name).logical_shapes
            }
            known |= {name for rank in ranks for name in rank.states}
            others = source.tensors.keys() - known
            if isinstance(weights, Mapping):
                others -= tied_names(weights, known)
            misfits += [f"{name} is not in the model" for name in sorted(others)]
        check_fit(misfits)

    def _fitting_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the index of the program that was traced with these inputs, or of the only program."""
        programs = self._manifest.programs
        if len(programs) == 1:
            return 0
        inputs, structure = flatten([args, kwargs], "inputs")
        for index, program in enumerate(programs):
            if structure == program.input_structure and all(map(TensorSpec.fits, program.inputs, inputs)):
                return index
        listed = "; ".join(f"{program.name}: {', '.join(map(str, program.inputs))}" for program in programs)
        raise ValueError(f"no program was traced with these inputs; there are {listed}")

    def _call(self, index: int, inputs: list[Tensor]) -> Any:
        signature = self._manifest.programs[index]
        with self._lock:
            workers = self._running_workers()
            for shared, tensor in zip(self._shared.inputs[index], inputs, strict=True):
                shared.copy_(tensor)
            workers.call(index)
            outputs = [tensor.clone() for tensor in self._shared.outputs[index]]
        return signature.nested_outputs(outputs)

    def _running_workers(self) -> WorkerGroup:
        if not self._compiler.runs:
            raise ValueError(
                f"programs of compiler {self._compiler.name!r} are for inspection and do not run; they are in "
                f"{self.folder}"
            )
        if self._workers is None or not self._workers.is_open:
            raise WorkerError(
                "the worker processes of this model have ended, because it was closed or one of them failed; "
                "call restart() to start new ones"
            )
        return self._workers

    def _start(self, workers: WorkerGroup | None) -> None:
        check_not_in_worker()
        if not self._compiler.runs:
            if workers is not None:
                workers.close()
            return
        workers = workers or WorkerGroup(self.num_ranks, self._manifest.replicas, self._manifest.expert_parallel_size)
        try:
            self._shared = SharedTensors(workers.memory, self._manifest.programs)
            config = self._bucket_config
            preprocessor = None if config is None else config.shared_state_buffer_preprocessor
            pickled = dumps_for_workers(preprocessor, "shared_state_buffer_preprocessor")
            workers.ask_all(Serve(str(self.folder), pickled), "loading the model")
        except BaseException:
            workers.close()
            raise
        self._workers = workers
        self._watch(workers)

    def _watch(self, workers: WorkerGroup) -> None:
        """End the processes and remove the folder when this model is garbage-collected or Python exits."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _release, workers, self._temporary)

    def _end(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def copy_model(source: Path, target: Path, *, without: str = "") -> None:
    """Copy a model's files except the manifest and files of this name."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.name not in (without, MANIFEST):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _release(workers: WorkerGroup, temporary: TemporaryDirectory[str] | None) -> None:
    workers.close()
    if temporary is not None:
        temporary.cleanup()


_PREFIX = "nxd_trace_model_"


_SECONDS_TO_LOCK = 60.0  # a newer folder may not be locked yet


class TemporaryModelFolder(TemporaryDirectory[str]):
    """The folder of an unsaved model, removed with this object.

    A process that is killed cannot remove its folder. So it holds a lock on it, which ends with the process, and the
    next model removes folders that are not locked.
    """

    def __init__(self) -> None:
        _remove_left_over()
        super().__init__(prefix=_PREFIX)
        descriptor = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        with suppress(OSError):  # if the file system has no locks, no other process can lock it either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        """Remove the folder now."""
        self._unlock()
        super().cleanup()


def _remove_left_over() -> None:
    for folder in Path(gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, another user's, or already removed
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not is_own or time.time() - status.st_mtime < _SECONDS_TO_LOCK:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
