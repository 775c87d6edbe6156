"""Checks that this machine is ready to train, and inspects the graphs of a training step. See `nxd doctor`."""

from nxd_doctor.installation import Finding, Status
from nxd_doctor.machine import examine

__all__ = ["examine", "Finding", "Status"]
