"""Checks that this machine is ready to train: runs all checks, earlier ones explaining failures of later ones.

`installation` checks installed packages; this module checks the host: environment variables, limits of open files and
shared and locked memory, the clock, ports, a checkpoint folder, and a collective on two ranks.
"""

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nxd_cli.installation import installed_versions, own_packages
from nxd_cli.output import show_memory

from nxd_doctor.installation import (
    OTHERS,
    Finding,
    check_devices,
    check_import_name,
    check_kernels,
    check_neuron,
    check_own_packages,
    check_torch,
    check_torch_import,
    check_transformers,
    check_xla,
    find_devices,
    find_kernels,
    import_location,
    ok,
    other_owner,
    own_location,
    torch_import_failure,
    warning,
    wrong,
)


def examine(
    folder: str | Path | None = None, *, try_ranks: bool = True, show_output: Callable[[str], None] | None = None
) -> Iterator[Finding]:
    """Check this machine and yield each finding as it is made.

    Args:
        folder: the checkpoint folder, or its URL; not checked if None.
        try_ranks: whether to start two ranks, which takes some seconds; they are never started if torch does not work.
        show_output: function that is called with the output of the two ranks.
    """
    versions = installed_versions((*own_packages(), *OTHERS))
    torch = check_torch(versions)
    yield torch
    yield check_own_packages(versions)
    yield check_import_name(other_owner(), import_location(), own_location())
    yield check_xla(versions)
    import_of_torch = check_torch_import(torch_import_failure())
    if torch.status == "ok":
        yield import_of_torch
    if torch.status == import_of_torch.status == "ok":
        devices = find_devices()
        yield check_devices(devices)
        if not devices.problem:
            yield check_kernels(find_kernels())
        yield check_neuron(versions, has_device=devices.neuron > 0)
    yield check_transformers(versions)
    yield from check_environment(os.environ)
    yield check_open_files(*open_files_limits())
    yield check_shared_memory(free_shared_memory())
    yield check_locked_memory(*resource.getrlimit(resource.RLIMIT_MEMLOCK), rdma_devices())
    yield check_clock(*read_clock())
    yield check_rendezvous(os.environ)
    yield check_loopback()
    if folder is not None:
        yield check_writable_folder(folder)
    if try_ranks and torch.status == import_of_torch.status == "ok":
        timeout = seconds_for_ranks(os.environ)
        code, output = run_two_ranks(timeout)
        if show_output is not None:
            show_output(output)
        yield check_collective(code, output, timeout)


# Variables with effects on a job that are easily forgotten.
SURPRISES = {
    "XLA_USE_BF16": "all float32 tensors are bfloat16 on the device; use a bfloat16 model instead",
    "XLA_DOWNCAST_BF16": "float32 becomes bfloat16 and float64 float32 on the device; use a bfloat16 model instead",
    "NEURON_EXTRACT_GRAPHS_ONLY": "graphs are only compiled and all results are zeros; unset it to train",
    "NEURON_CC_FLAGS": "these flags change the compiled code and which cached graphs are found",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel; unset it to train",
}
READ_HERE = (
    *("NXD_DEVICE", "NXD_CPU_MODE", "NXD_LOG_LEVEL", "NXD_SHM", "NXD_TIMEOUT", "NXD_DEBUG_COLLECTIVES", "PJRT_DEVICE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),  # `nxd` sets them for tasks of Slurm
)


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Findings about environment variables: those that are set, and each one that is likely to surprise."""
    name = "environment"
    findings = []
    devices = environment.get("NXD_DEVICE", "")
    if environment.get("NXD_CPU_MODE") == "1" and devices not in ("", "cpu"):
        found = f"NXD_CPU_MODE=1 and NXD_DEVICE={devices}"
        findings.append(wrong(name, found, "they contradict each other, and NXD_CPU_MODE wins; unset one"))
    if "NEURON_RT_NUM_CORES" in environment and "NEURON_RT_VISIBLE_CORES" in environment:
        found = "NEURON_RT_NUM_CORES and NEURON_RT_VISIBLE_CORES are both set"
        findings.append(warning(name, found, "the runtime uses NEURON_RT_VISIBLE_CORES; unset the other"))
    for variable, effect in SURPRISES.items():
        value = environment.get(variable, "")
        if value not in ("", "0"):
            findings.append(warning(name, f"{variable}={value}", effect))
    listed = ", ".join(f"{variable}={environment[variable]}" for variable in READ_HERE if variable in environment)
    return findings or [ok(name, listed or "none of the variables that these packages read is set")]


FEWEST_FILES, ENOUGH_FILES = 1024, 4096
SHARED_MEMORY = Path("/dev/shm")
RDMA_DEVICES = Path("/sys/class/infiniband")
LEAST_SHARED_MEMORY, ENOUGH_SHARED_MEMORY = 64 << 20, 1 << 30


def open_files_limits() -> tuple[int, int]:
    """The soft and hard limits of open files of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def check_open_files(soft: int, hard: int) -> Finding:
    """Whether ranks, data loaders and checkpoints can open enough files; connections between ranks also count."""
    name = "open files"
    found = f"{_count(soft)} (hard limit {_count(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return ok(name, found)
    if hard == resource.RLIM_INFINITY or hard >= ENOUGH_FILES:
        mend = f"ulimit -n {ENOUGH_FILES}, before the job starts"
    else:
        mend = (
            f"the hard limit must be at least {ENOUGH_FILES}, and only root can raise it: LimitNOFILE= in the systemd "
            "unit that starts the job (slurmd, the container runtime); nofile in /etc/security/limits.conf for logins"
        )
    if soft < FEWEST_FILES:
        return wrong(name, found, mend)
    return warning(name, f"{found}; jobs with hundreds of ranks need {ENOUGH_FILES}", mend)


def free_shared_memory() -> int | None:
    """Free bytes in the host's shared memory; None if it does not exist."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None


def check_shared_memory(free: int | None) -> Finding:
    """Whether data loaders and ranks on one host can share tensors; containers get 64 MiB by default."""
    name = "shared memory"
    if free is None:
        return warning(name, f"no {SHARED_MEMORY}", "mount it (tmpfs), or use num_workers=0 in data loaders")
    found = f"{show_memory(free)} free in {SHARED_MEMORY}"
    mend = "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium Memory), or free some"
    if free < LEAST_SHARED_MEMORY:
        return wrong(name, found, mend)
    if free < ENOUGH_SHARED_MEMORY:
        return warning(name, found, mend)
    return ok(name, found)


def rdma_devices() -> list[str]:
    """The names of the host's RDMA devices: InfiniBand, RoCE or EFA."""
    return sorted(os.listdir(RDMA_DEVICES)) if RDMA_DEVICES.is_dir() else []


def check_locked_memory(soft: int, hard: int, devices: list[str]) -> Finding:
    """Whether NCCL can lock the buffers that an RDMA device reads and writes.

    Args:
        soft: the soft limit of locked memory, in bytes.
        hard: the hard limit.
        devices: the names of the host's RDMA devices.
    """
    name = "locked memory"
    found = f"{_bytes(soft)} (hard limit {_bytes(hard)}), {', '.join(devices) or 'no RDMA device'}"
    if not devices or soft == resource.RLIM_INFINITY:
        return ok(name, found)
    if hard == resource.RLIM_INFINITY:
        return warning(name, found, "ulimit -l unlimited, before the job starts")
    mend = "set LimitMEMLOCK=infinity in the systemd unit that starts the job, or give the container IPC_LOCK"
    return warning(name, found, mend)


def _bytes(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else show_memory(limit)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


EARLIEST = 1_735_689_600  # 2025-01-01: before any of these packages


def check_clock(now: float, monotonic: tuple[float, float]) -> Finding:
    """Whether the time is plausible and moves forward.

    Args:
        now: seconds since 1970.
        monotonic: two readings of the monotonic clock, one after the other.
    """
    name = "clock"
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < EARLIEST:
        return wrong(name, f"{shown}, which is in the past", "set and synchronize the clock: timedatectl set-ntp true")
    if monotonic[1] < monotonic[0]:
        return wrong(name, "the monotonic clock runs backwards", "restart the host; its time source is broken")
    return ok(name, shown)


def read_clock() -> tuple[float, tuple[float, float]]:
    """Read the arguments of `check_clock`."""
    return time.time(), (time.monotonic(), time.monotonic())


HIGHEST_PORT = 65_535


def check_rendezvous(environment: Mapping[str, str]) -> Finding:
    """Whether MASTER_ADDR and MASTER_PORT, if set, can be used.

    The host must have an address; if it is this host, the port must be free.
    """
    name = "rendezvous"
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host is None and port is None:
        return ok(name, "MASTER_ADDR and MASTER_PORT are unset: torchrun chooses them")
    if host is None or port is None:
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        return wrong(name, f"{missing} is unset, but the other is set", f"set {missing}, or leave both to torchrun")
    if not port.isdecimal() or not 0 < int(port) <= HIGHEST_PORT:
        return wrong(name, f"MASTER_PORT={port}", f"use a free port from 1024 to {HIGHEST_PORT}")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        return wrong(
            name, f"MASTER_ADDR={host} has no address: {error}", "use a name or address that every host can reach"
        )
    if _is_here(host) and not _is_free(port):
        return wrong(name, f"port {port} is in use", "stop what listens there (ss -ltnp), or set another MASTER_PORT")
    return ok(name, f"{host}:{port}")


def check_loopback() -> Finding:
    """Whether a process can listen on this host and another one can connect to it."""
    name = "ports"
    host = socket.gethostname()
    mend = "allow processes on this host to connect to 127.0.0.1 (firewall, sandbox, network namespace)"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return wrong(name, f"a connection to 127.0.0.1 failed: {error}", mend)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        found = f"the host's own name {host} has no address: {error}"
        return wrong(
            name, found, f"add it to /etc/hosts, with the address by which other hosts reach it: ADDRESS {host}"
        )
    return ok(name, "processes on this host can connect")


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _is_free(port: str) -> bool:
    try:
        with socket.create_server(("", int(port))):
            return True
    except OSError:
        return False


ENOUGH_BYTES = 10 << 30
MOST_SKEW_SECONDS = 5.0


def check_writable_folder(folder: str | Path, free: int | None = None) -> Finding:
    """Check a folder by writing, flushing, renaming and removing a file in it.

    Args:
        folder: the folder, or one to create in an existing folder. The URL of an object store is not checked.
        free: free bytes on its disk; measured if None.
    """
    name = f"folder {folder}"
    if "://" in str(folder):
        return warning(name, "is in an object store, which is not checked", f"try it: nxd-ckpt list {folder}")
    path = Path(folder).absolute()
    place = next(it for it in (path, *path.parents) if os.path.lexists(it))
    if not place.is_dir() or place not in (path, path.parent):
        return _without_parent(name, path, place)
    try:
        with tempfile.TemporaryDirectory(prefix=".nxd-doctor-", dir=place) as trial:
            Path(trial, path.relative_to(place)).mkdir(exist_ok=True)
            first, second = Path(trial, "first"), Path(trial, "second")
            with first.open("wb") as file:
                file.write(b"written by nxd doctor")
                os.fsync(file.fileno())
            os.replace(first, second)
            skew = second.stat().st_mtime - time.time()
    except OSError as error:
        return wrong(name, f"cannot be written: {error}", "give this user write permission, or choose another folder")
    free = shutil.disk_usage(place).free if free is None else free
    if abs(skew) > MOST_SKEW_SECONDS:
        found = f"its file server's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this host's"
        return warning(name, found, "synchronize both with a time server: timedatectl set-ntp true")
    mount = next(it for it in (place, *place.parents) if it.is_mount())
    found = f"writable, {show_memory(free)} free in the file system at {mount}"
    if free < ENOUGH_BYTES:
        mend = "free some space: a checkpoint needs up to 16 bytes per parameter, and the previous one stays until then"
        return warning(name, found, mend)
    return ok(name, found)


def _without_parent(name: str, path: Path, place: Path) -> Finding:
    """The finding for a path below `place`, which exists, that cannot be created or probably should not be."""
    if not place.is_dir():
        return wrong(name, f"{place} is not a folder", "choose a folder")
    mend = f"mount its file system if it has one of its own; otherwise mkdir -p {path.parent}"
    return wrong(name, f"{path.parent} does not exist", mend)


TIMEOUT_SECONDS = 120.0
PROGRAM = """
from nxd_cli.launch import end_with_launcher
end_with_launcher()
import torch
from nxd_state import all_reduce, destroy_model_parallel, get_device, get_world_group, initialize_model_parallel
initialize_model_parallel(2)
group = get_world_group()
total = all_reduce(torch.full((4,), group.rank + 1.0, device=get_device()), group)
assert total.tolist() == [3.0] * 4, total
destroy_model_parallel()
"""
LAUNCHER = "import sys; from nxd_cli.launch import launch_ranks; sys.exit(launch_ranks(2, sys.argv[1:]))"
LEFT_TO_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def seconds_for_ranks(environment: Mapping[str, str]) -> float:
    """How long the two ranks may take: `NXD_TIMEOUT`, or two minutes."""
    text = environment.get("NXD_TIMEOUT", "")
    return float(text) if re.fullmatch(r"\d{1,6}(\.\d+)?", text) else TIMEOUT_SECONDS  # the ranks report a mistake


def run_two_ranks(timeout: float = TIMEOUT_SECONDS) -> tuple[int | None, str]:
    """Start two ranks on this machine that all-reduce a tensor.

    Returns:
        Their exit code (None if they did not finish in time), and their output.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_TO_TORCHRUN}
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command,
        env=environment | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks end with it
            output, _ = process.communicate()
            return None, output
        except BaseException:  # such as Ctrl-C, which does not reach ranks in their own session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def check_collective(code: int | None, output: str, timeout: float = TIMEOUT_SECONDS) -> Finding:
    """Whether the two ranks computed the sum in time."""
    name = "two ranks"
    if code == 0:
        return ok(name, "the all-reduce works")
    if code is None:
        mend = (
            "the ranks wait for each other, or the machine is busy: check the findings above, then try "
            f"NXD_DEVICE=cpu nxd doctor, or NXD_TIMEOUT={10 * timeout:.0f}"
        )
        return wrong(name, f"did not finish in {timeout:.0f} seconds", mend)
    errors = [line.strip() for line in output.splitlines() if "Error" in line and "ChildFailed" not in line]
    return wrong(
        name,
        f"failed: {errors[0] if errors else f'exit code {code}'}",
        "nxd doctor --show-output shows all their output",
    )
