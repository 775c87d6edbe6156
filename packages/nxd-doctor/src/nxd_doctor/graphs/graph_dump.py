"""Reads the file that torch-xla dumps each graph to before running it.

With `XLA_SAVE_TENSORS_FILE` and `XLA_SAVE_TENSORS_FMT=hlo`, torch-xla appends a graph at each synchronization: the
Python frames that requested it, then the HLO text between two markers.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from nxd_doctor.graphs.hlo import HloModule
from nxd_doctor.graphs.parse import parse_hlo

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
