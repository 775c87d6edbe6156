"""What a test must leave as it found it: observed before and after each one, and compared.

Processes that serve the whole session (ranks of the pool, the server of nxd-trace's workers) may come and go.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_OF_THE_SESSION = (b"nxd_testing.worker", b"nxd_trace.workers.fork_server", b"multiprocessing.resource_tracker")
_LISTENS = "0A"  # in the table of TCP connections
# Variables that libraries set when they are loaded: Lightning the one of NVML, torch_xla the last five.
_OF_LIBRARIES = (
    "PYTEST_",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PJRT_",
    "XLA_",
    "TPU_",
    "TF_CPP_",
    "GRPC_",
)

Observation = Mapping[str, Mapping[str, Any]]


def observe() -> Observation:
    """By kind of what can be left behind, what there is of it now, by name."""
    children = {str(pid): _command_line(pid) for pid in _children()}
    of_the_session = {pid: line for pid, line in children.items() if any(mark in line for mark in _OF_THE_SESSION)}
    return {
        "torch.distributed": _process_groups(),
        "mesh": _mesh(),
        "torch's settings": _torch_settings(),
        "registered style": dict.fromkeys(_styles()),
        "environment variable": {
            name: value for name, value in os.environ.items() if not name.startswith(_OF_LIBRARIES)
        },
        "working directory": {"is": os.getcwd()},
        "child process": {pid: line for pid, line in children.items() if pid not in of_the_session},
        "process of the session": of_the_session,
        "open descriptor": _memory_and_sockets(),
        "loaded": {name: True for name in ("torch._dynamo",) if name in sys.modules},
    }


def left_behind(before: Observation, after: Observation) -> list[str]:
    """What a test has left behind, or changed, a line each."""
    kinds = set(before) - {"process of the session", "loaded"}
    kinds -= {kind for kind in ("torch's settings", "registered style") if not before[kind]}  # loaded by the test
    # Processes of the session have connections to this one, and torch's compiler keeps the process group that there
    # is when it is loaded.
    if any(before[kind].keys() != after[kind].keys() for kind in ("process of the session", "loaded")):
        kinds.remove("open descriptor")
    lines = []
    for kind in sorted(kinds):
        for name, value in _changed(kind, before[kind], after[kind]).items():
            if name in before[kind]:
                lines.append(f"{kind} {name}: {value!r}, was {before[kind][name]!r}")
            else:
                lines.append(f"{kind} {name}: {value!r:.300}")
    removed = before["environment variable"].keys() - after["environment variable"].keys()
    return [*lines, *(f"environment variable {name}: removed" for name in sorted(removed))]


def _changed(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    if kind == "child process":  # one that was there may have executed another program meanwhile
        return {name: value for name, value in after.items() if name not in before}
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    if kind == "open descriptor" and changed:  # looked up where it matters: the tables are long
        accepted = _accepted_connections(set(after.values()))
        return {name: target for name, target in changed.items() if target not in accepted}
    return changed


def _process_groups() -> dict[str, Any]:
    dist: Any = sys.modules.get("torch.distributed")
    return {"process group": dist.get_world_size()} if dist is not None and dist.is_initialized() else {}


def _mesh() -> dict[str, Any]:
    state: Any = sys.modules.get("nxd_state")
    initialized = state is not None and state.model_parallel_is_initialized()
    return {"is initialised": str(state.get_mesh())} if initialized else {}


def _torch_settings() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
    }


def _styles() -> list[str]:
    styles: Any = sys.modules.get("nxd_layers.hf.styles")
    return [] if styles is None else sorted(styles._STYLES)


def _children() -> list[int]:
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            pids += map(int, (task / "children").read_text().split())
    return [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    """Whether a child has not ended; one that has is still there until it is waited for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def _command_line(pid: int) -> bytes:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return b""


def _memory_and_sockets() -> dict[str, str]:
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets[name] = os.readlink(f"/proc/self/fd/{name}")
    return {
        f"{name} ({target})": target for name, target in targets.items() if target.startswith(("socket:", "/memfd:"))
    }


def _accepted_connections(targets: set[str]) -> set[str]:
    """Those of a server in this process, such as the pool's store: its clients end them when they like."""
    own = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
        own += [(row[1].rpartition(":")[2], row[3], f"socket:[{row[9]}]") for row in rows]
    own = [row for row in own if row[2] in targets]
    listening = {port for port, state, _ in own if state == _LISTENS}
    return {target for port, state, target in own if state != _LISTENS and port in listening}
