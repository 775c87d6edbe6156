"""Records the graphs that torch-xla runs during some steps, by telling torch-xla to dump them to a file."""

import atexit
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from nxd_state.device import check_torch_xla, torch_xla_module
from nxd_state.neuron_errors import explain_by, place_in_model

from nxd_doctor.graphs.counters import read_counters
from nxd_doctor.graphs.graph_dump import CapturedGraph, read_graphs
from nxd_doctor.graphs.hlo import HloModule
from nxd_doctor.graphs.liveness import peak_memory

_FILE = "XLA_SAVE_TENSORS_FILE"


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
    explain_by(RecordedGraphs(lambda: [graph.module for graph in recent_graphs()]))


class RecordedGraphs:
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
        count: how often to call it.

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
