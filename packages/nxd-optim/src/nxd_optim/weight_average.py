"""An exponential moving average of the weights, sharded over the replicas as ZeRO shards its states.

Polyak and Juditsky 1992 average weights to remove the noise of the last steps. Each rank keeps the average of its part
of the elements, in float32 or wider.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from nxd_state import Group, all_gather, local_values, owned_range, values_changed
from nxd_state.parameter_marks import is_expert
from torch import Tensor

from nxd_optim.flat_shards import shards_of_range
from nxd_optim.placement import check_same_parameters, placements_of
from nxd_optim.zero import NeuronZero1Optimizer, StateTensor

AVERAGE_KEY = "weight_average"


class WeightAverage:
    """`average = decay * average + (1 - decay) * weight`, after each step.

    Args:
        parameters: the model's parameters, in the same order on every rank; those that need gradients are used once.
        decay: a number between 0 and 1, such as 0.999; the average covers about 1 / (1 - decay) steps.
        group: the ranks that hold the same parameters and share the average; data times context parallel if None, and
            for experts the ranks with the same experts.
        optimizer: a ZeRO optimizer with `overlap_forward`; its parameters may arrive after its step and are waited
            for.

    Raises:
        ValueError: the decay is outside (0, 1), or the ranks passed different parameters.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        decay: float,
        *,
        group: Group | None = None,
        optimizer: NeuronZero1Optimizer | None = None,
    ) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay={decay} must be between 0 and 1, such as 0.999")
        self.decay = decay
        self._optimizer = optimizer
        self.group, self._experts = (placement.replicas for placement in placements_of(group))
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        check_same_parameters(self.parameters, self.group)
        # Each parameter with the (start, stop) of the elements that this rank averages, in C order, and their average.
        # All parameters are cut alike, so that each can be gathered separately; those of ZeRO-3 as they are sharded.
        self._averages: list[tuple[Tensor, tuple[int, int], Tensor]] = []
        for parameter in self.parameters:
            owned = owned_range(parameter)
            part = _part_of(parameter.numel(), self._replicas(parameter))
            bounds = part if owned is None else (owned.start, owned.stop)
            self._averages.append((parameter, bounds, self._own(parameter, bounds).clone()))

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the current weights; call it after loading weights."""
        self._wait_for_parameters()
        for parameter, bounds, average in self._averages:
            average.copy_(self._own(parameter, bounds))

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average; call it after the optimizer's step."""
        self._wait_for_parameters()
        for parameter, bounds, average in self._averages:
            average.lerp_(self._own(parameter, bounds), 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the parameters are the averages, to evaluate or export them; afterwards they are restored.

        All ranks of the group enter the block. A copy of this rank's parameters is kept meanwhile.
        """
        self._wait_for_parameters()
        saved = [local_values(parameter).clone() for parameter in self.parameters]
        try:
            self._fill_parameters()
            values_changed(self.parameters)
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip(self.parameters, saved, strict=True):
                    local_values(parameter).copy_(own)
            values_changed(self.parameters)

    def sharded_state(self) -> list[StateTensor]:
        """Return the average as boxes of logical tensors, under the key "weight_average".

        They share memory with the average, so a checkpoint of any layout can be loaded into them.
        """
        return [
            StateTensor(parameter, AVERAGE_KEY, shards=shards_of_range(parameter, start, stop, average))
            for parameter, (start, stop), average in self._averages
            if start < stop
        ]

    def _wait_for_parameters(self) -> None:
        if self._optimizer is not None:
            self._optimizer.wait_for_parameters()

    @torch.no_grad()
    def _fill_parameters(self) -> None:
        for parameter, _, average in self._averages:
            if owned_range(parameter) is not None:
                local_values(parameter).copy_(average)
                continue
            group = self._replicas(parameter)
            longest = -(-parameter.numel() // group.size)  # collectives need equal parts: pad the last ones
            padded = torch.nn.functional.pad(average, (0, longest - average.numel()))
            whole = all_gather(padded, group)[: parameter.numel()]
            parameter.copy_(whole.view(parameter.shape))

    def _replicas(self, parameter: Tensor) -> Group:
        return self._experts if is_expert(parameter) else self.group

    @staticmethod
    def _own(parameter: Tensor, bounds: tuple[int, int]) -> Tensor:
        """Return this rank's elements, flat, in at least float32."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if owned_range(parameter) is not None:
            return local_values(parameter).to(dtype)
        return parameter.detach().reshape(-1)[slice(*bounds)].to(dtype)


def _part_of(length: int, group: Group) -> tuple[int, int]:
    part = -(-length // group.size)
    return min(group.rank * part, length), min((group.rank + 1) * part, length)
