"""`nxd-parity run`: records two programs as they are, each started by its command, for a comparison."""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nxd_parity import events
from nxd_parity.order import partings
from nxd_parity.program import UNRECORDED
from nxd_parity.record import description
from nxd_parity.recording import Recording
from nxd_parity.writer import DESCRIPTION

INJECTED = Path(__file__).with_name("injected")
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_END = 40.0  # torchrun gives its workers 30
LINES_SHOWN = 25
MADE_EQUAL = (
    "the seeds of random, numpy and torch are 0 at the start of each process, and sets have one order; seeds that a "
    "program sets itself, and its data, are its own"
)
NOT_REPEATABLE = (
    "the reference gets other inputs each time it runs, though its seeds are equal; make its data repeatable, or the "
    "comparison means nothing"
)

ONE_PROCESS = (
    "the candidate ran as a single rank, too: its launcher may need other options to start several; on CPUs, "
    "accelerate launch needs ACCELERATE_USE_CPU=true and --multi_gpu instead of --cpu"
)


@dataclass(frozen=True)
class Recorded:
    """Recordings to compare.

    Attributes:
        reference: the reference's folder.
        candidate: the candidate's folder.
        spread: folders of the reference with noise.
        notes: what a reader should know of how they were made.
    """

    reference: Path
    candidate: Path
    spread: list[Path]
    notes: list[str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `nxd-parity run` that say what to record."""
    parser.add_argument("--reference", required=True, metavar="COMMAND", help="the program in one process")
    parser.add_argument("--candidate", required=True, metavar="COMMAND", help="the program as it is distributed")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("nxd-parity-run"),
        metavar="FOLDER",
        help="the recordings and what the programs print; those of an earlier run are replaced (%(default)s)",
    )
    parser.add_argument("--steps", type=_positive, default=3, metavar="N", help="steps to record (%(default)s)")
    parser.add_argument(
        "--noise",
        type=_count,
        metavar="N",
        help="run the reference N more times with rounding noise, to learn how large rounding becomes (2; 0 with "
        "--float64)",
    )
    parser.add_argument(
        "--float64",
        action="store_true",
        help="compute in float64 in both, also where a program asks for float32: differences are then mistakes",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="end a program that takes longer (%(default).0f)",
    )


def record_both(options: argparse.Namespace) -> Recorded:
    """Run and record both programs, and the reference with noise.

    Raises:
        ValueError: a command cannot be started, fails, takes too long, or calls no model.
        FileExistsError: the folder has something other than recordings.
    """
    folder: Path = options.folder
    _remove_recordings(folder)
    folder.mkdir(parents=True, exist_ok=True)
    noises = range(1, 1 + ((0 if options.float64 else 2) if options.noise is None else options.noise))
    spread = [folder / f"reference-noise-{noise}" for noise in noises]
    runs: list[tuple[Path, str, int | None]] = [
        (folder / "reference", options.reference, None),
        (folder / "candidate", options.candidate, None),
        *((path, options.reference, noise) for path, noise in zip(spread, noises, strict=True)),
    ]
    for path, command, noise in runs:
        of_noise = "" if noise is None else f" with rounding noise {noise} of {len(spread)}"
        print(f"{path.name.partition('-')[0]}{of_noise}: {command}", file=sys.stderr, flush=True)
        settings = {"folder": str(path.absolute()), "steps": options.steps, "noise": noise, "float64": options.float64}
        _record(command, path, settings, options.timeout)
    notes = [MADE_EQUAL, *(note for path, _, _ in runs[:2] for note in _unrecorded(path))]
    if Recording(runs[1][0]).world_size == 1:
        notes.append(ONE_PROCESS)
    if any(_first_inputs(it) != _first_inputs(runs[0][0]) for it in spread):
        notes.append(NOT_REPEATABLE)
        spread = []  # its spread would be that of the data
    return Recorded(runs[0][0], runs[1][0], spread, notes)


def _record(command: str, folder: Path, settings: Mapping[str, object], timeout: float) -> None:
    """Run a command until it ends, or until all of its ranks have recorded their steps."""
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        process = _start(command, settings, output.fileno())
    try:
        is_recorded = _wait(process, folder, time.monotonic() + timeout)
    except TimeoutError:
        raise ValueError(
            f"{command!r} took longer than --timeout {timeout:g} seconds{_where_ranks_part(folder)}; its last lines "
            f"({log}):\n{_last_lines(log)}"
        ) from None
    finally:
        _end(process)
    if not is_recorded and process.returncode != 0:
        raise ValueError(
            f"{command!r} failed with exit code {process.returncode}{_where_ranks_part(folder)}; its last lines "
            f"({log}):\n{_last_lines(log)}"
        )
    if not list(folder.glob("rank-*")):
        raise ValueError(
            f"{command!r} called no torch module with parameters in a Python process that reads PYTHONPATH; its last "
            f"lines ({log}):\n{_last_lines(log)}"
        )


def _start(command: str, settings: Mapping[str, object], output: int) -> subprocess.Popen[bytes]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{command!r} cannot be split into words: {error}") from None
    variables = {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):  # as in a shell
        name, _, variables[name] = words.pop(0).partition("=")
    if not words:
        raise ValueError(f"{command!r} is not a command")
    environment = os.environ | variables
    path = environment.get("PYTHONPATH")
    environment |= {
        "NXD_PARITY_RUN": json.dumps(settings),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": f"{INJECTED}{os.pathsep}{path}" if path else str(INJECTED),
    }
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(
            f"cannot start {words[0]!r}: {error.strerror}; for a shell's syntax, pass bash -c '...'"
        ) from None


def _wait(process: subprocess.Popen[bytes], folder: Path, end: float) -> bool:
    """Wait until the program ends (False), or all of its ranks have recorded their steps (True)."""
    while time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_BETWEEN_LOOKS)
            return False
        if _is_recorded(folder):
            return True
    raise TimeoutError


def _is_recorded(folder: Path) -> bool:
    parts = sorted(folder.glob("rank-*"))
    if not all((part / DESCRIPTION).is_file() for part in parts):
        return False
    facts = [description(folder, int(part.name.removeprefix("rank-"))) for part in parts]
    return bool(facts) and all(it["is_complete"] and it["world_size"] == len(facts) for it in facts)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program, if it runs on, and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(log: Path) -> str:
    """Return the end of what a program printed, without the summary that torchrun appends."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    summary = next((number for number, line in enumerate(lines) if "failed (exitcode: " in line), None)
    own = lines[:summary] or lines
    return "\n".join(f"    {line}" for line in own[-LINES_SHOWN:])


def _where_ranks_part(folder: Path) -> str:
    """Say where ranks of a program that did not end call different collectives."""
    try:
        recording = Recording(folder)
        return "".join(f"; {it}" for it in islice(partings(recording.collectives, recording.ends), 1))
    except (ValueError, OSError):  # ranks that have not begun
        return ""


def _unrecorded(folder: Path) -> Iterator[str]:
    processes = len(list(folder.glob(f"{UNRECORDED}*")))
    if processes:
        yield (
            f"{processes} more processes of the {folder.name} called a model as a rank that was recorded already; only "
            "the first was"
        )


def _first_inputs(folder: Path) -> list[str]:
    """Return digests of what a model is given in its first call: later inputs may be outputs, which noise changes."""
    first = [it for it in Recording(folder).tensors[0] if (it.step, it.model_call) == (1, 0)]
    return [it.digest for it in first if (it.kind, it.name) == (events.INPUT, "")]


def _remove_recordings(folder: Path) -> None:
    """Remove the recordings of an earlier run.

    Raises:
        FileExistsError: there is something else of their names.
    """
    for path in (folder / "reference", folder / "candidate", *folder.glob("reference-noise-*")):
        if not path.is_dir():
            continue
        others = [it for it in path.iterdir() if not it.name.startswith(("rank-", UNRECORDED))]
        if others:
            raise FileExistsError(f"{others[0]} is not part of a recording; pass another --folder")
        shutil.rmtree(path)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
