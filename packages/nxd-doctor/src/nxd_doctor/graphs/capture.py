"""Records the graphs that torch-xla builds for some steps, and its counters.

With `XLA_SAVE_TENSORS_FILE` and `XLA_SAVE_TENSORS_FMT=hlo`, torch-xla appends each graph to a file before it runs it:
the Python frames that requested it, then the HLO text between two markers. `record_steps` records without running, for
a rank whose peers do not exist.
"""

import atexit
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nxd_state.device import check_torch_xla, torch_xla_module
from nxd_state.neuron_errors import explain_by, place_in_model

from nxd_doctor.graphs.hlo import HloModule
from nxd_doctor.graphs.liveness import peak_memory
from nxd_doctor.graphs.parse import parse_hlo
from nxd_doctor.graphs.pending_graph import pending_tensors, put_results

_FILE = "XLA_SAVE_TENSORS_FILE"
_BEGIN, _END = "## BEGIN_GRAPH", "## END_GRAPH"
_FRAME = re.compile(r"^\s+(\S+) \((.+):(\d+)\)$", re.MULTILINE)
_SYNCHRONISES = re.compile(r"^step_boundary |[/\\](torch|torch_xla)[/\\]")


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that torch-xla ran.

    Attributes:
        text: the HLO module as text.
        frames: "function (file:line)" of the Python code that requested its results, innermost first.
    """

    text: str
    frames: tuple[str, ...] = ()

    @cached_property
    def module(self) -> HloModule:
        """The parsed text."""
        return parse_hlo(self.text)

    @property
    def asked_by(self) -> str:
        """The innermost frame outside of torch, torch-xla and `step_boundary`; empty if there is none."""
        return next((frame for frame in self.frames if not _SYNCHRONISES.search(frame)), "")


def read_graphs(text: str) -> list[CapturedGraph]:
    """Read the graphs of a dump, in the order in which they ran.

    Raises:
        ValueError: the dump ends in the middle of a graph.
    """
    graphs = []
    begins = text.find(_BEGIN)
    read = 0
    while begins >= 0:
        ends = text.find(_END, begins)
        if ends < 0:
            raise ValueError("the dump ends in the middle of a graph; was the process that wrote it killed?")
        frames = tuple(f"{name} ({file}:{line})" for name, file, line in _FRAME.findall(text, read, begins))
        graphs.append(CapturedGraph(text[begins + len(_BEGIN) : ends].strip() + "\n", frames))
        read = ends
        begins = text.find(_BEGIN, ends)
    return graphs


def start_capture() -> None:
    """Have torch-xla dump every further graph of this process, with the names and source lines of its operations.

    Call it before anything is put on the XLA device: torch-xla decides at its first graph whether to dump. The file
    that `XLA_SAVE_TENSORS_FILE` names is used if set, else a temporary one.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
    """
    check_torch_xla("recording graphs")
    if _FILE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="nxd-graphs-")
        atexit.register(folder.cleanup)
        os.environ[_FILE] = str(Path(folder.name) / "graphs.hlo")
    os.environ["XLA_SAVE_TENSORS_FMT"] = "hlo"
    os.environ["XLA_IR_DEBUG"] = os.environ["XLA_HLO_DEBUG"] = "1"
    torch_xla_module()._XLAC._set_ir_debug(True)  # if torch-xla was imported before
    explain_by(DumpedGraphs(lambda: [graph.module for graph in recent_graphs()]))


class DumpedGraphs:
    """Graphs that help to explain a device error; see `nxd_state.neuron_errors`.

    Args:
        graphs: function that returns the most recent graphs; called when there is an error.
    """

    def __init__(self, graphs: Callable[[], Sequence[HloModule]]) -> None:
        self._graphs = graphs

    def place_of(self, instruction: str) -> str | None:
        """Module and source line of the instruction with that name; None if no graph has it."""
        named = [item for graph in self._graphs() for item in graph.instructions() if item.name == instruction]
        return place_in_model(named[-1].metadata) if named else None

    def largest(self) -> str:
        """The memory of the graph that needs most, as text; empty if there are no graphs."""
        memories = [peak_memory(graph, updates_in_place=True, largest=3) for graph in self._graphs()]
        if not memories:
            return ""
        memory = max(memories, key=lambda memory: memory.peak)
        shown = ", ".join(f"{item.shape} of {item.place} ({item.num_bytes:,} bytes)" for item in memory.largest)
        return (
            f"the largest of the recent graphs needs at most {memory.peak:,} bytes, {memory.arguments:,} of them "
            f"arguments; the largest others are {shown}"
        )


def capture_steps(step: Callable[[], object], count: int = 1) -> list[list[CapturedGraph]]:
    """Run `step` and record the graphs that torch-xla runs for it.

    Args:
        step: one training step, with `step_boundary()` or `torch_xla.sync()` at its end. Operations left pending belong
            to the next step.
        count: number of calls.

    Returns:
        The graphs of each call. A step without host synchronization has one.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
        RuntimeError: graphs were run but not recorded, because capturing began too late.
    """
    start_capture()
    before = read_counters().executions
    steps = [graphs_of(step) for _ in range(count)]
    ran = read_counters().executions - before
    if ran and not any(steps):
        raise RuntimeError(
            f"{ran} graphs were run but none recorded: torch-xla had run others before capturing began; "
            "call nxd_doctor.graphs.start_capture() before anything is put on the XLA device"
        )
    return steps


def graphs_of(call: Callable[[], object]) -> list[CapturedGraph]:
    """The graphs that torch-xla dumps while `call` runs; empty if dumping was not enabled in time."""
    begins = {file: file.stat().st_size for file in _files()}
    call()
    return read_graphs(_dump_after(begins))


def recent_graphs(count: int = 4) -> list[CapturedGraph]:
    """The last graphs that torch-xla has dumped; empty if dumping is not enabled."""
    return read_graphs(_dump_after({}))[-count:] if _FILE in os.environ else []


def _files() -> list[Path]:
    """The dump files; torch-xla appends the device number to the name it is given."""
    file = Path(os.environ[_FILE])
    return sorted(file.parent.glob(f"{file.name}*"))


def _dump_after(begins: dict[Path, int]) -> str:
    return "".join(file.read_bytes()[begins.get(file, 0) :].decode() for file in _files())


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


def record_steps(step: Callable[[], object], count: int = 1) -> list[list[CapturedGraph]]:
    """Like `capture_steps`, but every `torch_xla.sync()` in `step` only records; nothing is compiled or run.

    Args:
        step: one training step, with `step_boundary()` or `torch_xla.sync()` at its end; it must not read results.
        count: how often to call it.

    Returns:
        The graphs of each call.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
        RuntimeError: a step read a value before its end.
    """
    start_capture()
    torch_xla = torch_xla_module()
    graphs: list[CapturedGraph] = []

    def record(*_: Any, **__: Any) -> None:
        pending = pending_tensors()
        if pending:
            firsts = [aliases[0] for aliases in pending]
            graphs.append(CapturedGraph(torch_xla._XLAC._get_xla_tensors_hlo(firsts)))
            put_results(pending, [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in firsts])

    steps = []
    with mock.patch.object(torch_xla, "sync", record):
        record()  # pending operations are not part of the steps
        for _ in range(count):
            graphs.clear()
            early = graphs_of(step)
            if early:
                raise RuntimeError(
                    f"the step reads a value before its end, which splits its graph: {early[0].asked_by}"
                )
            steps.append(graphs.copy())
    return steps
