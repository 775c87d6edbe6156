"""The trial run that `neuron_parallel_compile` makes of `nxd train`: every graph of a run, and nothing left behind.

While it collects graphs (`NEURON_EXTRACT_GRAPHS_ONLY`) nothing is computed, and all values are zeros. So no loss is
looked at, and no checkpoint, metrics or report is written.
"""

from collections.abc import Callable

from nxd_trainer.training.run_state import RunState
from nxd_trainer.training.step import evaluate, take_step

NUM_STEPS = 3  # the first makes the optimizer's states, the second is like all others; the third shows that it is


def extract_graphs(state: RunState, say: Callable[[str], None]) -> None:
    """Take a few steps, and evaluate as often as the recipe would at all, so that the compiler gets each graph.

    Args:
        say: is given a line about it.
    """
    say(f"extracting graphs: {NUM_STEPS} steps on zeros; nothing is trained, and no checkpoint or metrics are written")
    for _ in range(NUM_STEPS):
        take_step(state)
    if state.recipe.train.eval_every:
        evaluate(state)
