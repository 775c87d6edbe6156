"""Reads torch-xla's counters: compilations, executions, and operations that fell back to the CPU."""

from dataclasses import dataclass
from typing import Any

from nxd_state.device import check_torch_xla, torch_xla_module


@dataclass(frozen=True)
class Counters:
    """Events since the start of the process, or between two readings (`later - earlier`).

    Attributes:
        compilations: compiled graphs: each graph that is new to this process.
        executions: graph runs.
        transfers_to_host: tensors that were read back, each of which waits for the device.
        fallbacks: operations that ran on the CPU because torch-xla does not support them, by name.
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
    """Read the counters after all submitted graphs have finished.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
    """
    check_torch_xla("counting graphs")
    metrics = torch_xla_module("debug.metrics")
    torch_xla_module("core.xla_model").wait_device_ops()  # graphs run asynchronously
    fallbacks = {name: int(metrics.counter_value(name) or 0) for name in metrics.counter_names() if "aten::" in name}
    return Counters(
        compilations=_times(metrics, "CompileTime"),
        executions=_times(metrics, "ExecuteTime"),
        transfers_to_host=_times(metrics, "TransferFromDeviceTime"),
        fallbacks=fallbacks,
    )


def _times(metrics: Any, name: str) -> int:
    data = metrics.metric_data(name)  # (count, sum, samples); None before the first
    return int(data[0]) if data else 0
