"""Records the graphs of a recipe's first steps, for `nxd doctor --graph`.

torch-xla decides at its first graph whether to dump graphs, and a process acts as one rank, so every rank gets its own
process. Run as a module, this file is such a process: `python -m nxd_trainer.training.graph_recording RECIPE ...`.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist
from nxd_doctor.graphs import CapturedGraph, capture_steps, module_scopes, start_capture
from nxd_doctor.graphs.capture import record_steps
from nxd_doctor.recording import RecordedRank, RecordedSteps, require_torch_xla, run_on_cpu
from nxd_state import initialize_mesh, step_boundary

from nxd_trainer.recipe import Recipe, check_layout, load_recipe, recipe_from_dict, save_recipe
from nxd_trainer.training.run_state import build_run_state
from nxd_trainer.training.step import take_step


def record_recipe(file: str, settings: Sequence[str], *, ranks: int | None, steps: int) -> RecordedSteps:
    """Record the graphs of the first steps of a recipe's run, on its first and last rank.

    Args:
        file: the recipe file; empty for the defaults.
        settings: `key=value` overrides of the file.
        ranks: number of ranks; None for the fewest that the layout allows.
        steps: number of steps to record.

    Raises:
        ValueError: the recipe has mistakes, torch-xla is not installed, or the steps cannot be recorded.
    """
    recipe = load_recipe(file or None, settings)
    degrees = recipe.parallel.degrees
    if degrees.pp > 1:
        raise ValueError(f"graphs of pipelines cannot be checked; parallel.pipeline_parallel_size={degrees.pp}")
    if degrees.zero_stage == 3:
        raise ValueError(
            "parallel.zero_stage=3 has no graph: on XLA parameters cannot be sharded, since tensors share no memory; "
            "use parallel.zero_stage=2 there, and `nxd plan` for the memory and bytes of stage 3 on other devices"
        )
    least = degrees.least_ranks
    world_size = least if ranks is None else ranks
    if world_size < 1 or world_size % least:
        needed = f"parallel.tensor_parallel_size={degrees.tp}"
        if degrees.cp > 1:
            needed += f" times parallel.context_parallel_size={degrees.cp}"
        if degrees.splits_experts:
            needed += f", and of {degrees.ep * degrees.etp} ranks with the experts of a layer"
        raise ValueError(f"--ranks {world_size} must be a multiple of {needed}")
    if steps < 1:
        raise ValueError(f"--steps {steps} must be 1 or more; 3 show whether graphs repeat")
    degrees = degrees.on(world_size)
    check_layout(recipe, degrees.dp)
    first_and_last = sorted({0, world_size - 1})
    recorded = _record_ranks(recipe, ranks=first_and_last, world_size=world_size, num_steps=steps)
    which = "one rank, as it ran" if world_size == 1 else f"ranks 0 and {world_size - 1}, recorded without running"
    title = f"{file or 'the default recipe'}: {degrees.describe()}; {which}"
    return RecordedSteps(title, recorded, world_size, degrees)


def _record_ranks(recipe: Recipe, *, ranks: Sequence[int], world_size: int, num_steps: int) -> list[RecordedRank]:
    """Record the graphs of the first steps of a recipe's run, on some ranks of `world_size`.

    A single rank really runs, and so shows what splits a step's graph. With several, each is recorded without its
    peers, and nothing runs. Tokens stay in the recipe's cache; nothing else is left behind.
    """
    require_torch_xla()
    with tempfile.TemporaryDirectory(prefix="nxd-doctor-") as name:
        folder = Path(name)
        data = replace(recipe.data, cache_folder=recipe.token_cache_folder)
        checkpoint = replace(recipe.checkpoint, resume="never", folder=None)
        file = save_recipe(replace(recipe, output=folder / "run", data=data, checkpoint=checkpoint), folder / "r.json")
        recorded = []
        for rank in ranks:  # one at a time: each needs as much memory as the rank would
            result = folder / f"rank-{rank}.json"
            settings = [file, result, rank, world_size, num_steps]
            run_on_cpu(
                [sys.executable, "-m", "nxd_trainer.training.graph_recording", *map(str, settings)],
                {},
                f"rank {rank} of {world_size}",
            )
            steps = [[CapturedGraph(**graph) for graph in graphs] for graphs in json.loads(result.read_text())]
            recorded.append(RecordedRank(rank, steps))
        return recorded


def record_rank(recipe_file: str, result: str, rank: int, world_size: int, num_steps: int) -> None:
    """Record `num_steps` steps of `rank` and write them to the file `result`; the entry point of the process.

    With several ranks, torch's "fake" transport stands in for the peers: messages between processes come back as this
    rank sent them, and those on the device are in the graphs, which do not run.
    """
    start_capture()
    if world_size > 1:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415  (registers the transport "fake")

        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    recipe = recipe_from_dict(json.loads(Path(recipe_file).read_text()))  # written by us, so it may name a factory
    initialize_mesh(recipe.parallel.degrees)
    state = build_run_state(recipe)
    record = capture_steps if world_size == 1 else record_steps
    if world_size == 1:
        step_boundary()  # as in `nxd train`: filling tensors is not part of the first step
    with module_scopes(state.model):
        steps = record(lambda: take_step(state), num_steps)
    Path(result).write_text(json.dumps([[asdict(graph) for graph in graphs] for graphs in steps]))


if __name__ == "__main__":
    record_rank(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
