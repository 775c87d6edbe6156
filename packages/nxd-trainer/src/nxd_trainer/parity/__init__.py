"""Compares a layout with one process and finds the first tensor that differs, to explain a differing loss.

`nxd parity` runs it on recipes and Hugging Face architectures; `nxd_parity` records and compares. Names are imported on
first use, since `nxd parity --help` needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxd_trainer.parity.case import ParityCase
    from nxd_trainer.parity.comparison import compare

__all__ = ["ParityCase", "compare"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
    from nxd_trainer.parity import case, comparison  # noqa: PLC0415

    return getattr(case if name == "ParityCase" else comparison, name)
