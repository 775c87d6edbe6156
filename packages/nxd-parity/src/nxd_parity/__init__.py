"""Finds the first tensor that a distributed program computes differently from one process, whatever it is written with.

`record` writes down what a program computes, and `compare` finds the first difference of two recordings and says what
is wrong with it. `InFloat64` computes in float64 throughout, so that a difference is a mistake and not rounding.
"""

from nxd_parity.compare import compare
from nxd_parity.float64 import InFloat64
from nxd_parity.record import record
from nxd_parity.report import Finding, Report

__all__ = ["record", "compare", "Report", "Finding", "InFloat64"]
