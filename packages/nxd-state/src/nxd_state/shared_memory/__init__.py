"""Collectives through memory that the ranks of one host share: a third transport behind `nxd_state.collectives`.

It serves CPU tensors and groups whose ranks are all on one host, unless `NXD_SHM=0`; everything else uses
torch.distributed. `connection` finds the groups that can share memory; `transport` has the methods that collectives
and compiled graphs call; `algorithms` says which rank posts and adds what; `channel` how ranks meet in the `memory`;
`progress` and `wakeups` how they wait.
"""

from nxd_state.shared_memory.channel import SharedMemoryError
from nxd_state.shared_memory.connection import GroupMembers, connect, share_memory
from nxd_state.shared_memory.transport import SharedMemoryTransport

__all__ = ["GroupMembers", "SharedMemoryError", "SharedMemoryTransport", "connect", "share_memory"]
