"""Finds the first tensor that a distributed program computes differently from one process, whatever it is written with.

`InFloat64` computes both in float64, so that a difference is a mistake and not rounding.
"""

from nxd_parity.float64 import InFloat64

__all__ = ["InFloat64"]
