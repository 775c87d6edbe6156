"""What `state_dict` adds for ZeRO-1: the states of this rank's part of each parameter, and which part that is.

It fits one rank of one layout, and loads without any other rank. `sharded_state` is the form that fits every layout.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from nxd_optim.zero1.buckets import Bucket

Parts = Iterable[tuple[Bucket, Optimizer]]


def rank_state(parts: Parts, indices: Mapping[int, int], *, with_masters: bool) -> dict[str, Any]:
    """States, ranges and master weights by parameter index; tensors share memory with the optimizer.

    Args:
        parts: each bucket and its optimizer.
        indices: the index of each parameter, by id.
        with_masters: add "master_weights" where they are kept.
    """
    found: dict[str, Any] = {"state": {}, "ranges": {}}
    if with_masters:
        found["master_weights"] = {}
    for bucket, base in parts:
        for own in bucket.ranges:
            index = indices[id(own.parameter)]
            found["ranges"][index] = (own.start, own.stop, own.parameter.numel())
            if own.weight in base.state:
                found["state"][index] = dict(base.state[own.weight])
            if with_masters and bucket.has_masters:
                found["master_weights"][index] = own.weight.detach()
    return found


def check_rank_state(state_dict: Mapping[str, Any], parts: Parts, indices: Mapping[int, int]) -> None:
    """Raise a ValueError unless the states are of the very parts that this rank owns."""
    missing = {"state", "ranges", "param_groups"} - set(state_dict)
    if missing:
        raise ValueError(f"the state dict lacks {sorted(missing)}: it is not one of NeuronZero1Optimizer")
    expected = rank_state(parts, indices, with_masters=False)["ranges"]
    found = {index: tuple(ranges) for index, ranges in state_dict["ranges"].items()}
    for index in sorted(expected.keys() | found.keys()):
        if expected.get(index) != found.get(index):
            raise ValueError(
                f"the state dict is of another rank, layout or model: of parameter {index} it holds (start, stop, "
                f"size) {found.get(index)}, this rank owns {expected.get(index)}; checkpoints that load at any "
                "layout are made of sharded_state()"
            )


@torch.no_grad()
def load_rank_state(state_dict: Mapping[str, Any], parts: Parts, indices: Mapping[int, int]) -> None:
    """Take over states and master weights of what `check_rank_state` has found to fit."""
    for bucket, base in parts:
        own_by_weight = {own.weight: own for own in bucket.ranges}
        weights = [weight for group in base.param_groups for weight in group["params"]]
        states = {
            position: state_dict["state"][index]
            for position, weight in enumerate(weights)
            if (index := indices[id(own_by_weight[weight].parameter)]) in state_dict["state"]
        }
        base.load_state_dict({"state": states, "param_groups": base.state_dict()["param_groups"]})
        if bucket.has_masters:
            for own in bucket.ranges:
                master = state_dict.get("master_weights", {}).get(indices[id(own.parameter)])
                if master is not None:
                    own.weight.copy_(master)
