"""Recording the graphs that torch-xla runs during some steps: this module tells torch-xla to dump them, and where."""

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
    """Have torch-xla write down every graph of this process from now on, with names and lines of what made it.

    Call it before anything is put on the XLA device: at its first graph, torch-xla decides once and for all. A file
    that `XLA_SAVE_TENSORS_FILE` names already is used, else a temporary one.

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
    torch_xla_module()._XLAC._set_ir_debug(True)  # for a torch-xla that was imported before
    explain_by(RecordedGraphs(lambda: [graph.module for graph in recent_graphs()]))


class RecordedGraphs:
    """Graphs that explain an error of the device; see `nxd_state.neuron_errors`.

    Args:
        graphs: gives the last ones, when there is an error.
    """

    def __init__(self, graphs: Callable[[], Sequence[HloModule]]) -> None:
        self._graphs = graphs

    def place_of(self, instruction: str) -> str | None:
        """Module and source line of an instruction of that name; None if no graph has it."""
        named = [item for graph in self._graphs() for item in graph.instructions() if item.name == instruction]
        return place_in_model(named[-1].metadata) if named else None

    def largest(self) -> str:
        """What the graph that needs most needs; empty if there is none."""
        memories = [peak_memory(graph, updates_in_place=True, largest=3) for graph in self._graphs()]
        if not memories:
            return ""
        memory = max(memories, key=lambda memory: memory.peak)
        shown = ", ".join(f"{item.shape} of {item.place} ({item.num_bytes:,} bytes)" for item in memory.largest)
        return (
            f"the largest of the last graphs needs at most {memory.peak:,} bytes, {memory.arguments:,} of them "
            f"arguments; beside those {shown}"
        )


def capture_steps(step: Callable[[], object], count: int = 1) -> list[list[CapturedGraph]]:
    """Run `step` and record the graphs that it makes torch-xla run.

    Args:
        step: one training step, with `step_boundary()` or `torch_xla.sync()` at its end. What it leaves pending belongs
            to the next.
        count: how often to call it.

    Returns:
        The graphs of each call. A step without host synchronisation has one.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
        RuntimeError: graphs were run and not recorded, since capturing began too late.
    """
    start_capture()
    before = read_counters().executions
    steps = [graphs_of(step) for _ in range(count)]
    ran = read_counters().executions - before
    if ran and not any(steps):
        raise RuntimeError(
            f"{ran} graphs were run and none recorded: torch-xla had run others before capturing began; "
            "call nxd_doctor.graphs.start_capture() before anything is put on the XLA device"
        )
    return steps


def graphs_of(call: Callable[[], object]) -> list[CapturedGraph]:
    """Those that torch-xla writes down while `call` runs; none if it was not told to in time."""
    begins = {file: file.stat().st_size for file in _files()}
    call()
    return read_graphs(_dump_after(begins))


def recent_graphs(count: int = 4) -> list[CapturedGraph]:
    """The last graphs that torch-xla has written down; none if it was not told to."""
    return read_graphs(_dump_after({}))[-count:] if _FILE in os.environ else []


def _files() -> list[Path]:
    """torch-xla adds the number of the device to the name it is given."""
    file = Path(os.environ[_FILE])
    return sorted(file.parent.glob(f"{file.name}*"))


def _dump_after(begins: dict[Path, int]) -> str:
    return "".join(file.read_bytes()[begins.get(file, 0) :].decode() for file in _files())
