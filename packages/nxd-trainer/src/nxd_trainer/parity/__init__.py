"""Is a layout what one process is? The first tensor that differs, for who wonders why a loss does.

Here live the comparison and its report; the command that runs it is `nxd parity`.
"""

from nxd_trainer.parity.case import ParityCase
from nxd_trainer.parity.compare import compare
from nxd_trainer.parity.float64 import InFloat64
from nxd_trainer.parity.report import Difference, ParityReport

__all__ = ["ParityCase", "compare", "InFloat64", "ParityReport", "Difference"]
