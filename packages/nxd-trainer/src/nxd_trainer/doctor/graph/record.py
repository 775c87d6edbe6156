"""Processes that run what is looked at on torch-xla's CPU client, and the graphs that they leave.

torch-xla decides at its first graph whether it writes graphs down, and a process plays one rank: so every rank, and
every script, gets a process of its own.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nxd_state.xla_inspect import CapturedGraph, read_graphs

from nxd_trainer.recipe import Recipe, save_recipe

WORKER = "nxd_trainer.doctor.graph.worker"
_SHOWN_OUTPUT = 2000  # characters, from the end of what a process said before it failed
_LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RecordedRank:
    """The graphs of one process.

    Attributes:
        rank: that it played.
        steps: the graphs of each step; of a script, where steps are not known, a list for each graph.
        has_steps: whether they are.
    """

    rank: int
    steps: list[list[CapturedGraph]]
    has_steps: bool = True


def record_recipe(recipe: Recipe, *, ranks: Sequence[int], world_size: int, num_steps: int) -> list[RecordedRank]:
    """The graphs of the first steps of a recipe's run, on some ranks of `world_size`.

    One rank really runs, and so shows what cuts a step in two. Of several each is recorded without its peers, and
    nothing is run. Tokens are cached where the recipe says; nothing else is left behind.

    Raises:
        ValueError: torch-xla is not installed, or the steps cannot be recorded; with what the process said.
    """
    check_torch_xla()
    with tempfile.TemporaryDirectory(prefix="nxd-doctor-") as name:
        folder = Path(name)
        data = replace(recipe.data, cache_folder=recipe.token_cache_folder)
        checkpoint = replace(recipe.checkpoint, resume="never", folder=None)
        file = save_recipe(replace(recipe, output=folder / "run", data=data, checkpoint=checkpoint), folder / "r.json")
        recorded = []
        for rank in ranks:  # one after another: each takes as much memory as the rank would
            result = folder / f"rank-{rank}.json"
            settings = [file, result, rank, world_size, num_steps]
            _run([sys.executable, "-m", WORKER, *map(str, settings)], {}, f"rank {rank} of {world_size}")
            steps = [[CapturedGraph(**graph) for graph in graphs] for graphs in json.loads(result.read_text())]
            recorded.append(RecordedRank(rank, steps))
        return recorded


def record_script(command: Sequence[str]) -> RecordedRank:
    """All graphs that a script runs, as one process.

    Args:
        command: the script and its arguments.

    Raises:
        ValueError: torch-xla is not installed, the script fails, or it runs no graph; with what it said.
    """
    check_torch_xla()
    with tempfile.TemporaryDirectory(prefix="nxd-doctor-") as name:
        dump = Path(name) / "graphs.hlo"
        debug = dict.fromkeys(("XLA_IR_DEBUG", "XLA_HLO_DEBUG"), "1")
        writing = {"XLA_SAVE_TENSORS_FILE": str(dump), "XLA_SAVE_TENSORS_FMT": "hlo"}
        output = _run([sys.executable, *command], debug | writing, command[0])
        graphs = [graph for file in sorted(dump.parent.iterdir()) for graph in read_graphs(file.read_text())]
    if not graphs:
        raise ValueError(f"{command[0]} ran no graph on XLA: is its model on nxd_state.get_device()?\n{output}")
    return RecordedRank(0, [[graph] for graph in graphs], has_steps=False)


def check_torch_xla() -> None:
    """Raise ValueError where graphs cannot be made."""
    if importlib.util.find_spec("torch_xla") is None:
        raise ValueError(
            "graphs are made by torch-xla, which is not installed: install torch and torch_xla of the same version, as "
            "pip install torch==2.9.1 torch_xla==2.9.0; a device is not needed"
        )


def _run(command: list[str], environment: dict[str, str], what: str) -> str:
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
        raise ValueError(f"{what} ended with exit code {result.returncode}:\n{result.stdout.strip()[-_SHOWN_OUTPUT:]}")
    return result.stdout
