"""`NeuronXLAPrecisionPlugin`: optimizer steps whose gradients the optimizer itself reduces and clips."""

from collections.abc import Callable
from typing import Any

from nxd_state import step_boundary

from nxd_lightning.bases import PrecisionBase
from nxd_lightning.lightning_package import lightning

_Precision: Any = lightning("plugins").Precision


class NeuronXLAPrecisionPlugin(PrecisionBase):
    """Full precision, or that of the model's parameters and `mixed_precision_config`.

    It takes the place of the Trainer's `precision`: give one of them, the strategy works with either.

    Inherits Lightning's `XLAPrecision` on torch-xla, whose reduction of gradients it leaves to the optimizer.

    Args:
        mixed_precision_enabled: taken for scripts that give it; the config says so itself.
    """

    def __init__(self, mixed_precision_enabled: bool = False) -> None:
        super().__init__()

    def __repr__(self) -> str:
        # Lightning shows it where it refuses a plugin beside precision=, before anything of ours is asked.
        return (
            "<NeuronXLAPrecisionPlugin (leave out NeuronXLAPrecisionPlugin, or precision=; the strategy needs neither)>"
        )

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward and backward by `closure`, then the update; on torch-xla the step's graph ends here."""
        result = _Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)
        step_boundary()
        return result
