"""The second half of a worker's life: this rank's weights, state and programs, and the calls."""

from dataclasses import dataclass
from pathlib import Path

import torch
from nxd_state import get_device, get_world_group, is_host
from torch import Tensor

from nxd_trace.buckets import StatePreprocessor, load_preprocessor
from nxd_trace.compilers import Run, choose_compiler
from nxd_trace.manifest import STATE, WEIGHTS, Manifest, RankManifest, RankProgram, rank_folder
from nxd_trace.memory import SharedTensors, keep_freed_memory
from nxd_trace.weights import open_safetensors, read_weights, save_safetensors
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
