"""A small checkpoint of each format that this package reads, and what `nxd-ckpt convert` makes of it."""

import contextlib
import io
import json
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from nxd_ckpt import open_checkpoint, save
from nxd_ckpt.cli import main
from nxd_ckpt.interop import open_hugging_face, write_hugging_face, write_neuronx, write_torch_dcp
from nxd_ckpt.interop.neuronx import Split
from safetensors.torch import save_file

TENSORS = {
    "a.weight": torch.arange(48.0).reshape(8, 6),
    "b.weight": torch.arange(15).reshape(5, 3).to(torch.bfloat16),
    "count": torch.tensor(7),
}
SHARDING = {"a.weight": {"dim": 0}}
KINDS = ("nxd", "hf", "dcp", "neuronx", "neuronx-xser", "neuronx-v1")


def make(kind: str, folder: Path) -> Path:
    """Writes the tensors in a format, and returns the folder that holds nothing else."""
    theirs = folder / kind
    if kind == "nxd":
        save(theirs, "t", TENSORS, extra={"note": b"something"}, objects={"lr": 0.1})
        return theirs
    save_file(TENSORS, folder / "source.safetensors")
    source = open_hugging_face(folder / "source.safetensors")
    if kind == "hf":
        write_hugging_face(source, theirs, max_shard_size=200)
    elif kind == "dcp":
        write_torch_dcp(source, theirs)
    else:
        write_neuronx(
            source,
            theirs,
            None if kind == "neuronx-v1" else "t",
            sharding={name: Split(**rule) for name, rule in SHARDING.items()},
            tensor_parallel_size=2,
            layout="v1" if kind == "neuronx-v1" else "v2",
            xser=kind == "neuronx-xser",
        )
    (folder / "source.safetensors").unlink()
    return theirs


def convert(kind: str, folder: Path, target: Path, seconds: float) -> tuple[int, str]:
    """Exit code and stderr of `nxd-ckpt convert` of all of it to this package's format; a hang is a `Hang`."""
    arguments = ["convert", str(folder), str(target), "--to", "nxd", "--target-tag", "c"]
    arguments += ["--from", kind.partition("-")[0]]
    if kind == "nxd" or (kind.startswith("neuronx") and not kind.endswith("v1")):
        arguments += ["--tag", "t"]
    if kind.startswith("neuronx"):
        rules = target.parent / "rules.json"
        rules.write_text(json.dumps(SHARDING))
        arguments += ["--sharding", str(rules)]
    stderr = io.StringIO()
    with _timer(seconds), contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    return code, stderr.getvalue()


def mistakes_in(kind: str, code: int, stderr: str, target: Path) -> list[str]:
    """What is wrong with the outcome of reading a changed file: neither one line of error, nor the tensors as saved."""
    errors = [line for line in stderr.splitlines() if not line.startswith("nxd-ckpt: ")]  # which are warnings
    if code == 0:
        found = open_checkpoint(target, "c")
        same_names = set(found.tensors) == set(TENSORS)
        same = same_names and all(torch.equal(found.read(name), tensor) for name, tensor in TENSORS.items())
        return [] if same or kind != "nxd" else ["it was read, and is not what was saved"]
    if code != 2 or len(errors) != 1 or not errors[0].startswith("nxd-ckpt convert: "):
        return [f"exit code {code}, and {len(errors)} lines: {stderr[:1000]}"]
    return []


class Hang(BaseException):
    """Raised where something takes too long; nothing catches it."""


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> tuple[object, ...]:
        return Path.mkdir, (self._place,)


def bomb(place: Path) -> bytes:
    """A pickle that makes a folder."""
    return pickle.dumps(Bomb(place))


@contextlib.contextmanager
def _timer(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"it took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
