"""What torch-xla has counted since the process began: compilations, runs, what fell back to the CPU."""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Counters:
    """Events since the process began, or between two readings (`later - earlier`).

    Attributes:
        compilations: graphs that went through the compiler: each graph that is new to this process.
        executions: graphs that were run.
        transfers_to_host: tensors that were read back, which waits for the device.
        fallbacks: operations that torch-xla has no graph for, so that they ran on the CPU, by name.
    """

    compilations: int
    executions: int
    transfers_to_host: int
    fallbacks: dict[str, int]

    def __sub__(self, earlier: "Counters") -> "Counters":
        more = {name: count - earlier.fallbacks.get(name, 0) for name, count in self.fallbacks.items()}
        return Counters(
            self.compilations - earlier.compilations,
            self.executions - earlier.executions,
            self.transfers_to_host - earlier.transfers_to_host,
            {name: count for name, count in more.items() if count},
        )


def read_counters() -> Counters:
    """As they are now.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
    """
    metrics = _torch_xla_metrics()
    fallbacks = {name: int(metrics.counter_value(name) or 0) for name in metrics.counter_names() if "aten::" in name}
    return Counters(
        compilations=_times(metrics, "CompileTime"),
        executions=_times(metrics, "ExecuteTime"),
        transfers_to_host=_times(metrics, "TransferFromDeviceTime"),
        fallbacks=fallbacks,
    )


def _times(metrics: ModuleType, name: str) -> int:
    data = metrics.metric_data(name)  # (count, sum, samples); None before the first
    return int(data[0]) if data else 0


def _torch_xla_metrics() -> ModuleType:
    if importlib.util.find_spec("torch_xla") is None:
        raise ModuleNotFoundError(
            "these counters need torch-xla, which is not installed: install torch_xla of the same version as torch"
        )
    return importlib.import_module("torch_xla.debug.metrics")
