"""The weights of ZeRO-1: buckets of which each replica updates a part, and the optimizers of this replica's parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from nxd_state import Group
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_optim.zero1.buckets import Bucket, make_base_optimizer, make_buckets
from nxd_optim.zero1.flat_bucket import Dtypes
from nxd_optim.zero1.gradients import check_same_sequence_parallel_ranges
from nxd_optim.zero1.settings import settings_of


class ShardedWeights:
    """Assigns weights and states to replicas, and waits for the weights of other replicas.

    Args:
        make_optimizer: the optimizer of some parameter groups.
        dtypes_of: what parameters of a dtype are trained in.

    Attributes:
        buckets: in the order in which their gradients are sent.
    """

    def __init__(self, make_optimizer: Callable[[Any], Optimizer], dtypes_of: Callable[[torch.dtype], Dtypes]) -> None:
        self._make_optimizer, self._dtypes_of = make_optimizer, dtypes_of
        self.buckets: list[Bucket] = []
        self._base_optimizers: list[Optimizer] = []  # one per bucket, so that a bucket can be gathered once updated
        self._forward_gather: ForwardGather | None = None

    def add(
        self,
        parameters: Sequence[Tensor],
        param_groups: Sequence[dict[str, Any]],
        group: Group,
        *,
        bucket_bytes: int,
    ) -> None:
        """Move parameters into further buckets.

        Args:
            parameters: those that are frozen stay where they are.
            param_groups: the groups of all parameters, as a user sees them.
            group: the replicas.
            bucket_bytes: most of a bucket.

        Raises:
            ValueError: parameters on the meta device, or others on another rank of the group.
        """
        for base in self._base_optimizers:  # all have the user's groups, empty ones too
            for added in param_groups[len(base.param_groups) :]:
                base.add_param_group(settings_of(added) | {"params": []})
        buckets = make_buckets(parameters, group, bucket_bytes, self._dtypes_of)
        self.buckets = [*self.buckets, *buckets]
        self._base_optimizers += [make_base_optimizer(it, param_groups, self._make_optimizer) for it in buckets]
        check_same_sequence_parallel_ranges(self.buckets)
        if self._forward_gather is not None:
            self.overlap_forward(self._forward_gather.model)

    def parts(self) -> Iterator[tuple[Bucket, Optimizer]]:
        """Each bucket with the optimizer that updates this rank's part of it."""
        return zip(self.buckets, self._base_optimizers, strict=True)

    def as_one_optimizer(self, param_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """An optimizer over all buckets, with their weights and states: for looking, as the parts are stepped.

        Args:
            param_groups: the groups of all parameters, as a user sees them; so are those of the result, where a
                parameter's elements of this rank, flat and maybe none, take its place.
        """
        weights = {own.parameter: own.weight for bucket in self.buckets for own in bucket.ranges}
        flat = [[weights.get(p, p.new_empty(0)) for p in group["params"]] for group in param_groups]
        groups = zip(param_groups, flat, strict=True)
        whole = self._make_optimizer([settings_of(group) | {"params": params} for group, params in groups])
        for _, base in self.parts():
            whole.state.update(base.state)
        return whole

    def overlap_forward(self, model: nn.Module) -> None:
        """From now on the modules of `model` wait for their parameters, instead of the step."""
        if self._forward_gather is not None:
            self._forward_gather.close()
        self._forward_gather = ForwardGather(model, self.buckets)

    @property
    def arrive_in_forward(self) -> bool:
        """Whether a step leaves the waiting for other replicas' weights to the next forward."""
        return self._forward_gather is not None

    def wait(self) -> None:
        """Return when all parameters are whole."""
        for bucket in self.buckets:
            bucket.wait_for_parameters()

    def check_places(self) -> None:
        """Raise a RuntimeError if a parameter has moved out of its bucket."""
        for bucket in self.buckets:
            bucket.check_places()

    def refresh_masters(self, *, only_stale: bool) -> None:
        """Take master weights from the parameters: all, or those that are marked to be."""
        for bucket in self.buckets:
            if not only_stale:
                bucket.mark_masters_stale(bucket.parameters)
            bucket.refresh_stale_masters()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            bucket.drop_gradients()

    def zero_gradients(self) -> None:
        """Make the gradients that there are zero."""
        for bucket in self.buckets:
            bucket.zero_gradients()


class ForwardGather:
    """Makes a model's modules wait for a parameter's bucket whenever the parameter is read as an attribute.

    The wait is on reading a parameter, not on calling its module: layers that share an input are computed by one
    function of their weights, and a loss takes the weight of the head. A module also waits for its own parameters
    before its forward, since some (`nn.LSTM`) keep them in a list besides.

    Args:
        model: also waits for all buckets before its state is read or loaded.
        buckets: of the optimizer.
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
