"""Is this machine ready to train? One file for each thing that is looked at.

A check is a function from what was found to a `Finding`; reading the machine is a function beside it. The command that
runs them all is `nxd doctor`.
"""

from nxd_trainer.doctor.examine import examine
from nxd_trainer.doctor.finding import Finding, Status

__all__ = ["examine", "Finding", "Status"]
