"""Expert parallelism: the experts of a layer lie on several ranks, and tokens travel to theirs and back."""

from nxd_layers.experts.dispatch import expert_parallel_forward
from nxd_layers.experts.parameters import mark_expert_parameter, shard_experts

__all__ = ["expert_parallel_forward", "mark_expert_parameter", "shard_experts"]
