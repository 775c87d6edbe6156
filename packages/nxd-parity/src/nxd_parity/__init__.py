"""Compares a layout with one process and finds the first tensor that differs, to explain a differing loss.

This package has the comparison and its report; `nxd parity` is the command that runs it.
"""

from nxd_parity.case import ParityCase
from nxd_parity.compare import Difference, ParityReport, compare
from nxd_parity.float64 import InFloat64

__all__ = ["ParityCase", "compare", "InFloat64", "ParityReport", "Difference"]
