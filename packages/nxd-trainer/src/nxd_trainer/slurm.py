"""Running as the tasks of a Slurm step (`srun --ntasks-per-node=8 nxd train ...`), without torchrun.

Slurm says who a task is in variables of its own; torch.distributed reads those of torchrun. Here one is told the other.
"""

import re
from collections.abc import Mapping

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
