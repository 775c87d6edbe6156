"""The commands of `nxd`: entry points in the group "nxd.commands", provided by the installed packages.

Each is a function that takes the arguments after the command's name and returns an exit code. The commands of the nxd
packages are listed here by name, so that `nxd --help` loads none of them, and a missing one says what to install.
"""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

GROUP = "nxd.commands"


@dataclass(frozen=True)
class Command:
    """A command of an nxd package: the package that provides it, and a one-line summary."""

    package: str
    summary: str


COMMANDS = {
    "train": Command("nxd-trainer", "train a model from a recipe"),
    "data": Command("nxd-trainer", "show what a recipe will train on"),
    "run": Command("nxd-neuronx", "run a training script, including one written for torch-xla"),
    "generate": Command("nxd-trainer", "generate text with a model"),
    "serve": Command("nxd-trainer", "answer completion requests with a trained model"),
    "import": Command("nxd-trainer", "convert a Hugging Face folder to a checkpoint"),
    "export": Command("nxd-trainer", "write a Hugging Face folder from a checkpoint"),
    "upcycle": Command("nxd-trainer", "turn a dense Hugging Face folder into a mixture of experts"),
    "ckpt": Command("nxd-ckpt", "inspect, check, compare and convert checkpoints (same as nxd-ckpt)"),
    "plan": Command("nxd-plan", "find the layouts of a training job that fit a cluster"),
    "doctor": Command("nxd-doctor", "find problems of this machine or of a step's graph, and say how to fix them"),
    "parity": Command("nxd-parity", "check that a layout computes the same as one process"),
    "chaos": Command("nxd-elastic", "kill, stop and slow down ranks of a run, and report what that costs"),
}


def installed_commands() -> dict[str, EntryPoint]:
    """The commands of the installed packages, by name; none of them is loaded."""
    return {found.name: found for found in entry_points(group=GROUP)}


def summaries(installed: dict[str, EntryPoint]) -> dict[str, str]:
    """A summary of each command: first ours, with the package to install if missing, then those of other packages."""
    ours = {
        name: it.summary if name in installed else f"(pip install {it.package}) {it.summary}"
        for name, it in COMMANDS.items()
    }
    others = {
        name: (found.dist.metadata["Summary"] if found.dist else None) or found.value
        for name, found in installed.items()
        if name not in ours
    }
    return ours | others
