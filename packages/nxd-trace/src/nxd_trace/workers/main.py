"""The program of a worker process: receive a request, execute it, answer; end when the connection is closed."""

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
from nxd_state import get_device, get_world_group, initialize_model_parallel, is_host, model_parallel_is_initialized
from torch import Tensor

from nxd_trace.buckets import StatePreprocessor, load_preprocessor
from nxd_trace.compilers import Run, choose_compiler
from nxd_trace.errors import MissingMainGuardError
from nxd_trace.manifest import STATE, WEIGHTS, Manifest, RankManifest, RankProgram, rank_folder
from nxd_trace.weights import open_safetensors, read_weights, save_safetensors
from nxd_trace.workers.building import Builder, fill_weights
from nxd_trace.workers.communication import (
    CALL,
    DONE,
    Answer,
    Build,
    Compile,
    Export,
    Fill,
    ReadState,
    ReplaceWeights,
    ResetState,
    Serve,
    SharedTensors,
    WriteState,
    keep_freed_memory,
    receive,
    send_header,
    send_object,
)
from nxd_trace.workers.pickling import loads_in_worker


@dataclass(frozen=True)
class _LoadedProgram:
    run: Run
    tensors: list[Tensor]  # weights, then states
    inputs: list[Tensor]  # in shared memory
    outputs: list[Tensor]  # in shared memory; empty where another rank writes them


class Server:
    """One rank's part of a loaded model.

    Args:
        folder: folder of the model, which has been checked.
        memory: descriptor of the memory that inputs and outputs are in.
        preprocessor: preprocessor of the state, if it is not saved with the model.
    """

    @torch.inference_mode()
    def __init__(self, folder: str, memory: int, preprocessor: StatePreprocessor | None) -> None:
        keep_freed_memory()
        self._folder = Path(folder)
        self._rank = get_world_group().rank
        self._device = get_device()
        manifest = Manifest.read(self._folder)
        self._manifest = RankManifest.read(self._folder / rank_folder(self._rank))
        self._weights = self._read_weights()
        self._first_states = self._read_states()
        self._states = {
            name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self._first_states.items()
        }
        self._programs = self._load_programs(manifest, SharedTensors(memory, manifest.programs), preprocessor)

    @torch.inference_mode()
    def call(self, program: int) -> None:
        """Run a program on the inputs in shared memory; rank 0 leaves the outputs there."""
        loaded = self._programs[program]
        inputs = loaded.inputs
        if not is_host(self._device):
            inputs = [tensor.to(self._device) for tensor in inputs]
        outputs = loaded.run([*loaded.tensors, *inputs])
        for shared, output in zip(loaded.outputs, outputs, strict=self._rank == 0):
            shared.copy_(output)

    @torch.inference_mode()
    def replace_weights(self, source: bytes, folder: str) -> None:
        """Read new weights, and write them into the rank's folder of another copy of the model."""
        read_weights(self._manifest.weights, loads_in_worker(source, {}), lambda name: self._weights[name])
        target = Path(folder) / rank_folder(self._rank) / WEIGHTS
        target.unlink(missing_ok=True)  # it may be a link to another model's file
        save_safetensors({name: tensor.cpu().contiguous() for name, tensor in self._weights.items()}, target)

    @torch.inference_mode()
    def reset_state(self) -> None:
        """Back to the state before the first call."""
        for name, tensor in self._states.items():
            tensor.copy_(self._first_states[name])

    def read_state(self, name: str) -> Tensor:
        """A copy of one state tensor."""
        return self._states[name].cpu().clone()

    @torch.inference_mode()
    def write_state(self, name: str, value: Tensor) -> None:
        """Put other values into one state tensor."""
        self._states[name].copy_(value)

    def _read_weights(self) -> dict[str, Tensor]:
        with open_safetensors(self._folder / rank_folder(self._rank) / WEIGHTS) as stored:
            # Read into memory of their own: a mapped file would be read again whenever memory is short.
            return {name: stored.get_tensor(name).clone().to(self._device) for name in self._manifest.weights}

    def _read_states(self) -> dict[str, Tensor]:
        """As they begin; zeros take no memory until the state is copied from them."""
        file = self._folder / rank_folder(self._rank) / STATE
        states = {}
        for name, state in self._manifest.states.items():
            if state.zeros:
                zero = torch.zeros((), dtype=getattr(torch, state.dtype), device=self._device)
                states[name] = zero.expand(state.shape)
            else:
                with open_safetensors(file) as stored:
                    states[name] = stored.get_tensor(name).clone().to(self._device)
        return states

    def _load_programs(
        self, manifest: Manifest, shared: SharedTensors, preprocessor: StatePreprocessor | None
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
        """The state that a program works on, or the views of it that the preprocessor makes for this bucket."""
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


_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def main(settings: Mapping[str, Any]) -> None:
    """The life of a worker.

    Args:
        settings: descriptors of connection, shared memory, the store that the ranks meet in and the file for stacks,
            where the main script is, and how many replicas of the model and parts of its experts the ranks are.
    """
    faulthandler.enable(os.fdopen(settings["stacks"], "wb", buffering=0))
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    connection = socket.socket(fileno=settings["connection"])
    worker = _Worker(connection, settings)
    try:
        worker.run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # gloo's threads must not outlive what they refer to, and nothing else is left to do


def _end_with_parent() -> None:
    """Standard input closes when the parent dies, also while this process waits in a collective or for a compiler."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)  # with the compiler


class _Worker:
    """First builds a model's shard, then serves it; or only serves."""

    def __init__(self, connection: socket.socket, settings: Mapping[str, Any]) -> None:
        self._connection = connection
        self._memory: int = settings["memory"]
        self._store: int = settings["store"]
        self._main_script: dict[str, str] = settings["main"]
        self._replicas: int = settings["replicas"]
        self._expert_parallel_size: int = settings["expert_parallel_size"]
        self._builder: Builder | None = None
        self._server: Server | None = None

    def run(self) -> None:
        """Until the parent closes the connection."""
        while True:
            try:
                kind, program, request = receive(self._connection)
            except (EOFError, ConnectionError):
                return
            try:
                if kind == CALL:
                    assert self._server is not None
                    self._server.call(program)
                    send_header(self._connection, DONE)
                else:
                    send_object(self._connection, Answer(self._handle(request)))
            except ConnectionError:
                return
            except BaseException as error:
                send_object(self._connection, _failure(error))

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
            case Build():
                self._builder = Builder(request, self._main_script)
            case Fill():
                fill_weights(request, self._main_script)
            case Serve():
                self._builder = None  # frees the model before its weights are loaded
                make_preprocessor = loads_in_worker(request.preprocessor, self._main_script)
                preprocessor = None if make_preprocessor is None else make_preprocessor()
                self._server = Server(request.folder, self._memory, preprocessor)
            case Export() | Compile():
                return self._build(request)
            case _:
                return self._serve(request)
        return None

    def _build(self, request: Export | Compile) -> Any:
        assert self._builder is not None
        return self._builder.export(request) if isinstance(request, Export) else self._builder.compile(request)

    def _serve(self, request: Any) -> Any:
        assert self._server is not None
        match request:
            case ReplaceWeights():
                return self._server.replace_weights(request.source, request.folder)
            case ResetState():
                return self._server.reset_state()
            case ReadState():
                return self._server.read_state(request.name)
            case WriteState():
                return self._server.write_state(request.name, request.value)
        raise TypeError(f"unknown request {request}")


def _failure(error: BaseException) -> Answer:
    """As text: the parent may not know the exception's class."""
    if isinstance(error, MissingMainGuardError):
        return Answer(error=str(error), lacks_main_guard=True)
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return Answer(error=str(error), storage_error=error)
    return Answer(error=f"{type(error).__name__}: {error}", traceback="".join(traceback.format_exception(error)))
