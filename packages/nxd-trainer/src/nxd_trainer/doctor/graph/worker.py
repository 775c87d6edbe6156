"""The process that plays one rank of a recipe's run and writes its graphs down: `python -m ... RECIPE RESULT RANK ...`.

With several ranks, torch's own "fake" transport stands for the peers; messages between hosts' processes come back as
this rank sent them, and those on the device are in the graphs, which are not run.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from nxd_state import initialize_model_parallel, step_boundary
from nxd_state.xla_inspect import capture_steps, module_scopes, start_capture
from nxd_state.xla_inspect.recording import record_steps

from nxd_trainer.recipe import load_recipe
from nxd_trainer.training.run_state import build_run_state
from nxd_trainer.training.step import take_step


def main(recipe_file: str, result: str, rank: int, world_size: int, num_steps: int) -> None:
    """Record `num_steps` steps of `rank` and write them to the file `result`."""
    start_capture()
    if world_size > 1:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415  (registers the transport "fake")

        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    recipe = load_recipe(recipe_file, [])
    initialize_model_parallel(recipe.parallel.tensor_parallel_size)
    state = build_run_state(recipe)
    record = capture_steps if world_size == 1 else record_steps
    if world_size == 1:
        step_boundary()  # as `nxd train`: the filling of tensors is no part of the first step
    with module_scopes(state.model):
        steps = record(lambda: take_step(state), num_steps)
    Path(result).write_text(json.dumps([[asdict(graph) for graph in graphs] for graphs in steps]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
