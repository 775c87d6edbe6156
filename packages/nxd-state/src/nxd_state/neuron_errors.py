"""Errors of the device's compiler and of its memory, reported with the module of the user's model that they concern.

What a compiler says of an instruction has its metadata (the scopes that `xla_inspect.module_scopes` opens, and a
source line) or at least its name, which a recorded graph explains. Messages are recognised by the words that
neuronx-cc, the Neuron runtime and XLA use; any other error passes unchanged.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxd_state.xla_inspect import HloModule, Instruction

_OUT_OF_MEMORY = re.compile(
    r"out of memory|RESOURCE_EXHAUSTED|NRT_RESOURCE|Allocation Failure|Failed to allocate|NCC_EOOM\d+|NCC_EVRF009",
    re.IGNORECASE,
)
_NOT_COMPILED = re.compile(r"RunNeuronCCImpl|neuronx-cc|NCC_[A-Z]+\d+|Compilation fail", re.IGNORECASE)
_CODE = re.compile(r"NCC_[A-Z]+\d+|NRT_[A-Z_]+|RESOURCE_EXHAUSTED")
_METADATA = re.compile(r"metadata=\{([^}]*)\}")
_NAME = re.compile(r"%?\b([a-z][a-z\-]*(?:\.[a-z]+)*\.\d+)\b")

_SAVE_MEMORY = (
    "use smaller microbatches, activation checkpointing, ZeRO-1 or a larger tensor- or pipeline-parallel degree; "
    "`nxd doctor --graph` lists what is alive at the peak"
)
_FIND_CODE = "the error code is explained in the Neuron documentation, under Neuron Compiler Error Codes"
_GET_NAMES = (
    "the message names no operation; with nxd_state.xla_inspect.start_capture() at the program's beginning, or "
    "XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1 in its environment, it may"
)


class DeviceError(RuntimeError):
    """The device's compiler refused a graph, or its memory did not suffice. The cause is the original error."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn errors of the device's compiler and memory into `DeviceError`, which says where they are from."""
    try:
        yield
    except RuntimeError as error:
        from nxd_state.xla_inspect import recent_graphs  # noqa: PLC0415  (needed only now)

        explained = explain_device_error(str(error), [graph.module for graph in recent_graphs()])
        if explained is None:
            raise
        raise DeviceError(explained) from error


def explain_device_error(message: str, graphs: "Sequence[HloModule]" = ()) -> str | None:
    """An explanation: the error, its place in the model, and advice; None if the message is of another kind.

    Args:
        message: of the compiler or the runtime.
        graphs: those recorded before it; graphs run while the program continues, so it need not be the last.
    """
    out_of_memory = _OUT_OF_MEMORY.search(message) is not None
    if not out_of_memory and not _NOT_COMPILED.search(message):
        return None
    code = _CODE.search(message)
    what = "the device's memory does not suffice" if out_of_memory else "the compiler refused the graph"
    places = _places(message, graphs)
    parts = [f"{what}{f' ({code[0]})' if code else ''}{f' in {places[0]}' if places else ''}"]
    if len(places) > 1:
        parts.append(f"also named: {', '.join(places[1:4])}")
    if out_of_memory and graphs:
        parts.append(_largest(graphs))
    elif not places:
        parts.append(_GET_NAMES)
    parts.append(_SAVE_MEMORY if out_of_memory else _FIND_CODE)
    return "\n".join([*parts, f"the message was: {message.strip()}"])


def _places(message: str, graphs: "Sequence[HloModule]") -> list[str]:
    """Modules and source lines that the message is about, the first named first."""
    from nxd_state.xla_inspect import Instruction, Shape  # noqa: PLC0415  (needed only now)

    places = []
    for text in _METADATA.findall(message):
        metadata = {key: quoted or bare for key, quoted, bare in re.findall(r'(\w+)=(?:"([^"]*)"|(\S+))', text)}
        places.append(_place(Instruction("", Shape(None), "", (), metadata=metadata)))
    known = {item.name: item for graph in graphs for item in graph.instructions()}
    places += [_place(known[name]) for name in _NAME.findall(message) if name in known]
    return list(dict.fromkeys(filter(None, places)))


def _place(item: "Instruction") -> str:
    in_source = f" ({item.source})" if item.source and item.module_path else item.source
    return f"{item.module_path}{in_source}"


def _largest(graphs: "Sequence[HloModule]") -> str:
    from nxd_state.xla_inspect import peak_memory  # noqa: PLC0415  (needed only now)

    memories = [peak_memory(graph, updates_in_place=True, largest=3) for graph in graphs]
    memory = max(memories, key=lambda memory: memory.peak)
    shown = ", ".join(f"{item.shape} of {item.place} ({item.num_bytes:,} bytes)" for item in memory.largest)
    return (
        f"the largest of the last graphs needs at most {memory.peak:,} bytes, {memory.arguments:,} of them arguments; "
        f"beside those {shown}"
    )
