"""The whole weight of a sharded head, for code that multiplies by it instead of calling the head."""

from functools import cached_property

from nxd_state import active_group
from torch import Tensor, nn

from nxd_layers.linear import ColumnParallelLinear, gathered_output


class WholeHead:
    """What `get_output_embeddings` of a sharded model can return to such code: `weight` and `bias` of all ranks.

    They are gathered where they are read, once for each object. The gradient of each rank's part is that of the whole,
    if all tensor-parallel ranks compute the same from it. Other attributes, and calls, are those of the head.

    Args:
        head: the model's own head.

    Reading them raises a ValueError with sequence or context parallelism.
    """

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    @cached_property
    def weight(self) -> Tensor:
        """The weight of all ranks, `[vocab, hidden]`."""
        return self._gathered(self._head.weight.transpose(0, 1)).transpose(0, 1)  # type: ignore[operator]

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias of all ranks, `[vocab]`; None if there is none."""
        bias: Tensor | None = getattr(self._head, "bias", None)
        return None if bias is None else self._gathered(bias)

    def __getattr__(self, name: str) -> object:
        return getattr(self._head, name)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the head's logits."""
        logits: Tensor = self._head(hidden)
        return logits

    def _gathered(self, part: Tensor) -> Tensor:
        is_split = isinstance(self._head, ColumnParallelLinear)
        if active_group("cp").size > 1 or (is_split and self._head.sequence_parallel_enabled):
            raise ValueError(
                "the head's inputs are parts of sequences, to which its weight cannot be applied from outside; leave "
                "sequence_parallel and context_parallel_size out, or call the model's own forward"
            )
        if not isinstance(self._head, ColumnParallelLinear):
            return part
        return gathered_output(part, self._head)
