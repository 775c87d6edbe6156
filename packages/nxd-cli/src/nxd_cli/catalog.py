"""The commands of `nxd`: entry points of the group "nxd.commands", which the installed packages bring.

Each is a function that takes the words after the command's name and returns an exit code. Those of the nxd packages
are known here by name, so that `nxd --help` loads none of them, and a missing one says what to install.
"""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

GROUP = "nxd.commands"


@dataclass(frozen=True)
class Command:
    """A command of an nxd package: where it is, and a line on what it does."""

    package: str
    summary: str


COMMANDS = {
    "train": Command("nxd-trainer", "train a model from a recipe"),
    "data": Command("nxd-trainer", "show what a recipe will train on"),
    "run": Command("nxd-neuronx", "run a training script, also one written for torch-xla"),
    "generate": Command("nxd-trainer", "write text with a model"),
    "serve": Command("nxd-trainer", "answer completion requests with a trained model"),
    "import": Command("nxd-trainer", "make a checkpoint of a Hugging Face folder"),
    "export": Command("nxd-trainer", "write a Hugging Face folder from a checkpoint"),
    "upcycle": Command("nxd-trainer", "make a mixture of experts of a dense Hugging Face folder"),
    "ckpt": Command("nxd-ckpt", "look at, check, compare and convert checkpoints (as nxd-ckpt)"),
    "plan": Command("nxd-plan", "find the layouts of a training job that fit on a cluster"),
    "doctor": Command("nxd-doctor", "say what is wrong with this machine, or with a step's graph, and how to mend it"),
    "parity": Command("nxd-parity", "check that a layout computes the same as one process"),
    "chaos": Command("nxd-elastic", "kill, stop and slow ranks of a run, and say what that costs"),
}


def installed_commands() -> dict[str, EntryPoint]:
    """The commands of the packages that are installed, by name; none is loaded."""
    return {found.name: found for found in entry_points(group=GROUP)}


def summaries(installed: dict[str, EntryPoint]) -> dict[str, str]:
    """A line on each command: ours, with what to install for one that is missing, and then those of other packages."""
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
