"""Traces one rank's model in a worker: builds the shard, writes its weights, records and compiles its programs.

For a cached trace, only the weights are written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nxd_state import (
    active_group,
    get_device,
    get_world_group,
    move_model_to_device,
)
from torch import Tensor, nn

from nxd_trace.compilers import CompileJob, choose_compiler
from nxd_trace.exporting import RANK_AXES, Alias, ExportedModel, export_model, named_tensors, rank_tensors, read_aliases
from nxd_trace.manifest import KEPT, STATE, WEIGHTS, RankManifest, StateSpec, rank_folder, sha256_of
from nxd_trace.programs import Program, Signature, TensorSpec, dtype_name, flatten, unflatten
from nxd_trace.weights import WeightSource, copy_for_file, open_safetensors, read_weights, save_safetensors, weight_of
from nxd_trace.workers.communication import Build, Compile, Export, Fill
from nxd_trace.workers.pickling import loads_in_worker


@dataclass(frozen=True)
class BuildCall:
    """The arguments of a trace, as workers need them."""

    func: Callable[..., Any]
    programs: Sequence[Program]
    source: WeightSource | None  # None if `func` fills the model
    shared_state: Sequence[Tensor] | None  # initial state, if it is not the models' own


@dataclass(frozen=True)
class ProgramReport:
    """A rank's report of a recorded program, for assigning compilations to ranks.

    Attributes:
        signature: signature of the program.
        digest: digest of its graph.
        weights: names of its weights, its first inputs.
        states: names of its states, its next inputs.
        state_shapes: shapes of its states.
        own: digest of this rank's weights, if the compiled program contains them.
    """

    signature: Signature
    digest: str
    weights: tuple[str, ...]
    states: tuple[str, ...]
    state_shapes: tuple[tuple[int, ...], ...]
    own: str


@dataclass(frozen=True)
class _Built:
    model: nn.Module
    aliases: list[Alias]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec.of(tensor) for name, tensor in named_tensors(self.model)}


class RankTracer:
    """Traces one rank's model."""

    def __init__(self, request: Build, main_script: Mapping[str, str]) -> None:
        call: BuildCall = loads_in_worker(request.call, main_script)
        self._programs = call.programs
        self._folder = Path(request.folder) / rank_folder(get_world_group().rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._built = _build_models(call.func, self._programs, states_may_differ=call.shared_state is not None)
        for built in {id(built): built for built in self._built}.values():
            _materialize(built, call.source)
        self._write_tensors(call.shared_state)
        self._exported: list[ExportedModel] = []
        self._settings: Export | None = None

    def export(self, request: Export) -> list[ProgramReport]:
        """Record every program."""
        self._settings = request
        own = ""
        if choose_compiler(request.compiler).holds_tensors:
            own = f"{self._folder.name} {sha256_of(self._folder / WEIGHTS)}"
        reports = []
        for program, built in zip(self._programs, self._built, strict=True):
            args, kwargs = program.call
            found = export_model(built.model, built.aliases, program.name, _on_device(args), _on_device(kwargs))
            _check_groups(found)
            self._exported.append(found)
            reports.append(
                ProgramReport(found.signature, found.digest, found.weights, found.states, found.state_shapes, own)
            )
        return reports

    def compile(self, request: Compile) -> None:
        """Compile one program into a folder."""
        assert self._settings is not None
        exported = self._exported[request.program]
        Path(request.workdir).mkdir(parents=True, exist_ok=True)
        choose_compiler(self._settings.compiler).compile(
            CompileJob(
                exported=exported.exported,
                tensors=exported.tensors,
                num_weights=len(exported.weights),
                num_states=len(exported.states),
                folder=Path(request.folder),
                workdir=Path(request.workdir),
                arguments=self._settings.arguments,
                inline_weights=self._settings.inline_weights,
            )
        )

    def _write_tensors(self, shared_state: Sequence[Tensor] | None) -> None:
        """Write the weights and state of the first program's model, which the others share."""
        built = self._built[0]
        tensors = {**dict(named_tensors(built.model)), **rank_tensors()}
        states = {alias.name: tensors.pop(alias.name) for alias in built.aliases}
        if shared_state is not None:
            states = dict(zip(states, shared_state, strict=True))
        zeros = {name for name, state in states.items() if not bool(state.count_nonzero())}
        save_safetensors({name: copy_for_file(tensor) for name, tensor in tensors.items()}, self._folder / WEIGHTS)
        nonzero = {name: copy_for_file(state) for name, state in states.items() if name not in zeros}
        if nonzero:
            save_safetensors(nonzero, self._folder / STATE)
        parameters = dict(built.model.named_parameters())
        RankManifest(
            weights={name: weight_of(name, tensor, name in parameters) for name, tensor in tensors.items()},
            states={
                name: StateSpec(tuple(state.shape), dtype_name(state), name in zeros) for name, state in states.items()
            },
            programs=(),
        ).write(self._folder)


def fill_weights(request: Fill, main_script: Mapping[str, str]) -> None:
    """Write the weights of a cached trace: those of the source, and the kept buffers that the source lacks."""
    folder = Path(request.folder) / rank_folder(get_world_group().rank)
    with open_safetensors(folder / KEPT) as stored:
        tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118 - no mapping
    missing = {name: it for name, it in RankManifest.read(folder).weights.items() if name not in tensors}
    tensors |= {name: torch.empty(it.shape, dtype=getattr(torch, it.dtype)) for name, it in missing.items()}
    read_weights(missing, loads_in_worker(request.source, main_script), tensors.__getitem__)
    save_safetensors(tensors, folder / WEIGHTS)
    (folder / KEPT).unlink()


def _build_models(func: Callable[..., Any], programs: Sequence[Program], *, states_may_differ: bool) -> list[_Built]:
    """Return a model per program; the same one for programs with equal arguments for `func`."""
    made: list[tuple[dict[str, Any], _Built]] = []
    built = []
    for program in programs:
        func_kwargs = dict(program.func_kwargs)
        found = next((model for arguments, model in made if arguments == func_kwargs), None)
        if found is None:
            found = _read_result(func(**func_kwargs))
            made.append((func_kwargs, found))
        built.append(found)
    _check_shared(built, programs, states_may_differ=states_may_differ)
    return built


def _read_result(result: Any) -> _Built:
    model, aliases = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"func returned a {type(model).__name__}; expected a torch.nn.Module, or a tuple of one and its aliases"
        )
    model.eval()
    return _Built(model, read_aliases(model, aliases))


def _check_shared(built: Sequence[_Built], programs: Sequence[Program], *, states_may_differ: bool) -> None:
    first = built[0]
    states = {alias.name for alias in first.aliases} if states_may_differ else set()
    for other, program in zip(built[1:], programs[1:], strict=True):
        if {alias.name for alias in other.aliases} != {alias.name for alias in first.aliases}:
            raise ValueError(
                f"the model of program {program.name!r} has different state from {programs[0].name!r}; programs "
                "share their state, so alias the same names in each"
            )
        different = sorted(
            name
            for name in (first.specs.keys() | other.specs.keys()) - states
            if first.specs.get(name) != other.specs.get(name)
        )
        if different:
            name = different[0]
            raise ValueError(
                f"programs share their weights, but {name!r} is {other.specs.get(name)} in {program.name!r} and "
                f"{first.specs.get(name)} in {programs[0].name!r} ({len(different)} tensors differ); compute values "
                "that depend on the program in forward"
            )


@torch.no_grad()
def _materialize(built: _Built, source: WeightSource | None) -> None:
    """Move the model to the device, and fill it from the source of weights, if any, which may lack the state."""
    model = built.model
    on_meta = {name for name, tensor in named_tensors(model) if tensor.is_meta}
    if on_meta and source is None:
        raise ValueError(
            f"{sorted(on_meta)[0]!r} ({len(on_meta)} tensors in all) is on the meta device and has no values; pass "
            "parallel_model_trace weights=, or fill the model in func"
        )
    move_model_to_device(model, get_device())
    if source is None:
        return
    tensors = dict(named_tensors(model))
    needed = on_meta | dict(model.named_parameters()).keys() - {alias.name for alias in built.aliases}
    weights = {name: weight_of(name, tensor, name in needed) for name, tensor in tensors.items()}
    read_weights(weights, source, lambda name: tensors[name].detach())


def _check_groups(exported: ExportedModel) -> None:
    """Check the process groups of a program: a loaded program finds them by name, and workers have only these."""
    own = {active_group(axis).name for axis in RANK_AXES}
    others = exported.groups - own
    if others:
        raise ValueError(
            f"program {exported.signature.name!r} communicates over the process groups {sorted(others)}; only "
            f"collectives over the tensor-parallel group, the replicas and the expert-parallel group ({sorted(own)}) "
            "can be traced"
        )


def _on_device(value: Any) -> Any:
    tensors, structure = flatten(value, "inputs")
    return unflatten(structure, [tensor.to(get_device()) for tensor in tensors])
