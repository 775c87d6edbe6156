"""Starts the ranks of a Trainer that was not launched as ranks: the script is run again for each rank."""

import os
import socket
import subprocess
import sys
from typing import Any, ClassVar

from nxd_state import destroy_model_parallel, start_store_process

from nxd_lightning.lightning_package import fabric, lightning

_ScriptLauncher: Any = lightning("strategies.launchers")._SubprocessScriptLauncher
_command: Any = fabric("strategies.launchers.subprocess_script")._basic_subprocess_cmd
_LOOPBACK = "127.0.0.1"


class RankLauncher(_ScriptLauncher):
    """Lightning's launcher of scripts, which sets each rank's environment as torchrun would.

    So a script may ask for ranks anywhere, even before the Trainer is created. It starts nothing under torchrun, where
    the ranks are already running, or for one rank.

    Ranks of one host connect through a store that serves this user alone, ranks of several hosts through torch's store
    on rank 0.
    """

    _store: ClassVar["subprocess.Popen[bytes] | None"] = None  # not per Trainer: it would end with the first one

    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes == 1:
            return
        self._check_can_spawn_children()
        destroy_model_parallel()  # the mesh of one rank that this process has had until now
        first = self.cluster_environment.node_rank() * self.num_processes
        os.environ.update(
            **self._store_of_one_host() if self.num_nodes == 1 else self._store_of_rank_0(),
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

    def _store_of_one_host(self) -> dict[str, str]:
        listener = socket.create_server((_LOOPBACK, 0), backlog=2 * self.num_processes)
        port = listener.getsockname()[1]
        RankLauncher._store = start_store_process(listener)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        return {
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not serve it
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def _store_of_rank_0(self) -> dict[str, str]:
        return {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
        }
