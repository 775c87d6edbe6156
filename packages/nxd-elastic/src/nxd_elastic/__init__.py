"""Training that goes on when ranks are lost and when they come, over torchrun's agent and store.

`nxd train --elastic MIN:MAX` is its first user; `run` is for scripts. A lost rank costs the steps since the newest
checkpoint, and a second or two: the other ranks keep their processes.
"""

from nxd_elastic.loop import ChangeMembers, Membership, run

__all__ = ["run", "Membership", "ChangeMembers"]
