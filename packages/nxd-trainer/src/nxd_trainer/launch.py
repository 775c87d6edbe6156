"""Launching ranks: started here through torchrun's own agent, by torchrun, or as a task of a Slurm step.

Under torchrun or Slurm nothing is started: the process is a rank already. Slurm (`srun --ntasks-per-node=8 nxd train
...`) identifies a task by variables of its own; they are translated to torchrun's, which torch.distributed reads.
"""

import ctypes
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

EXIT_STOPPED = 143  # 128 + SIGTERM

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def is_launched() -> bool:
    """Whether this process is a rank that torchrun (or another launcher that sets RANK) has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_ranks(nproc: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` on `nproc` ranks of this machine and wait for them.

    When a rank fails, torchrun ends the others; the failed rank's traceback is what the ranks print first.

    Returns:
        Exit code: 0, 143 after a signal, a rank's own exit code if it is more than 1, else 1.
    """
    # torchrun takes half a second to import, which a single rank should not pay.
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    # Ranks that share the cores must not each start a thread per core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # The agent would report a failure in its own words, after the rank has said what happened.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a port the system picks
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 1:  # the rank has reported the error, or that it was stopped
            return failure.exitcode
        killed = f" (killed by signal {-failure.exitcode})" if failure.exitcode < 0 else ""
        print(f"nxd: rank {rank} failed first{killed}; the other ranks were ended", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"nxd: stopped by signal {int(error.sigval)}; all ranks have ended", file=sys.stderr)
        return EXIT_STOPPED
    return 0


def end_with_launcher() -> None:
    """On Linux, have this rank killed as soon as the process that started it has ended, for whatever reason.

    Otherwise the ranks of a killed launcher would keep training unnoticed, and keep the run's folder locked. A
    checkpoint that is being written is then discarded, and the one before it is intact.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


FIRST_PORT, NUM_PORTS = 20000, 10000


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, for a task of a Slurm step with several tasks; else nothing.

    Variables that are set already are left out, so that a job script can overrule any of them.

    Raises:
        ValueError: the step's list of nodes cannot be read.
    """
    if "RANK" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    told = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        # Every task comes to the same port, and jobs that share a node to different ones.
        "MASTER_PORT": str(FIRST_PORT + int(environ["SLURM_JOB_ID"]) % NUM_PORTS),
    }
    return {name: value for name, value in told.items() if name not in environ}


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `trn[07-12,15],login` gives `trn07`.

    Raises:
        ValueError: not a node list.
    """
    found = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?", nodelist)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodelist!r} is no node list; set MASTER_ADDR to the first host's name")
    return "".join(part or "" for part in found.groups())
