"""The weights of ZeRO: buckets of which each replica updates a part, and the optimizers of this replica's parts.

With `overlap_forward` a step leaves the wait for other replicas' weights to the next forward; see `ForwardGather`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from nxd_state import Group, is_cpu, is_lazy_device
from nxd_state.sharded_values import holder_of
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_optim.bucket_sender import DEFAULT_BUCKET_BYTES, batch_parameters
from nxd_optim.elementwise import has_joint_step
from nxd_optim.groups_and_states import copy_changed_settings, copy_settings, settings_of
from nxd_optim.placement import Placement, check_same_parameters, placement_among
from nxd_optim.updated_parts import UpdatedParts
from nxd_optim.zero.bucket import Bucket, Dtypes
from nxd_optim.zero.flat_bucket import FlatBucket
from nxd_optim.zero.flat_parameters import FlatParameters
from nxd_optim.zero.fully_sharded import in_order_of_backward
from nxd_optim.zero.gradients import check_same_sequence_parallel_ranges
from nxd_optim.zero.host_memory import settings_on_host
from nxd_optim.zero.xla_bucket import XlaBucket


def check_caps(all_gather_mb: float, reduce_scatter_mb: float) -> None:
    """Raise a ValueError if a maximum size of messages is negative."""
    given = {"bucket_cap_mb_all_gather": all_gather_mb, "bucket_cap_mb_reduce_scatter": reduce_scatter_mb}
    for argument, megabytes in given.items():
        if megabytes < 0:
            raise ValueError(f"{argument}={megabytes} must be positive, or 0 for the default")


def bucket_bytes(all_gather_mb: float, reduce_scatter_mb: float, replicas: int) -> int:
    """Return the maximum size of a bucket, of which a replica sends its part on gathering."""
    cap = reduce_scatter_mb * 2**20 or DEFAULT_BUCKET_BYTES
    if all_gather_mb:
        cap = min(cap, all_gather_mb * 2**20 * replicas)
    return int(cap)


class ShardedWeights:
    """Assigns weights and states to replicas, updates this replica's parts, and gathers those of the others.

    Args:
        make_optimizer: function that makes an optimizer of parameter groups.
        dtypes_of: function from a parameter dtype to the dtypes of training.
        offload: whether this rank's parts, their gradients and states are kept and updated in host memory.

    Attributes:
        buckets: the buckets, in the order in which their gradients are sent.
    """

    def __init__(
        self,
        make_optimizer: Callable[[Any], Optimizer],
        dtypes_of: Callable[[torch.dtype], Dtypes],
        *,
        offload: bool = False,
    ) -> None:
        self._make_optimizer, self._dtypes_of, self._offload = make_optimizer, dtypes_of, offload
        self.buckets: list[Bucket] = []
        self._base_optimizers: list[Optimizer] = []  # one per bucket, so that a bucket can be gathered once updated
        self._joint_step: Any = None  # of optimizers that have one
        self._forward_gather: ForwardGather | None = None

    def add(
        self,
        parameters: Sequence[Tensor],
        param_groups: Sequence[dict[str, Any]],
        group: Group,
        placements: Sequence[Placement],
        *,
        bucket_bytes: int,
    ) -> None:
        """Move parameters into further buckets.

        Args:
            parameters: the parameters; frozen ones stay where they are.
            param_groups: the groups of all parameters, as a user sees them.
            group: the replicas of dense layers.
            placements: the placements of dense layers and of experts.
            bucket_bytes: maximum size of a bucket; parameters that are sharded already keep their buffers.

        Raises:
            ValueError: parameters are on the meta device, or differ between ranks of the group.
        """
        for bucket, base in self.parts():  # all have the user's groups, empty ones too
            for added in param_groups[len(base.param_groups) :]:
                base.add_param_group(_settings(added, bucket) | {"params": []})
        buckets = self._make_buckets(parameters, group, placements, bucket_bytes)
        self.buckets = [*self.buckets, *buckets]
        for bucket in buckets:
            weights = {it.parameter: it.weight for it in bucket.ranges}
            groups = [
                _settings(it, bucket) | {"params": [weights[p] for p in it["params"] if p in weights]}
                for it in param_groups
            ]
            self._base_optimizers.append(self._make_optimizer(groups))
        self._joint_step = _joint_step(self.buckets, self._base_optimizers)
        check_same_sequence_parallel_ranges(self.buckets)
        if self._forward_gather is not None:
            self.overlap_forward(self._forward_gather.model)

    def _make_buckets(
        self, parameters: Iterable[Tensor], group: Group, placements: Sequence[Placement], bucket_bytes: int
    ) -> list[Bucket]:
        trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        if any(p.is_meta for p in trained):
            raise ValueError("parameters on the meta device cannot be trained; materialize them, then call init_zero()")
        check_same_parameters(trained, group)
        here = [p for p in trained if holder_of(p) is None]
        # Small parameters (norms, biases) are sent separately and last. They are often listed apart from the matrices,
        # so the time at which backward reaches them is unknown, and a bucket waits for the last of its parameters.
        matrices, others = [p for p in here if p.dim() > 1], [p for p in here if p.dim() <= 1]
        buckets: list[Bucket] = []
        for batch in (*batch_parameters(matrices, bucket_bytes), *batch_parameters(others, bucket_bytes)):
            placement = placement_among(placements, batch[0])
            dtypes = self._dtypes_of(batch[0].dtype)
            if is_lazy_device(batch[0]):
                if self._offload:
                    raise ValueError(
                        "offload=True does not support XLA, which plans the memory of its graphs; use False"
                    )
                buckets.append(XlaBucket(batch, placement, dtypes))
            else:
                flat = FlatParameters(batch, placement.replicas)
                buckets.append(FlatBucket(flat, placement, dtypes, offload=self._offload))
        for flat in in_order_of_backward(trained):
            placement = placement_among(placements, flat.parameters[0])
            dtypes = self._dtypes_of(flat.parameters[0].dtype)
            buckets.append(FlatBucket(flat, placement, dtypes, offload=self._offload))
        return buckets

    def parts(self) -> Iterator[tuple[Bucket, Optimizer]]:
        """Return each bucket with the optimizer that updates this rank's part of it."""
        return zip(self.buckets, self._base_optimizers, strict=True)

    def as_one_optimizer(self, param_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """Return an optimizer over all buckets, with their weights and states, for inspection: the parts are stepped.

        Args:
            param_groups: the groups of all parameters, as a user sees them. The result has the same groups, with this
                rank's elements of a parameter, flat and possibly none, in the parameter's place.
        """
        weights = {it.parameter: it.weight for bucket in self.buckets for it in bucket.ranges}
        flat = [[weights.get(p, p.new_empty(0)) for p in group["params"]] for group in param_groups]
        groups = zip(param_groups, flat, strict=True)
        like = self.buckets[0] if self.buckets else None
        whole = self._make_optimizer([_settings(group, like) | {"params": params} for group, params in groups])
        for _, base in self.parts():
            whole.state.update(base.state)
        return whole

    def scale_gradients(self, scale: Tensor) -> None:
        """Multiply the mean gradients by a 0-d tensor, in place."""
        if is_cpu(scale) and scale == 1:  # reading the value would stall another device
            return
        for bucket in self.buckets:
            assert bucket.gradient is not None
            bucket.gradient.mul_(scale.to(bucket.gradient))

    def update(self, used: Set[int], param_groups: list[dict[str, Any]]) -> None:
        """Step on this rank's part of each bucket, and gather the bucket while the next one is updated.

        Args:
            used: ids of the parameters to update; the others have no gradient on any rank.
            param_groups: the user's parameter groups; values that an optimizer counts in its own groups are copied
                there.
        """
        for bucket, base in self.parts():
            copy_settings([_settings(group, bucket) for group in param_groups], base.param_groups)
        given = [settings_of(group) for base in self._base_optimizers[:1] for group in base.param_groups]
        if self._joint_step is not None:
            for bucket in self.buckets:
                _give_gradients(bucket, used)
            self._joint_step.prepare(self._base_optimizers, used, param_groups)
        for bucket, base in reversed(list(self.parts())):  # in the order in which the next forward needs them
            if any(id(p) in used for p in bucket.parameters):
                _step(bucket, base, used)
                bucket.publish()
        for base in self._base_optimizers[:1]:
            copy_changed_settings(base.param_groups, given, param_groups)
        if self._forward_gather is None:
            self.wait()

    def overlap_forward(self, model: nn.Module) -> None:
        """Make the modules of `model` wait for their parameters, instead of the step."""
        if self._forward_gather is not None:
            self._forward_gather.close()
        self._forward_gather = ForwardGather(model, self.buckets)

    def wait(self) -> None:
        """Return when all parameters are whole."""
        for bucket in self.buckets:
            bucket.wait_for_parameters()

    def check_places(self) -> None:
        """Raise a RuntimeError if a parameter has moved out of its bucket."""
        for bucket in self.buckets:
            bucket.check_places()

    def refresh_masters(self, *, only_stale: bool) -> None:
        """Set master weights from the parameters: all of them, or those marked as stale."""
        for bucket in self.buckets:
            if not only_stale:
                bucket.stale = {id(p) for p in bucket.parameters}
            bucket.refresh_stale_masters()

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for bucket in self.buckets:
            bucket.drop_gradients()

    def zero_gradients(self) -> None:
        """Set the existing gradients to zero."""
        for bucket in self.buckets:
            bucket.zero_gradients()


def _joint_step(buckets: Sequence[Bucket], optimizers: Sequence[Optimizer]) -> Any:
    """Return what optimizers do together before their steps; None for elementwise ones."""
    if not optimizers or not has_joint_step(type(optimizers[0])):
        return None
    if any(bucket.is_on_host for bucket in buckets):
        raise ValueError(
            f"{type(optimizers[0]).__name__} exchanges parts of matrices on the device, so its states cannot be "
            "kept in host memory; use offload=False, or AdamW"
        )
    parts = [
        UpdatedParts(bucket.parameters, [it.updated for it in bucket.ranges], bucket.placement.replicas)
        for bucket in buckets
    ]
    return type(optimizers[0]).joint_step(parts)  # type: ignore[attr-defined]


def _settings(group: Mapping[str, Any], bucket: Bucket | None) -> dict[str, Any]:
    """Return a group's settings for the optimizer of a bucket."""
    settings = settings_of(group)
    return settings_on_host(settings) if bucket is not None and bucket.is_on_host else settings


def _give_gradients(bucket: Bucket, used: Set[int]) -> None:
    for it in bucket.ranges:
        it.weight.grad = (
            it.slice_of(bucket.gradient) if bucket.gradient is not None and id(it.parameter) in used else None
        )


def _step(bucket: Bucket, base: Optimizer, used: Set[int]) -> None:
    assert bucket.gradient is not None
    _give_gradients(bucket, used)
    base.step()
    for it in bucket.ranges:
        it.weight.grad = None
    bucket.gradient = None


class ForwardGather:
    """Makes a model's modules wait for a parameter's bucket whenever the parameter is read as an attribute.

    The wait is on reading a parameter, not on calling its module: layers that share an input are computed by one
    function of their weights, and a loss takes the weight of the head. A module also waits for its own parameters
    before its forward, since some (`nn.LSTM`) also keep them in a list.

    Args:
        model: the model; it also waits for all buckets before its state is read or loaded.
        buckets: buckets of the optimizer.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.model = model
        bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters}
        self._hooks = [
            model.register_state_dict_pre_hook(partial(_wait, buckets)),
            model.register_load_state_dict_pre_hook(partial(_wait, buckets)),
        ]
        self._modules = [m for m in model.modules() if any(id(p) in bucket_of for p in m.parameters(recurse=False))]
        for module in self._modules:
            found = [bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of]
            needed = list(dict.fromkeys(found))
            self._hooks.append(module.register_forward_pre_hook(partial(_wait, needed), prepend=True))
            module._parameters = _ArrivingParameters(module._parameters, bucket_of)

    def close(self) -> None:
        """Make the modules ordinary ones again."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module._parameters = dict(module._parameters)


class _ArrivingParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name, where `nn.Module` looks up its attributes; iterating over them does not wait."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], bucket_of: Mapping[int, Bucket]) -> None:
        super().__init__(parameters)
        self._bucket_of = bucket_of

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            bucket.wait_for_parameters()
        return parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy of the module has parameters of its own, which no bucket holds


def _wait(buckets: Sequence[Bucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.wait_for_parameters()
