"""The environment of a training process on AWS Neuron devices: what to set before torch-xla is imported.

torch-xla reads the launcher's variables once, when it is imported, and assigns each process its NeuronCore and its
place in the job accordingly. That is not repeated here. This module sets what torch-xla cannot know, and refuses what
would make it fail on one rank, or hang. A user's own settings are kept. Names and meanings are those of the Neuron
documentation ("PyTorch NeuronX Environment Variables", "Neuron Runtime configuration") and of torch-xla 2.9's
`_internal/neuron.py`.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from nxd_state.device import has_torch_xla

RUNTIME_PORT = 62182  # torch-xla's choice for the runtime's own rendezvous, beside torchrun's
EFA_SETTINGS = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
EXTRACT_GRAPHS = "NEURON_EXTRACT_GRAPHS_ONLY"


def prepare_neuron(
    *,
    model_type: str | None = "transformer",
    compile_cache: str | None = None,
    async_requests: int | None = None,
    efa: bool = False,
) -> dict[str, str]:
    """Set this process's environment by `neuron_settings`. Call it before torch-xla is imported.

    Returns:
        The variables set.

    Raises:
        ValueError: see `neuron_settings`.
        RuntimeError: torch-xla is imported already and would not see the variables.
    """
    settings = neuron_settings(
        os.environ, model_type=model_type, compile_cache=compile_cache, async_requests=async_requests, efa=efa
    )
    if "torch_xla" in sys.modules and settings:
        raise RuntimeError(
            f"torch-xla is imported already and would not see {', '.join(sorted(settings))}; call prepare_neuron() "
            "before anything that imports torch_xla"
        )
    os.environ.update(settings)
    return settings


def neuron_settings(
    environment: Mapping[str, str],
    *,
    model_type: str | None = "transformer",
    compile_cache: str | None = None,
    async_requests: int | None = None,
    efa: bool = False,
) -> dict[str, str]:
    """The variables to add to the environment of a rank; sets nothing.

    Args:
        environment: the launcher's variables `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`.
        model_type: the compiler's `--model-type`; None leaves it out.
        compile_cache: folder or `s3://` URL in which compiled graphs are kept; Neuron's default if None.
        async_requests: graphs that may be under way at once (`NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS`); left to
            torch-neuronx if None.
        efa: set libfabric's variables for the network between hosts.

    Raises:
        ValueError: the settings contradict each other or the launcher's.
    """
    world_size = _number(environment, "WORLD_SIZE", 1)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1)
    check_neuron_environment(environment)
    settings = {"PJRT_DEVICE": "NEURON"}
    if world_size > 1:
        settings["NEURON_RT_ROOT_COMM_ID"] = f"{_bracketed(environment['MASTER_ADDR'])}:{RUNTIME_PORT}"
        # torch-xla takes ranks from the launcher's variables only if it believes that torchrun is the launcher.
        settings["TORCHELASTIC_RUN_ID"] = "nxd"
    if async_requests is not None:
        settings["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] = str(async_requests)
    if efa and world_size > local_world_size:
        settings |= EFA_SETTINGS
    settings = {name: value for name, value in settings.items() if name not in environment}
    given = environment.get("NEURON_CC_FLAGS", "")
    cache = None if "NEURON_COMPILE_CACHE_URL" in environment else compile_cache
    flags = compiler_flags(given, model_type=model_type, compile_cache=cache)
    return settings if flags == given else settings | {"NEURON_CC_FLAGS": flags}


def compiler_flags(given: str, *, model_type: str | None = None, compile_cache: str | None = None) -> str:
    """`NEURON_CC_FLAGS` with the missing flags appended.

    Args:
        given: the flags that a user has set, which stay as they are.
    """
    names = {word.partition("=")[0] for word in shlex.split(given)}
    added = {"--model-type": model_type, "--cache_dir": compile_cache}
    missing = [f"{name}={shlex.quote(value)}" for name, value in added.items() if value and name not in names]
    return " ".join([*([given.strip()] if given.strip() else []), *missing])


def check_neuron_environment(environment: Mapping[str, str]) -> None:
    """Refuse settings that would fail on one rank only, hang, or be ignored.

    Raises:
        ValueError: lists all mistakes.
    """
    world_size = _number(environment, "WORLD_SIZE", 1)
    mistakes = []
    device = environment.get("PJRT_DEVICE", "NEURON")
    if device != "NEURON":
        mistakes.append(f"PJRT_DEVICE={device} asks for another device; unset it or set PJRT_DEVICE=NEURON")
    if world_size > 1:
        needed = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        if missing := [name for name in needed if not environment.get(name)]:
            mistakes.append(f"WORLD_SIZE={world_size} without {', '.join(missing)}; start the ranks with torchrun")
    mistakes += _wrong_cores(environment)
    root, port = environment.get("NEURON_RT_ROOT_COMM_ID", ""), environment.get("MASTER_PORT")
    if root and not root.rpartition(":")[2].isdigit():
        mistakes.append(f"NEURON_RT_ROOT_COMM_ID={root} is not host:port, the same on every rank")
    elif root and root.rpartition(":")[2] == port:
        mistakes.append(
            f"NEURON_RT_ROOT_COMM_ID={root} has the port of torchrun's own rendezvous; use another, as {RUNTIME_PORT}"
        )
    if mistakes:
        raise ValueError("the environment does not fit Neuron devices: " + "; ".join(mistakes))


def computes_on_neuron(environment: Mapping[str, str] | None = None) -> bool:
    """Whether `get_device` gives a Neuron device of torch-xla, judged by the environment and this host's devices.

    Args:
        environment: this process's if None.
    """
    given = os.environ if environment is None else environment
    if given.get("NXD_CPU_MODE") == "1" or given.get("NXD_DEVICE", "xla") != "xla":
        return False
    if "PJRT_DEVICE" in given:
        return given["PJRT_DEVICE"] == "NEURON"
    return Path("/dev/neuron0").exists() and has_torch_xla()  # without torch-xla it is torch's native device


def extracting_graphs(environment: Mapping[str, str] | None = None) -> bool:
    """Whether `neuron_parallel_compile` is collecting graphs: steps then compute zeros and must not write anything.

    Args:
        environment: this process's if None.
    """
    value = (os.environ if environment is None else environment).get(EXTRACT_GRAPHS, "")
    return value not in ("", "0")


def visible_cores(text: str) -> tuple[int, ...]:
    """The NeuronCores of `NEURON_RT_VISIBLE_CORES`, such as "0-3,8".

    Raises:
        ValueError: the text is not of that form, or lists a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            raise ValueError(f"NEURON_RT_VISIBLE_CORES={text} is not a list of cores and ranges; write it like 0-3,8")
        cores += range(int(first), int(last or first) + 1)
    if len(set(cores)) < len(cores):
        raise ValueError(f"NEURON_RT_VISIBLE_CORES={text} lists a core twice; list each core once")
    return tuple(cores)


def _wrong_cores(environment: Mapping[str, str]) -> list[str]:
    """One process uses one core: torch-xla picks the one of its local rank out of the visible ones."""
    mistakes = []
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1)
    if text := environment.get("NEURON_RT_VISIBLE_CORES"):
        try:
            cores = visible_cores(text)
        except ValueError as error:
            return [str(error)]
        if len(cores) != local_world_size:
            mistakes.append(
                f"NEURON_RT_VISIBLE_CORES={text} are {len(cores)} cores for LOCAL_WORLD_SIZE={local_world_size} ranks "
                "of this host; give one core for each, on all of them the same list, or unset it"
            )
    if local_world_size > 1:
        mistakes += [
            f"{name}={environment[name]} is not for processes that a launcher starts; unset it"
            for name in ("NEURONCORE_NUM_DEVICES", "NEURON_RT_NUM_CORES")
            if name in environment
        ]
    return mistakes


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name}={text} must be an integer above 0; start the ranks with torchrun, which sets it")
    return int(text)


def _bracketed(address: str) -> str:
    """An IPv6 address in the brackets that set its port apart."""
    is_ipv6 = address.count(":") > 1 and not address.startswith("[")
    return f"[{address}]" if is_ipv6 else address
