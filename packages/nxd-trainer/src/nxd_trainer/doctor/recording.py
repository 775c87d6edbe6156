"""Records the graphs that a training step hands to a device's compiler, in processes on torch-xla's CPU client.

torch-xla decides at its first graph whether it dumps graphs, and a process plays one rank: so every rank, and every
script, gets a process of its own. Run as a module, this file is such a process:
`python -m nxd_trainer.doctor.recording RECIPE RESULT RANK ...`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist
from nxd_state import initialize_model_parallel, step_boundary
from nxd_state.device import has_torch_xla
from nxd_state.xla_inspect import CapturedGraph, capture_steps, module_scopes, read_graphs, start_capture
from nxd_state.xla_inspect.recording import record_steps

from nxd_trainer.recipe import Recipe, recipe_from_dict, save_recipe

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
            _run(
                [sys.executable, "-m", "nxd_trainer.doctor.recording", *map(str, settings)],
                {},
                f"rank {rank} of {world_size}",
            )
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
    if not has_torch_xla():
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


def record_rank(recipe_file: str, result: str, rank: int, world_size: int, num_steps: int) -> None:
    """Record `num_steps` steps of `rank` and write them to the file `result`; what a process of its own runs.

    With several ranks, torch's own "fake" transport stands for the peers; messages between hosts' processes come back
    as this rank sent them, and those on the device are in the graphs, which are not run.
    """
    from nxd_trainer.training.run_state import build_run_state  # noqa: PLC0415 - only this process trains
    from nxd_trainer.training.step import take_step  # noqa: PLC0415

    start_capture()
    if world_size > 1:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415  (registers the transport "fake")

        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    recipe = recipe_from_dict(json.loads(Path(recipe_file).read_text()))  # our own, which may name a factory
    degrees = recipe.parallel
    initialize_model_parallel(
        degrees.tensor_parallel_size,
        expert_model_parallel_size=degrees.expert_parallel_size,
        expert_tensor_parallel_size=degrees.expert_tensor_parallel_size,
        context_parallel_size=degrees.context_parallel_size,
    )
    state = build_run_state(recipe)
    record = capture_steps if world_size == 1 else record_steps
    if world_size == 1:
        step_boundary()  # as `nxd train`: the filling of tensors is no part of the first step
    with module_scopes(state.model):
        steps = record(lambda: take_step(state), num_steps)
    Path(result).write_text(json.dumps([[asdict(graph) for graph in graphs] for graphs in steps]))


if __name__ == "__main__":
    record_rank(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
