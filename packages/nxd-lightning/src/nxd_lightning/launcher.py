"""Starting the ranks of a Trainer that was not launched as ranks: the script is run again for each rank."""

import os
import subprocess
from typing import Any

from nxd_state import destroy_model_parallel

from nxd_lightning.lightning_package import fabric, lightning

_ScriptLauncher: Any = lightning("strategies.launchers")._SubprocessScriptLauncher
_command: Any = fabric("strategies.launchers.subprocess_script")._basic_subprocess_cmd


class RankLauncher(_ScriptLauncher):
    """Lightning's launcher of scripts, which sets each rank's environment as torchrun would.

    So a script may ask for ranks anywhere, even before the Trainer is made. It starts nothing under torchrun, where
    the ranks are already running, nor for one rank.
    """

    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes == 1:
            return
        self._check_can_spawn_children()
        destroy_model_parallel()  # of one rank, as which this process has acted until now
        first = self.cluster_environment.node_rank() * self.num_processes
        os.environ.update(
            MASTER_ADDR=self.cluster_environment.main_address,
            MASTER_PORT=str(self.cluster_environment.main_port),
            NODE_RANK=str(self.cluster_environment.node_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
            LOCAL_WORLD_SIZE=str(self.num_processes),
            LOCAL_RANK="0",
            RANK=str(first),
        )
        self.procs = [
            subprocess.Popen(
                _command(),
                env=os.environ | {"LOCAL_RANK": str(local_rank), "RANK": str(first + local_rank)},
            )
            for local_rank in range(1, self.num_processes)
        ]
