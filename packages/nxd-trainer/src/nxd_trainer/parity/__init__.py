"""Compares a layout with one process and finds the first tensor that differs, to explain a differing loss.

This package has the comparison and its report; `nxd parity` is the command that runs it.
"""

from nxd_trainer.parity.case import ParityCase
from nxd_trainer.parity.compare import Difference, ParityReport, compare

__all__ = ["ParityCase", "compare", "ParityReport", "Difference"]
