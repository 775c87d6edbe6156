"""Is this machine ready to train, and what does the device's compiler get from a training step? See `nxd doctor`."""

from nxd_trainer.doctor.installation import Finding, Status
from nxd_trainer.doctor.machine import examine

__all__ = ["examine", "Finding", "Status"]
