"""The worker process: receives requests and answers them; it traces a rank's model, then runs it."""

import errno
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nxd_state import get_device, get_world_group, initialize_model_parallel, is_cpu, model_parallel_is_initialized
from torch import Tensor

from nxd_trace.buckets import StatePreprocessor, load_preprocessor
from nxd_trace.compilers import Run, choose_compiler
from nxd_trace.errors import MissingMainGuardError
from nxd_trace.manifest import STATE, WEIGHTS, ModelManifest, RankManifest, RankProgram, rank_folder
from nxd_trace.weights import open_safetensors, read_weights, save_safetensors
from nxd_trace.workers import communication as messages
from nxd_trace.workers.building import RankTracer, fill_weights
from nxd_trace.workers.communication import Answer, SharedTensors
from nxd_trace.workers.pickling import loads_in_worker

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def main(settings: Mapping[str, Any]) -> None:
    """Run a worker until its parent closes the connection.

    Args:
        settings: descriptors of the connection, the shared memory, the ranks' store and the file for stacks; location
            of the main script; number of replicas, and of ranks that split the experts.
    """
    faulthandler.enable(os.fdopen(settings["stacks"], "wb", buffering=0))
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    try:
        _Worker(socket.socket(fileno=settings["connection"]), settings).run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # gloo's threads must not outlive the objects that they use, and nothing else is left to do


def _end_with_parent() -> None:
    """Standard input closes when the parent dies, even while this process waits in a collective or for a compiler."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)  # including the compiler


class _Worker:
    def __init__(self, connection: socket.socket, settings: Mapping[str, Any]) -> None:
        self._connection = connection
        self._memory: int = settings["memory"]
        self._store: int = settings["store"]
        self._main_script: dict[str, str] = settings["main"]
        self._replicas: int = settings["replicas"]
        self._expert_parallel_size: int = settings["expert_parallel_size"]
        self._tracer: RankTracer | None = None
        self._model: RankModel | None = None

    def run(self) -> None:
        while True:
            try:
                kind, program, request = messages.receive(self._connection)
            except (EOFError, ConnectionError):
                return
            try:
                if kind == messages.CALL:
                    assert self._model is not None
                    self._model.call(program)
                    messages.send_header(self._connection, messages.DONE)
                else:
                    messages.send_object(self._connection, Answer(self._handle(request)))
            except ConnectionError:
                return
            except BaseException as error:
                messages.send_object(self._connection, _failure(error))

    def _handle(self, request: Any) -> Any:
        if not model_parallel_is_initialized():
            over_replicas = self._replicas % self._expert_parallel_size == 0
            initialize_model_parallel(
                tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]) // self._replicas,
                expert_model_parallel_size=self._expert_parallel_size,
                expert_tensor_parallel_size=None if over_replicas else 1,
                store=dist.FileStore(f"/dev/fd/{self._store}"),
            )
        match request:
            case messages.Build():
                self._tracer = RankTracer(request, self._main_script)
            case messages.Fill():
                fill_weights(request, self._main_script)
            case messages.Serve():
                self._tracer = None  # frees the model before its weights are loaded
                make_preprocessor = loads_in_worker(request.preprocessor, self._main_script)
                preprocessor = None if make_preprocessor is None else make_preprocessor()
                self._model = RankModel(request.folder, self._memory, preprocessor)
            case messages.Export():
                assert self._tracer is not None
                return self._tracer.export(request)
            case messages.Compile():
                assert self._tracer is not None
                self._tracer.compile(request)
            case _:
                assert self._model is not None
                return self._model.handle(request)
        return None


def _failure(error: BaseException) -> Answer:
    """Return the error as text, because the parent may not know the exception's class."""
    if isinstance(error, MissingMainGuardError):
        return Answer(error=str(error), lacks_main_guard=True)
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return Answer(error=str(error), storage_error=error)
    return Answer(error=f"{type(error).__name__}: {error}", traceback="".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class _LoadedProgram:
    run: Run
    tensors: list[Tensor]  # weights, then states
    inputs: list[Tensor]  # in shared memory
    outputs: list[Tensor]  # in shared memory; empty except on rank 0


class RankModel:
    """One rank's shard of a loaded model."""

    @torch.inference_mode()
    def __init__(self, folder: str, memory: int, preprocessor: StatePreprocessor | None) -> None:
        messages.keep_freed_memory()
        self._folder = Path(folder)
        self._rank = get_world_group().rank
        self._device = get_device()
        manifest = ModelManifest.read(self._folder)
        self._manifest = RankManifest.read(self._folder / rank_folder(self._rank))
        self._weights = self._read_weights()
        self._initial_states = self._read_states()
        self._states = {
            name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self._initial_states.items()
        }
        self._programs = self._load_programs(manifest, SharedTensors(memory, manifest.programs), preprocessor)

    @torch.inference_mode()
    def call(self, program: int) -> None:
        """Run a program on the inputs in shared memory; rank 0 stores the outputs there."""
        loaded = self._programs[program]
        inputs = loaded.inputs
        if not is_cpu(self._device):
            inputs = [tensor.to(self._device) for tensor in inputs]
        outputs = loaded.run([*loaded.tensors, *inputs])
        for shared, output in zip(loaded.outputs, outputs, strict=self._rank == 0):
            shared.copy_(output)

    @torch.inference_mode()
    def handle(self, request: Any) -> Tensor | None:
        """Handle a request about weights or state; returns the state that it reads, if any."""
        match request:
            case messages.ReplaceWeights(source=source, folder=folder):
                read_weights(self._manifest.weights, loads_in_worker(source, {}), lambda name: self._weights[name])
                target = Path(folder) / rank_folder(self._rank) / WEIGHTS
                target.unlink(missing_ok=True)  # it may be a link to another model's file
                save_safetensors({name: tensor.cpu().contiguous() for name, tensor in self._weights.items()}, target)
            case messages.ResetState():
                for name, tensor in self._states.items():
                    tensor.copy_(self._initial_states[name])
            case messages.ReadState(name=name):
                return self._states[name].cpu().clone()
            case messages.WriteState(name=name, value=value):
                self._states[name].copy_(value)
            case _:
                raise TypeError(f"unknown request {request}")
        return None

    def _read_weights(self) -> dict[str, Tensor]:
        with open_safetensors(self._folder / rank_folder(self._rank) / WEIGHTS) as stored:
            # Cloned, because a memory-mapped file is read again whenever memory is short.
            return {name: stored.get_tensor(name).clone().to(self._device) for name in self._manifest.weights}

    def _read_states(self) -> dict[str, Tensor]:
        """Return the initial states; zeros take no memory until the state is copied from them."""
        states = {}
        for name, state in self._manifest.states.items():
            if state.zeros:
                zero = torch.zeros((), dtype=getattr(torch, state.dtype), device=self._device)
                states[name] = zero.expand(state.shape)
            else:
                with open_safetensors(self._folder / rank_folder(self._rank) / STATE) as stored:
                    states[name] = stored.get_tensor(name).clone().to(self._device)
        return states

    def _load_programs(
        self, manifest: ModelManifest, shared: SharedTensors, preprocessor: StatePreprocessor | None
    ) -> list[_LoadedProgram]:
        compiler = choose_compiler(manifest.compiler)
        if preprocessor is None and manifest.buckets is not None:
            preprocessor = load_preprocessor(manifest.buckets, self._folder)
        runs: dict[str, Run] = {}
        programs = []
        for index, program in enumerate(self._manifest.programs):
            if program.folder not in runs:
                runs[program.folder] = compiler.load(self._folder / program.folder, self._device)
            weights = [self._weights[name] for name in program.weights]
            states = self._states_of(program, index, preprocessor)
            programs.append(
                _LoadedProgram(
                    run=runs[program.folder],
                    tensors=[] if compiler.holds_tensors else [*weights, *states],
                    inputs=shared.inputs[index],
                    outputs=shared.outputs[index] if self._rank == 0 else [],
                )
            )
        return programs

    def _states_of(self, program: RankProgram, index: int, preprocessor: StatePreprocessor | None) -> list[Tensor]:
        """Return a program's states, or the views of them that the preprocessor returns for this bucket."""
        states = [self._states[name] for name in program.states]
        if preprocessor is None:
            return states
        views = preprocessor([list(shape) for shape in program.state_shapes], states, torch.tensor(index))
        shapes = [tuple(view.shape) for view in views]
        if shapes != list(program.state_shapes):
            raise ValueError(
                f"shared_state_buffer_preprocessor returned state of shapes {shapes} for bucket {index}, but "
                f"its model has shapes {list(program.state_shapes)}"
            )
        return list(views)
