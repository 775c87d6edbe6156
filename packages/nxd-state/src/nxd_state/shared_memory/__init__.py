"""Collectives through memory that the ranks of one host share: a third transport behind `nxd_state.collectives`.

For CPU tensors and groups whose ranks are all on one host, unless `NXD_SHM=0`; everything else still uses
torch.distributed. `connection` finds out which groups can; `transport` is what the collectives call,
`graph_kernels` what compiled graphs call; `channel`, `rounds` and `messages` say how ranks meet in the memory,
`progress` and `doorbell` how they wait.
"""

from nxd_state.shared_memory.channel import SharedMemoryError
from nxd_state.shared_memory.connection import Membership, connect
from nxd_state.shared_memory.graph_kernels import serve_graphs
from nxd_state.shared_memory.transport import SharedMemoryTransport

__all__ = ["Membership", "SharedMemoryError", "SharedMemoryTransport", "connect", "serve_graphs"]
