"""Gives what a step changes to a recording: parameters, gradients and optimizer states of the whole model.

Our layers, the pipeline and ZeRO know which boxes of which tensors of the whole model a rank has, under their names in
a checkpoint. So nothing of them is to be inferred.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from nxd_ckpt.sharded_tensor import as_sharded
from nxd_engine.checkpoints.optimizer_state import optimizer_state
from nxd_engine.checkpoints.state import OPTIMIZER_PREFIX, logical_name
from nxd_engine.unwrap import plain_model, plain_optimizer
from nxd_optim import MASTER_KEY
from nxd_optim.clip import GradientRange
from nxd_optim.updated_parts import UpdatedRange
from nxd_parity import events
from nxd_parity.by_hand import Recorder
from nxd_parity.events import Placement
from nxd_state import whole_parameters
from torch import Tensor, nn
from torch.optim import Optimizer

Box = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name and shape of a whole tensor; a box's start and values


class TrainedState:
    """The state of a model and its optimizer, to be recorded."""

    def __init__(
        self, recorder: Recorder, model: nn.Module, optimizer: Optimizer, names: Mapping[Tensor, str], *, is_whole: bool
    ) -> None:
        """Prepare.

        Args:
            recorder: the recording.
            model: an `NxDModel`, or the model of one process.
            optimizer: its optimizer.
            names: the names of this rank's parameters in a checkpoint.
            is_whole: whether this is one process, whose boxes are to be put together.
        """
        self._recorder, self._model, self._optimizer, self._names = recorder, model, optimizer, names
        self._is_whole = is_whole
        self.problem = ""  # why optimizer states are not recorded

    def parameters(self) -> None:
        """Record the parameters, as they are after the last step. Call it on all ranks."""
        with whole_parameters(self._names):
            self._add(events.PARAMETER, self._boxes(_whole(it, it.detach()) for it in self._names))

    def gradients(self, ranges: Sequence[GradientRange]) -> None:
        """Record gradients that are complete, such as those that `NxDOptimizer.register_gradient_hook` gives."""
        self._add(events.GRADIENT, self._boxes(ranges))

    def own_gradients(self) -> None:
        """Record the parameters' `grad`."""
        self.gradients([_whole(it, it.grad) for it in self._names if it.grad is not None])

    def optimizer_states(self) -> None:
        """Record the optimizer's states; not those of one whose states belong to no box."""
        try:
            found = optimizer_state(plain_model(self._model), plain_optimizer(self._optimizer))
        except ValueError as error:
            self.problem = str(error)
            return
        boxes: list[Box] = []
        for full_name, value in found.items():
            name, sharded = full_name.removeprefix(OPTIMIZER_PREFIX), as_sharded(full_name, value)
            if not name.endswith(f"/{MASTER_KEY}"):
                boxes += [(name, sharded.global_shape, tuple(it.offsets), it.tensor) for it in sharded.shards]
        self._add(events.OPTIMIZER_STATE, boxes)

    def _boxes(self, ranges: Iterable[GradientRange]) -> Iterator[Box]:
        for it in ranges:
            is_flat = it.gradient.shape != it.parameter.shape
            values = it.gradient[: it.stop - it.start] if is_flat else it.gradient
            for shard in UpdatedRange(it.parameter, it.start, it.stop, values).shards_of(values):
                name = logical_name(self._names[it.parameter], shard.name)
                yield name, shard.logical_shape, shard.box.offset, shard.tensor

    @torch.no_grad()
    def _add(self, kind: str, boxes: Iterable[Box]) -> None:
        parts: Counter[str] = Counter()
        wholes: dict[str, Tensor] = {}
        for name, shape, start, values in boxes:
            if not self._is_whole:
                self._recorder.tensor(kind, name, values, placement=Placement(shape, start), part=parts[name])
                parts[name] += 1
                continue
            whole = wholes.setdefault(name, values.new_zeros(shape))
            whole[tuple(slice(at, at + size) for at, size in zip(start, values.shape, strict=True))] = values
        for name, whole in wholes.items():
            self._recorder.tensor(kind, name, whole)


def _whole(parameter: Tensor, values: Tensor) -> GradientRange:
    return GradientRange(parameter, 0, parameter.numel(), values)
