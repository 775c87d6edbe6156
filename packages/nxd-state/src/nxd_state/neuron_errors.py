"""Errors of the device's compiler and of its memory, reported with the module of the user's model that they concern.

What a compiler says of an instruction has its metadata (the scopes of modules, and a source line) or at least its name,
which a recorded graph explains: nxd-doctor records graphs, and lends them here. Messages are recognised by the words
that neuronx-cc, the Neuron runtime and XLA use; any other error passes unchanged.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

_OUT_OF_MEMORY = re.compile(
    r"out of memory|RESOURCE_EXHAUSTED|NRT_RESOURCE|Allocation Failure|Failed to allocate|NCC_EOOM\d+|NCC_EVRF009",
    re.IGNORECASE,
)
_NOT_COMPILED = re.compile(r"RunNeuronCCImpl|neuronx-cc|NCC_[A-Z]+\d+|Compilation fail", re.IGNORECASE)
_CODE = re.compile(r"NCC_[A-Z]+\d+|NRT_[A-Z_]+|RESOURCE_EXHAUSTED")
_METADATA = re.compile(r"metadata=\{([^}]*)\}")
_SCOPE_NUMBER = re.compile(r"\.\d+$")
_OPERATION = re.compile(r"(aten|xla|prim)__\w+")
_NAME = re.compile(r"%?\b([a-z][a-z\-]*(?:\.[a-z]+)*\.\d+)\b")

_SAVE_MEMORY = (
    "use smaller microbatches, activation checkpointing, ZeRO-1 or a larger tensor- or pipeline-parallel degree; "
    "`nxd doctor --graph` lists the tensors alive at the peak"
)
_FIND_CODE = "the error code is explained in the Neuron documentation, under Neuron Compiler Error Codes"
_GET_NAMES = (
    "the message names no operation; with nxd_doctor.graphs.start_capture() at the program's beginning, or "
    "XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1 in its environment, it may"
)


class DeviceError(RuntimeError):
    """The device's compiler refused a graph, or the device ran out of memory. The cause is the original error."""


class RecordedGraphs(Protocol):
    """The graphs submitted to the device before an error."""

    def place_of(self, instruction: str) -> str | None:
        """Module and source line of an instruction of that name; None if no graph has it."""

    def largest(self) -> str:
        """The memory that the largest graph needs, as text; empty if none was recorded."""


_recorded: RecordedGraphs | None = None


def explain_by(recorded: RecordedGraphs) -> None:
    """Use these graphs to explain device errors from now on."""
    global _recorded  # noqa: PLW0603 - one process, one device
    _recorded = recorded


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn errors of the device's compiler and memory into `DeviceError`, which names the module."""
    try:
        yield
    except RuntimeError as error:
        explained = explain_device_error(str(error), _recorded)
        if explained is None:
            raise
        raise DeviceError(explained) from error


def explain_device_error(message: str, recorded: RecordedGraphs | None = None) -> str | None:
    """An explanation: the error, its place in the model, and advice; None for other messages.

    Args:
        message: the message of the compiler or the runtime.
        recorded: graphs from before it; they run while the program continues, so it need not be the last.
    """
    out_of_memory = _OUT_OF_MEMORY.search(message) is not None
    if not out_of_memory and not _NOT_COMPILED.search(message):
        return None
    code = _CODE.search(message)
    what = "the device ran out of memory" if out_of_memory else "the compiler refused the graph"
    places = _places(message, recorded)
    largest = recorded.largest() if out_of_memory and recorded is not None else ""
    parts = [f"{what}{f' ({code[0]})' if code else ''}{f' in {places[0]}' if places else ''}"]
    if len(places) > 1:
        parts.append(f"also named: {', '.join(places[1:4])}")
    if largest:
        parts.append(largest)
    elif not places:
        parts.append(_GET_NAMES)
    parts.append(_SAVE_MEMORY if out_of_memory else _FIND_CODE)
    return "\n".join([*parts, f"the message was: {message.strip()}"])


def _places(message: str, recorded: RecordedGraphs | None) -> list[str]:
    """Modules and source lines that the message is about, the first named first."""
    places: list[str | None] = []
    for text in _METADATA.findall(message):
        metadata = {key: quoted or bare for key, quoted, bare in re.findall(r'(\w+)=(?:"([^"]*)"|(\S+))', text)}
        places.append(place_in_model(metadata))
    if recorded is not None:
        places += [recorded.place_of(name) for name in _NAME.findall(message)]
    return list(dict.fromkeys(filter(None, places)))


def place_in_model(metadata: Mapping[str, str]) -> str:
    """Module path and source line of an instruction, by what XLA's compilers keep of it: "layers.0.mlp (moe.py:71)"."""
    path, line = module_path(metadata), source_line(metadata)
    return f"{path} ({line})" if path and line else path or line


def module_path(metadata: Mapping[str, str]) -> str:
    """The scopes of its `op_name`, such as "model.layers.0.mlp"; empty where the graph was made without names.

    torch-xla joins scopes by "/" and numbers each use of one ("layers.0.7/mlp.8"); the numbers are taken off, and
    scopes that are operations.
    """
    scopes = metadata.get("op_name", "").split("/")[:-1]
    return ".".join(_SCOPE_NUMBER.sub("", scope) for scope in scopes if not _OPERATION.match(scope))


def source_line(metadata: Mapping[str, str]) -> str:
    """`file:line` of the Python code that made it; empty if unknown."""
    file, line = metadata.get("source_file", ""), metadata.get("source_line", "")
    return f"{file}:{line}" if file not in ("", "-") else ""
