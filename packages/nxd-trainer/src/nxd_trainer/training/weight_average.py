"""The exponential moving average (EMA) of a run's weights, as a checkpoint holds it beside the weights.

Each replica keeps its part of the average, in float32 or wider. In a checkpoint it has the names and shapes of the
unsharded model, so a run resumes at any layout.
"""

from collections.abc import Mapping
from pathlib import Path

import nxd_ckpt
from nxd_ckpt import Checkpoint, Shard, ShardedTensor
from nxd_engine import NxDModel
from nxd_engine.checkpoints.state import logical_name, named_parameters
from nxd_engine.model_weights import average_name, holds_average
from nxd_engine.unwrap import plain_model
from nxd_optim import WeightAverage
from nxd_state import records_graphs
from torch import Tensor

from nxd_trainer.recipe import Recipe


def build_average(recipe: Recipe, model: NxDModel) -> WeightAverage | None:
    """Return the average that a recipe asks for, which starts from the model's current weights.

    Raises:
        ValueError: the device records graphs.
    """
    decay = recipe.train.ema_decay
    if not decay:
        return None
    if records_graphs():  # each replica averages another part, so ranks would record different graphs
        raise ValueError(f"train.ema_decay={decay:g} does not support XLA; set train.ema_decay=0")
    return WeightAverage(model.parameters(), decay)


def average_tensors(average: WeightAverage, model: NxDModel, *, with_copies: bool = False) -> dict[str, ShardedTensor]:
    """Return this rank's part of the average by its names in a checkpoint; the tensors share its memory.

    Args:
        average: the average.
        model: the model whose parameters are averaged.
        with_copies: whether to include further copies of a tied weight, which are loaded but not saved.
    """
    names: Mapping[Tensor, str] = {parameter: name for name, parameter in named_parameters(plain_model(model))}
    shards: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for state in average.sharded_state():
        if getattr(state.parameter, "shared", False) and not with_copies:
            continue
        for shard in state.shards:
            name = average_name(logical_name(names[state.parameter], shard.name))
            shards.setdefault((name, shard.logical_shape), []).append(Shard(shard.tensor, shard.box.offset))
    return {name: ShardedTensor(shape, found) for (name, shape), found in shards.items()}


def load_average(average: WeightAverage, model: NxDModel, checkpoint: Checkpoint, root: Path | str) -> bool:
    """Fill the average from a checkpoint, or start it from the model's weights if the checkpoint has none.

    Call it on all ranks, after the model is loaded.

    Returns:
        Whether the checkpoint has an average.
    """
    average.restart()
    if not holds_average(checkpoint):
        return False
    nxd_ckpt.load(root, checkpoint.tag, into=average_tensors(average, model, with_copies=True), strict=False)
    return True
