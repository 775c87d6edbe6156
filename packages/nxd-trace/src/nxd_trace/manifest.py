"""The folder of a traced model: its manifests, and the checks that it can be loaded.

    manifest.json           the model, and every other file with its size and hash; written last
    programs/<key>/         a compiled program, for all ranks whose graphs are equal
    tp_rank_00/rank.json    the rank's weights, state and programs
    tp_rank_00/weights.safetensors
    tp_rank_00/state.safetensors      only state that does not start as zeros
    bucket_kernel.pt, ...   scripted functions of a bucket configuration

It contains no Python pickle. Files may come from a stranger, so everything that is read here is checked.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Self

import torch
from nxd_state import device_type

from nxd_trace.compilers import COMPILERS, choose_compiler
from nxd_trace.errors import ModelFolderError
from nxd_trace.programs import Signature, TensorSpec, shape_from_json
from nxd_trace.weights import Weight, stored_tensors

FORMAT = 3  # since the generation cache has heads first
MANIFEST, RANK_MANIFEST = "manifest.json", "rank.json"
WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
KEPT = "kept.safetensors"  # in a cached trace: buffers that the source of weights lacks

_BUCKET_FUNCTIONS = ("built-in", "python", "scripted")

# Errors from reading an invalid manifest.
_NOT_AS_WRITTEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def torch_version() -> str:
    """Return torch's version without the build suffix."""
    return torch.__version__.partition("+")[0]


def system_name() -> str:
    """Return the operating system and architecture, such as "Linux x86_64"."""
    return f"{platform.system()} {platform.machine()}"


@dataclass(frozen=True)
class StateSpec:
    """Shape and dtype of one state tensor of a rank, and whether it starts as zeros."""

    shape: tuple[int, ...]
    dtype: str
    zeros: bool


@dataclass(frozen=True)
class RankProgram:
    """One program of a rank."""

    folder: str  # of the compiled program, relative to the model's
    weights: tuple[str, ...]  # the first inputs, by name
    states: tuple[str, ...]  # the next inputs, by name
    state_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankManifest:
    """Describes one rank's weights, state and programs."""

    weights: Mapping[str, Weight]
    states: Mapping[str, StateSpec]
    programs: tuple[RankProgram, ...]

    def write(self, folder: Path) -> None:
        """Write the manifest to a rank's folder."""
        value = {
            "weights": {name: weight.to_json() for name, weight in self.weights.items()},
            "states": {name: asdict(state) for name, state in self.states.items()},
            "programs": [asdict(program) for program in self.programs],
        }
        (folder / RANK_MANIFEST).write_text(json.dumps(value, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a rank's folder."""
        path = folder / RANK_MANIFEST
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            states = {}
            for name, state in value["states"].items():
                spec = TensorSpec.from_json(state)
                states[name] = StateSpec(spec.shape, spec.dtype, bool(state["zeros"]))
            programs = tuple(
                RankProgram(
                    str(program["folder"]),
                    tuple(map(str, program["weights"])),
                    tuple(map(str, program["states"])),
                    tuple(map(shape_from_json, program["state_shapes"])),
                )
                for program in value["programs"]
            )
            return cls({name: Weight.from_json(weight) for name, weight in value["weights"].items()}, states, programs)
        except _NOT_AS_WRITTEN as error:
            raise ModelFolderError(f"{path} is damaged ({error}); save the model again") from error

    def problems(self, folder: Path) -> Iterator[str]:
        """Find mismatches between the programs' inputs and the tensors in the rank's folder."""
        for program in self.programs:
            if unknown := {*program.weights} - self.weights.keys() | {*program.states} - self.states.keys():
                yield f"{RANK_MANIFEST} has a program that takes {min(unknown)!r}, but no such tensor"
            if len(program.state_shapes) != len(program.states):
                yield f"{RANK_MANIFEST} has {len(program.state_shapes)} shapes for {len(program.states)} states"
        kept = {name: state for name, state in self.states.items() if not state.zeros}
        for file, expected in ((WEIGHTS, self.weights), (STATE, kept)):
            stored = stored_tensors(folder / file) if file == WEIGHTS or kept else {}
            for name, tensor in expected.items():
                found = stored.get(name)
                if found is None:
                    yield f"{file} lacks {name!r}"
                elif (found.global_shape, found.dtype) != (tensor.shape, getattr(torch, tensor.dtype)):
                    yield f"{file} and {RANK_MANIFEST} disagree about the shape or dtype of {name!r}"


@dataclass(frozen=True)
class StoredFile:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class ModelManifest:
    """Describes a traced model.

    Attributes:
        tp_degree: number of ranks per replica.
        compiler: name of the programs' compiler.
        compiler_version: version of the compiler.
        inline_weights: whether the weights belong to the programs, so that they cannot be replaced.
        programs: signatures of the programs.
        buckets: kinds of the bucket functions; None without a bucket configuration.
        device: type of the device, such as "cpu".
        torch: version of torch.
        system: operating system and processor architecture.
        files: every other file of the folder, by relative path.
        replicas: number of replicas.
        expert_parallel_size: number of ranks that split the experts.
    """

    tp_degree: int
    compiler: str
    compiler_version: str
    inline_weights: bool
    programs: tuple[Signature, ...]
    buckets: Mapping[str, Any] | None
    device: str = field(default_factory=device_type)
    torch: str = field(default_factory=torch_version)
    system: str = field(default_factory=system_name)
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    replicas: int = 1
    expert_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of worker processes."""
        return self.tp_degree * self.replicas

    def write(self, folder: Path) -> Self:
        """Write the manifest with the folder's files; returns the manifest with these files."""
        (folder / MANIFEST).unlink(missing_ok=True)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {
            str(path.relative_to(folder)): StoredFile(path.stat().st_size, sha256)
            for path, sha256 in zip(paths, _hashes_of(paths), strict=True)
        }
        value = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "programs": [program.to_json() for program in self.programs],
            "files": {name: asdict(file) for name, file in files.items()},
        }
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
        partial.rename(folder / MANIFEST)
        return replace(self, files=files)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a folder, without checking the other files."""
        path = folder / MANIFEST
        if not path.is_file():
            raise ModelFolderError(
                f"{folder} holds no traced model ({MANIFEST} is missing); pass a folder that parallel_model_save wrote"
            )
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            stored_format = int(value.pop("format"))
            if stored_format != FORMAT:
                raise ModelFolderError(
                    f"{folder} has format {stored_format}; this nxd-trace reads {FORMAT}; trace the model again, or "
                    "install the nxd-trace that wrote it"
                )
            value["programs"] = tuple(Signature.from_json(program) for program in value["programs"])
            value["files"] = {name: StoredFile(**file) for name, file in value["files"].items()}
            manifest = cls(**value)
            manifest._check_values()
            return manifest
        except ModelFolderError:
            raise
        except _NOT_AS_WRITTEN as error:
            raise ModelFolderError(f"{path} is damaged ({error}); copy it again, or save the model again") from error

    def check(self, folder: Path) -> None:
        """Check that the folder is complete, and that its programs run on this machine.

        Raises:
            ModelFolderError: there are problems; the message lists all of them.
        """
        problems = [*self._problems_of_platform(), *self._problems_of_files(folder)]
        if not problems:
            problems = [*self._problems_of_ranks(folder)]
        if problems:
            listed = problems[0] if len(problems) == 1 else "\n  ".join(["", *problems])
            raise ModelFolderError(f"the model in {folder} cannot be loaded: {listed}")

    def check_is_data(self, folder: Path) -> None:
        """Check that loading the model runs no code from the folder.

        Raises:
            ModelFolderError: the programs or the bucket functions are code.
        """
        what = ""
        if COMPILERS[self.compiler].is_code:
            what = f"the programs, of compiler {self.compiler!r},"
        elif self.buckets is not None and "scripted" in self.buckets.values():
            what = "the scripted bucket functions"
        if what:
            raise ModelFolderError(
                f"{what} in {folder} are code, which trust_code=False refuses to run; omit it if you trust the "
                "model's author, or trace the model with compiler='export' and without scripted functions"
            )

    def _check_values(self) -> None:
        for name in ("tp_degree", "replicas", "expert_parallel_size"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} is {number!r}")
        if self.num_ranks % self.expert_parallel_size:
            raise ValueError(f"expert_parallel_size {self.expert_parallel_size} does not divide {self.num_ranks} ranks")
        if self.compiler not in COMPILERS:
            raise ValueError(f"compiler is {self.compiler!r}, not one of {', '.join(COMPILERS)}")
        if not self.programs:
            raise ValueError("there are no programs")
        if len({program.name for program in self.programs}) < len(self.programs):
            raise ValueError("two programs have the same name")
        match self.buckets:
            case None:
                pass
            case {"kernel": kernel, "preprocessor": preprocessor} if len(self.buckets) == 2:
                if not {kernel, preprocessor} <= {*_BUCKET_FUNCTIONS}:
                    raise ValueError(f"buckets are {self.buckets!r}; expected one of {', '.join(_BUCKET_FUNCTIONS)}")
            case _:
                raise ValueError(f"buckets are {self.buckets!r}; expected a kernel and a preprocessor")
        for text in (self.compiler_version, self.device, self.torch, self.system, *self.files):
            if not isinstance(text, str) or not text.isprintable():
                raise ValueError(f"{text!r} is not a valid file name, version or system name")
        self._check_names_of_files()

    def _check_names_of_files(self) -> None:
        outside = [name for name in self.files if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
        if outside:
            raise ValueError(f"{outside[0]!r} is outside the folder")
        ranks = {name.partition("/")[0] for name in self.files if name.startswith("tp_rank_")}
        if len(ranks) != self.num_ranks or not all(
            f"{rank_folder(rank)}/{name}" in self.files
            for rank in range(self.num_ranks)
            for name in (RANK_MANIFEST, WEIGHTS)
        ):
            raise ValueError(
                f"tp_degree is {self.tp_degree}, replicas is {self.replicas}, but there are files of {len(ranks)} ranks"
            )

    def _problems_of_ranks(self, folder: Path) -> Iterator[str]:
        """Find inconsistent or invalid contents of intact files."""
        known = {str(PurePath(file).parent) for file in self.files}
        checked: set[tuple[str, int]] = set()
        for rank in range(self.num_ranks):
            name = rank_folder(rank)
            try:
                manifest = RankManifest.read(folder / name)
                problems = [*manifest.problems(folder / name)]
            except ModelFolderError as error:
                yield str(error)
                continue
            programs = manifest.programs
            if len(programs) != len(self.programs) or any(program.folder not in known for program in programs):
                problems.append(f"{RANK_MANIFEST} and {MANIFEST} name different programs")
            if problems:
                yield from (f"{name}/{problem}: save the model again" for problem in problems)
                continue
            for program, signature in zip(programs, self.programs, strict=True):
                num_inputs = len(program.weights) + len(program.states) + len(signature.inputs)
                if (program.folder, num_inputs) not in checked:
                    checked.add((program.folder, num_inputs))
                    yield from self._problems_of_program(folder, program.folder, num_inputs)

    def _problems_of_program(self, folder: Path, program: str, num_inputs: int) -> Iterator[str]:
        check = COMPILERS[self.compiler].check
        if check is not None:
            try:
                check(folder / program, num_inputs)
            except ValueError as error:
                yield f"{program} is not a program of compiler {self.compiler!r} ({error}): trace the model again"

    def _problems_of_platform(self) -> Iterator[str]:
        for what, stored, here in (
            ("torch", self.torch, torch_version()),
            ("system", self.system, system_name()),
            ("device", self.device, device_type()),
            (f"compiler {self.compiler}", self.compiler_version, choose_compiler(self.compiler).version()),
        ):
            if stored != here:
                yield f"it was compiled for {what} {stored}, but this is {here}: trace it again here, or load it there"

    def _problems_of_files(self, folder: Path) -> Iterator[str]:
        for rank in range(self.num_ranks):
            if not (folder / rank_folder(rank)).is_dir():
                yield f"{rank_folder(rank)} is missing: the model has {self.num_ranks} ranks; copy all of them"
        whole = []
        for name, file in self.files.items():
            path = folder / name
            if not path.is_file():
                yield f"{name} is missing: copy the whole folder again"
            elif path.stat().st_size != file.size:
                yield f"{name} has {path.stat().st_size} bytes of {file.size}: copy it again"
            else:
                whole.append(name)
        for name, sha256 in zip(whole, _hashes_of([folder / name for name in whole]), strict=True):
            if sha256 != self.files[name].sha256:
                yield f"{name} has been changed since it was saved: copy it again"


def rank_folder(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"tp_rank_{rank:02d}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes_of(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, in parallel: hashing takes a second per gigabyte and core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(sha256_of, paths))
