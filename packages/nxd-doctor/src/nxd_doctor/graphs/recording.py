"""Records the graphs of steps without running them: those of a rank whose peers do not exist.

A process that plays one rank of many records the same graphs as that rank would, but has no results. They are set to
zeros, so that the next step begins with tensors on the device, as it should. Results, and with them instructions, may
come in another order than when torch-xla runs the graph, and a view may be created again.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from nxd_state.device import torch_xla_module

from nxd_doctor.graphs.capture import graphs_of, start_capture
from nxd_doctor.graphs.graph_dump import CapturedGraph
from nxd_doctor.graphs.pending_graph import pending_tensors, put_results


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
