"""A traced model as a folder: its files, and checks that it can be loaded here.

    manifest.json           what the model is, and every other file with its size; written last
    programs/<key>/         a compiled program, for all ranks whose graphs are equal
    tp_rank_00/rank.json    this rank's weights, state and programs
    tp_rank_00/weights.safetensors
    tp_rank_00/state.safetensors      only state that does not begin as zeros
    bucket_kernel.pt, ...   scripted functions of a bucket configuration

Nothing in it is a Python pickle.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Self

import torch
from nxd_state import device_type

from nxd_trace.compilers import COMPILERS, choose_compiler
from nxd_trace.errors import ModelFolderError
from nxd_trace.signature import Signature
from nxd_trace.weights import Weight

FORMAT = 1
MANIFEST, RANK_MANIFEST = "manifest.json", "rank.json"
WEIGHTS, STATE = "weights.safetensors", "state.safetensors"

_HASHED_BYTES = 64 * 2**20  # files up to this long are also checked by their hash


def torch_version() -> str:
    """Version of torch, without the part that names the build."""
    return torch.__version__.partition("+")[0]


def system_name() -> str:
    """Such as "Linux x86_64"."""
    return f"{platform.system()} {platform.machine()}"


@dataclass(frozen=True)
class StateTensor:
    """One state tensor of a rank: its shape and dtype, and whether it begins as zeros."""

    shape: tuple[int, ...]
    dtype: str
    zeros: bool


@dataclass(frozen=True)
class RankProgram:
    """One program of a rank.

    Attributes:
        folder: of the compiled program, below the model's.
        weights: the names of what it takes first.
        states: the names of what it takes next.
        state_shapes: their shapes in the program.
    """

    folder: str
    weights: tuple[str, ...]
    states: tuple[str, ...]
    state_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankManifest:
    """The contents of one rank."""

    weights: Mapping[str, Weight]
    states: Mapping[str, StateTensor]
    programs: tuple[RankProgram, ...]

    def write(self, folder: Path) -> None:
        """Into a rank's folder."""
        value = {
            "weights": {name: weight.to_json() for name, weight in self.weights.items()},
            "states": {name: asdict(state) for name, state in self.states.items()},
            "programs": [asdict(program) for program in self.programs],
        }
        (folder / RANK_MANIFEST).write_text(json.dumps(value, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From a rank's folder, whose files have been checked."""
        value = json.loads((folder / RANK_MANIFEST).read_text(encoding="utf-8"))
        states = {
            name: StateTensor(tuple(state["shape"]), state["dtype"], state["zeros"])
            for name, state in value["states"].items()
        }
        programs = tuple(
            RankProgram(
                program["folder"],
                tuple(program["weights"]),
                tuple(program["states"]),
                tuple(tuple(shape) for shape in program["state_shapes"]),
            )
            for program in value["programs"]
        )
        return cls({name: Weight.from_json(weight) for name, weight in value["weights"].items()}, states, programs)


@dataclass(frozen=True)
class StoredFile:
    """Size of a file, and its SHA-256 unless it is long."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a traced model, for all ranks.

    Attributes:
        tp_degree: number of ranks.
        compiler: name of the compiler of the programs.
        compiler_version: that it had.
        inline_weights: whether the weights belong to the programs, so that they cannot be replaced.
        programs: their signatures.
        buckets: how a bucket is chosen; None without bucket configuration.
        device: type of the device, "cpu", "cuda" or "xla".
        torch: version of torch.
        system: operating system and processor architecture.
        files: every other file of the folder, by its path in it.
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

    def write(self, folder: Path) -> Self:
        """Write the manifest, which lists the files of the folder; returns it with these files."""
        (folder / MANIFEST).unlink(missing_ok=True)
        files = {str(path.relative_to(folder)): _stored_file(path) for path in _files(folder)}
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
        """The manifest of a folder, whose other files are not looked at.

        Raises:
            ModelFolderError: there is none, it is damaged, or of a later format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise ModelFolderError(
                f"{folder} holds no traced model ({MANIFEST} is missing); give a folder that parallel_model_save wrote"
            )
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            stored_format = int(value.pop("format"))
            if stored_format != FORMAT:
                raise ModelFolderError(
                    f"{folder} has format {stored_format}, this nxd-trace reads {FORMAT}; install the one that wrote it"
                )
            value["programs"] = tuple(Signature.from_json(program) for program in value["programs"])
            value["files"] = {name: StoredFile(**file) for name, file in value["files"].items()}
            manifest = cls(**value)
            manifest._check_values()
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ModelFolderError):
                raise
            raise ModelFolderError(f"{path} is damaged ({error}); copy it again, or save the model again") from error

    def check(self, folder: Path) -> None:
        """Check that the folder is whole and that its programs run here.

        Raises:
            ModelFolderError: naming all that is wrong.
        """
        problems = [*self._problems_of_platform(), *self._problems_of_files(folder)]
        if not problems:
            problems = [*self._problems_of_ranks(folder)]
        if problems:
            raise ModelFolderError(f"the model in {folder} cannot be loaded:\n  " + "\n  ".join(problems))

    def _check_values(self) -> None:
        if type(self.tp_degree) is not int or self.tp_degree < 1:
            raise ValueError(f"tp_degree is {self.tp_degree!r}")
        if self.compiler not in COMPILERS:
            raise ValueError(f"compiler is {self.compiler!r}, none of {', '.join(COMPILERS)}")
        if not self.programs:
            raise ValueError("it has no programs")
        outside = [name for name in self.files if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
        if outside:
            raise ValueError(f"{outside[0]!r} is outside the folder")
        ranks = {name.partition("/")[0] for name in self.files if name.startswith("tp_rank_")}
        needed = {f"{rank_folder(rank)}/{name}" for rank in range(self.tp_degree) for name in (RANK_MANIFEST, WEIGHTS)}
        if len(ranks) != self.tp_degree or not needed <= self.files.keys():
            raise ValueError(f"tp_degree is {self.tp_degree}, and there are files of {len(ranks)} ranks")

    def _problems_of_ranks(self, folder: Path) -> Iterator[str]:
        """Files that are intact, but do not belong together."""
        for rank in range(self.tp_degree):
            name = rank_folder(rank)
            try:
                programs = RankManifest.read(folder / name).programs
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                yield f"{name}/{RANK_MANIFEST} is damaged ({error}): save the model again"
                continue
            known = {str(PurePath(file).parent) for file in self.files}
            if len(programs) != len(self.programs) or any(program.folder not in known for program in programs):
                yield f"{name}/{RANK_MANIFEST} names other programs than {MANIFEST}: save the model again"

    def _problems_of_platform(self) -> Iterator[str]:
        for what, stored, here in (
            ("torch", self.torch, torch_version()),
            ("system", self.system, system_name()),
            ("device", self.device, device_type()),
            (f"compiler {self.compiler}", self.compiler_version, choose_compiler(self.compiler).version()),
        ):
            if stored != here:
                yield f"it was compiled for {what} {stored}, this is {here}: trace it again here, or load it there"

    def _problems_of_files(self, folder: Path) -> Iterator[str]:
        for rank in range(self.tp_degree):
            if not (folder / rank_folder(rank)).is_dir():
                yield f"{rank_folder(rank)} is missing: the model has {self.tp_degree} shards, copy all of them"
        for name, file in self.files.items():
            path = folder / name
            if not path.is_file():
                yield f"{name} is missing: copy the whole folder again"
            elif path.stat().st_size != file.size:
                yield f"{name} has {path.stat().st_size} bytes of {file.size}: copy it again"
            elif file.sha256 and sha256_of(path) != file.sha256:
                yield f"{name} has been changed since it was saved: copy it again"


def rank_folder(rank: int) -> str:
    """Name of a rank's folder."""
    return f"tp_rank_{rank:02d}"


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _stored_file(path: Path) -> StoredFile:
    size = path.stat().st_size
    return StoredFile(size, sha256_of(path) if size <= _HASHED_BYTES else "")
