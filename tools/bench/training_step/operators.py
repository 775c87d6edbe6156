"""The operators of one step, as PyTorch's dispatcher sees them: how often and how long each runs, collectives too."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from processes.over_gloo import over_gloo
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from training_step.step import Trainee

# torch names the same collective differently where it works in place and where it does not.
_COLLECTIVES = {
    "c10d.allreduce_": "all-reduce",
    "c10d._allgather_base_": "all-gather",
    "c10d.alltoall_base_": "all-to-all",
    "_c10d_functional.all_reduce": "all-reduce",
    "_c10d_functional.all_gather_into_tensor": "all-gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce-scatter",
}
_NO_COLLECTIVES = {"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}


class _OperatorLog(TorchDispatchMode):
    """Counts and times operators on plain tensors: a DTensor's are seen when it calls those of its local part."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        self.calls[name] += 1
        self.seconds[name] += time.perf_counter() - start
        return result


def count_collectives(trainee: Trainee) -> dict[str, int]:
    """Number of collectives of a step, by kind."""
    with over_gloo(), _OperatorLog() as log:
        trainee.step()
    counts: Counter[str] = Counter()
    for name, number in log.calls.items():
        if name.startswith(("c10d.", "_c10d_functional.")) and name not in _NO_COLLECTIVES:
            counts[_COLLECTIVES.get(name, name)] += number
    return dict(counts)


def time_operators(trainee: Trainee) -> dict[str, float]:
    """Seconds of one step by operator; the time to start a collective, not to wait for it."""
    with _OperatorLog() as log:
        trainee.step()
    return dict(log.seconds)
