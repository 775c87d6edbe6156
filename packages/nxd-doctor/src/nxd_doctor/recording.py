"""Records the graphs that a script passes to a device's compiler, in a process on torch-xla's CPU client.

torch-xla decides at its first graph whether to dump graphs, so every program gets its own process.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nxd_state import ParallelDegrees
from nxd_state.device import has_torch_xla

from nxd_doctor.graphs import CapturedGraph, read_graphs

_SHOWN_OUTPUT = 2000  # characters shown from the end of a failed process's output
_LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RecordedRank:
    """The graphs of one process.

    Attributes:
        rank: the rank that the process played.
        steps: the graphs of each step; for a script, whose steps are unknown, a list per graph.
        has_steps: whether the steps are known.
    """

    rank: int
    steps: list[list[CapturedGraph]]
    has_steps: bool = True


@dataclass(frozen=True)
class RecordedSteps:
    """The steps of a training run, as recorded on some of its ranks.

    Attributes:
        title: name of the recording and its layout.
        ranks: the first and the last rank, or the only one.
        world_size: number of ranks in the job.
        degrees: the layout; None if it is unknown.
    """

    title: str
    ranks: list[RecordedRank]
    world_size: int
    degrees: ParallelDegrees | None = None


def record_script(command: Sequence[str]) -> RecordedRank:
    """Record all graphs that a script runs as one process.

    Raises:
        ValueError: torch-xla is not installed, the script fails, or it runs no graph; the message has its output.
    """
    require_torch_xla()
    with tempfile.TemporaryDirectory(prefix="nxd-doctor-") as name:
        dump = Path(name) / "graphs.hlo"
        debug = dict.fromkeys(("XLA_IR_DEBUG", "XLA_HLO_DEBUG"), "1")
        writing = {"XLA_SAVE_TENSORS_FILE": str(dump), "XLA_SAVE_TENSORS_FMT": "hlo"}
        output = run_on_cpu([sys.executable, *command], debug | writing, command[0])
        graphs = [graph for file in sorted(dump.parent.iterdir()) for graph in read_graphs(file.read_text())]
    if not graphs:
        raise ValueError(f"{command[0]} ran no graph on XLA: is its model on nxd_state.get_device()?\n{output}")
    return RecordedRank(0, [[graph] for graph in graphs], has_steps=False)


def require_torch_xla() -> None:
    """Raise ValueError if torch-xla, which creates the graphs, is not installed."""
    if not has_torch_xla():
        raise ValueError(
            "recording graphs needs torch-xla, which is not installed; install torch and torch_xla of one version: "
            "pip install torch==2.9.1 torch_xla==2.9.0 (no device is needed)"
        )


def run_on_cpu(command: list[str], environment: dict[str, str], what: str) -> str:
    """Run a program on torch-xla's CPU client and return its output.

    Raises:
        ValueError: the program failed; the message has `what` and the end of its output.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS_VARIABLES}
    on_the_cpu = {"NXD_DEVICE": "xla", "PJRT_DEVICE": "CPU"}
    result = subprocess.run(
        command,
        env=inherited | on_the_cpu | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ValueError(f"{what} failed with exit code {result.returncode}:\n{result.stdout.strip()[-_SHOWN_OUTPUT:]}")
    return result.stdout
