"""Traces models: workers build the shards and record graphs, each distinct graph is compiled once, the workers load it.

Compiled programs are cached, so each graph is compiled once per machine. A trace with `content` is cached as a whole:
the next trace of the same model only reads its weights.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nxd_state import device_type

from nxd_trace.buckets import BucketModelConfig, save_functions
from nxd_trace.caching import ArtifactCache, TraceContent, program_key, trace_key
from nxd_trace.compilers import Compiler, choose_compiler
from nxd_trace.manifest import ModelManifest, RankManifest, RankProgram, rank_folder
from nxd_trace.model import TemporaryModelFolder, TensorParallelModel
from nxd_trace.programs import Program, Signature, TensorSpec, flatten
from nxd_trace.weights import Weights, WeightSource, as_source
from nxd_trace.workers.building import BuildCall, ProgramReport
from nxd_trace.workers.communication import Build, Compile, Export, Fill
from nxd_trace.workers.group import WorkerGroup
from nxd_trace.workers.pickling import check_not_in_worker, dumps_for_workers


@dataclass(frozen=True)
class TraceSettings:
    """Settings of a trace; the fields are described at `parallel_model_trace`."""

    compiler_workdir: str | Path | None = None
    compiler_args: Sequence[str] | str | None = None
    inline_weights_to_neff: bool = True
    tp_degree: int = 1
    replicas: int = 1
    expert_parallel_size: int = 1
    max_parallel_compilations: int | None = None
    compiler: str | None = None
    weights: Weights | None = None
    cache_dir: str | Path | None = None
    progress: bool = True
    content: TraceContent | None = None

    def __post_init__(self) -> None:
        for name in ("tp_degree", "replicas", "expert_parallel_size", "max_parallel_compilations"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if self.num_ranks % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} does not divide the {self.num_ranks} ranks "
                f"(tp_degree={self.tp_degree}, {self.replicas} replicas); use a divisor of {self.num_ranks}"
            )

    @property
    def num_ranks(self) -> int:
        """Number of worker processes."""
        return self.tp_degree * self.replicas

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the compiler."""
        if isinstance(self.compiler_args, str):
            return tuple(shlex.split(self.compiler_args))
        return tuple(self.compiler_args or ())


def trace_programs(
    func: Callable[..., Any],
    programs: Sequence[Program],
    settings: TraceSettings,
    bucket_config: BucketModelConfig | None = None,
) -> TensorParallelModel:
    """Trace several programs that share weights and state; see `parallel_model_trace`."""
    check_not_in_worker()
    if not callable(func):
        raise TypeError(
            f"func is a {type(func).__name__}; expected a function that builds and returns the model in each worker"
        )
    names = [program.name for program in programs]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"programs are named {names}; pass at least one, each with a different name")
    compiler = choose_compiler(settings.compiler)
    temporary = TemporaryModelFolder()
    try:
        with nullcontext() if settings.weights is None else as_source(settings.weights) as source:
            trace = _Trace(func, programs, compiler, settings, source, bucket_config, Path(temporary.name))
            workers = trace.run()
        return TensorParallelModel(
            Path(temporary.name), bucket_config=bucket_config, workers=workers, temporary=temporary
        )
    except BaseException:
        temporary.cleanup()
        raise


@dataclass
class _Trace:
    """One trace into a folder."""

    func: Callable[..., Any]
    programs: Sequence[Program]
    compiler: Compiler
    settings: TraceSettings
    source: WeightSource | None
    bucket_config: BucketModelConfig | None
    folder: Path

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._cache = ArtifactCache(self.settings.cache_dir)

    def run(self) -> WorkerGroup:
        """Fill the folder, from an equal cached trace or by tracing; returns the workers."""
        content, source = self.settings.content, self.source
        if content is None or source is None or self.bucket_config is not None or self.compiler.holds_tensors:
            call = self._build_call()
            return self._with_workers(lambda: self._make(call))
        key = self._trace_key(content, source)
        signatures = self._cache.copy_trace_to(key, self.settings.num_ranks, self.folder)
        if signatures is not None:
            self._say(f"this model was traced before with {self.compiler.name}: reading its weights")
            workers = self._with_workers(lambda: self._reuse(source, signatures))
            self._say(f"loading {len(signatures)} programs")
            return workers
        if self._cache.has(key):
            self._say(
                "this model was traced before, but its cache entry is damaged or not private to you: tracing again"
            )
        shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)  # as before
        content.check()
        call = self._build_call()

        def make_and_keep() -> None:
            self._make(call)
            self._cache.add_trace(key, self.folder, ModelManifest.read(self.folder).programs, source)

        return self._with_workers(make_and_keep)

    def _build_call(self) -> bytes:
        state = None if self.bucket_config is None else self.bucket_config.shared_state_buffer
        return dumps_for_workers(BuildCall(self.func, self.programs, self.source, state), "func")

    def _with_workers(self, fill: Callable[[], None]) -> WorkerGroup:
        settings = self.settings
        self._workers = WorkerGroup(settings.num_ranks, settings.replicas, settings.expert_parallel_size)
        try:
            fill()
        except BaseException:
            self._workers.close()
            raise
        return self._workers

    def _trace_key(self, content: TraceContent, source: WeightSource) -> str:
        settings = self.settings
        return trace_key(
            source,
            content=content.made_of,
            programs=[_program_content(program) for program in self.programs],
            compiler=[self.compiler.name, self.compiler.version()],
            arguments=settings.arguments,
            inline_weights=settings.inline_weights_to_neff,
            tp_degree=settings.tp_degree,
            replicas=settings.replicas,
            expert_parallel_size=settings.expert_parallel_size,
            device=device_type(),
        )

    def _reuse(self, source: WeightSource, signatures: Sequence[Signature]) -> None:
        """Read the weights of a cached trace."""
        request = Fill(dumps_for_workers(source, "the source of weights"), str(self.folder))
        self._workers.ask_all(request, "reading the weights")
        self._write_manifest(signatures)

    def _make(self, call: bytes) -> None:
        """Build the model, record its programs and compile them."""
        self._say(f"building the model on {self._workers.size} ranks")
        self._workers.ask_all(Build(call, str(self.folder)), "building the model")
        self._say(f"recording {len(self.programs)} programs")
        reports = self._export()
        _check_alike(reports)
        keys = {
            (rank, index): self._key(report)
            for rank, of_rank in enumerate(reports)
            for index, report in enumerate(of_rank)
        }
        self._compile(keys)
        for rank, of_rank in enumerate(reports):
            folder = self.folder / rank_folder(rank)
            stored = [
                RankProgram(f"programs/{keys[rank, index]}", report.weights, report.states, report.state_shapes)
                for index, report in enumerate(of_rank)
            ]
            replace(RankManifest.read(folder), programs=tuple(stored)).write(folder)
        self._write_manifest([report.signature for report in reports[0]])

    def _write_manifest(self, signatures: Sequence[Signature]) -> None:
        buckets = None if self.bucket_config is None else save_functions(self.bucket_config, self.folder)
        ModelManifest(
            tp_degree=self.settings.tp_degree,
            replicas=self.settings.replicas,
            expert_parallel_size=self.settings.expert_parallel_size,
            compiler=self.compiler.name,
            compiler_version=self.compiler.version(),
            inline_weights=self.settings.inline_weights_to_neff,
            programs=tuple(signatures),
            buckets=buckets,
        ).write(self.folder)

    def _export(self) -> list[list[ProgramReport]]:
        request = Export(self.compiler.name, self.settings.arguments, self.settings.inline_weights_to_neff)
        reports: dict[int, list[ProgramReport]] = {}
        for ranks in self._turns(range(self._workers.size)):
            reports |= self._workers.ask(dict.fromkeys(ranks, request), "recording the programs")
        return [reports[rank] for rank in range(self._workers.size)]

    def _key(self, report: ProgramReport) -> str:
        return program_key(
            graph=report.digest,
            compiler=[self.compiler.name, self.compiler.version()],
            arguments=self.settings.arguments,
            inline_weights=self.settings.inline_weights_to_neff,
            own=report.own,
        )

    def _compile(self, keys: Mapping[tuple[int, int], str]) -> None:
        """Compile each distinct program once, spread over the ranks that have it."""
        missing = [
            key for key in dict.fromkeys(keys.values()) if not self._cache.copy_to(key, self.folder / "programs" / key)
        ]
        makers = {key: [place for place, of_place in keys.items() if of_place == key] for key in missing}
        distinct = len(set(keys.values()))
        kept = f"; {distinct - len(missing)} were compiled before" if distinct > len(missing) else ""
        self._say(f"compiling {len(missing)} of {distinct} distinct programs with {self.compiler.name}{kept}")
        done = 0
        while makers:
            turn: dict[int, tuple[int, str]] = {}  # program and key by rank
            for key, places in list(makers.items()):
                free = [(rank, index) for rank, index in places if rank not in turn]
                if free and len(turn) < self._at_once:
                    rank, index = free[0]
                    turn[rank] = (index, key)
                    del makers[key]
            self._compile_turn(turn)
            done += len(turn)
            self._say(f"compiled {done} of {len(missing)}")

    def _compile_turn(self, turn: Mapping[int, tuple[int, str]]) -> None:
        with TemporaryDirectory(prefix="nxd_trace_compile_") as scratch:
            folders = {rank: Path(scratch) / f"rank_{rank}" for rank in turn}
            requests = {}
            for rank, (index, _) in turn.items():
                folders[rank].mkdir()
                workdir = Path(self.settings.compiler_workdir or scratch) / f"program_{index}_tp_rank_{rank:02d}"
                requests[rank] = Compile(index, str(folders[rank]), os.path.abspath(workdir))
            self._workers.ask(requests, "compiling")
            for rank, (_, key) in turn.items():
                self._cache.add(key, folders[rank])
                shutil.copytree(folders[rank], self.folder / "programs" / key)

    @property
    def _at_once(self) -> int:
        return self.settings.max_parallel_compilations or self._workers.size

    def _turns(self, ranks: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(ranks), self._at_once):
            yield ranks[start : start + self._at_once]

    def _say(self, what: str) -> None:
        if self.settings.progress:
            print(f"[nxd-trace] {time.monotonic() - self._start:5.1f} s: {what}", file=sys.stderr, flush=True)


def _program_content(program: Program) -> dict[str, Any]:
    """Return a program's contribution to the key of a trace."""
    inputs, structure = flatten([*program.call], f"the inputs of program {program.name!r}")
    specs = [str(TensorSpec.of(tensor)) for tensor in inputs]
    return {"name": program.name, "inputs": specs, "structure": structure, "func_kwargs": dict(program.func_kwargs)}


def _check_alike(reports: Sequence[Sequence[ProgramReport]]) -> None:
    """Check that every rank has the same inputs, because all ranks read them from shared memory."""
    for rank, of_rank in enumerate(reports):
        for mine, first in zip(of_rank, reports[0], strict=True):
            if mine.signature != first.signature:
                raise ValueError(
                    f"program {first.signature.name!r} has different signatures on rank {rank} and rank 0: "
                    f"{mine.signature} and {first.signature}; func must build the same model on every rank"
                )
