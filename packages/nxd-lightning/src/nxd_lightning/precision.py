"""`NeuronXLAPrecisionPlugin`: optimizer steps whose gradients the optimizer itself reduces, unscales and clips."""

from collections.abc import Callable
from typing import Any

from nxd_engine import NxDOptimizer
from nxd_state import is_lazy_device, step_boundary
from torch import Tensor

from nxd_lightning.lightning_package import PrecisionBase, lightning

_Precision: Any = lightning("plugins").Precision


class OptimizerScalesLoss:
    """Replaces the `GradScaler` of Lightning's plugin: the model scales its loss, and the optimizer unscales gradients.

    Args:
        optimizer: the optimizer, whose loss scaler takes the settings of the `GradScaler`.
        settings: the `state_dict` of the `GradScaler`; empty if it is disabled.
    """

    def __init__(self, optimizer: NxDOptimizer, settings: dict[str, Any]) -> None:
        if optimizer.loss_scaler is None:
            names = {"scale": "initial_scale", **{name: name for name in ("growth_factor", "backoff_factor")}}
            names["growth_interval"] = "growth_interval"
            optimizer.scale_loss(**{ours: settings[it] for it, ours in names.items() if it in settings})

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss: `NeuronLTModule.backward` scales it."""
        return loss

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing: the optimizer's step unscales."""

    def step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step, which skips itself if gradients overflow on any rank."""
        return optimizer.step(**kwargs)

    def update(self) -> None:
        """Do nothing: the optimizer's step adapts the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state is saved with the optimizer's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is restored with the optimizer's."""


def let_optimizer_scale(plugin: Any, optimizers: list[Any]) -> None:
    """Let the optimizer scale the loss if the Trainer's `precision` is to do so, since the model runs backward itself.

    Raises:
        ValueError: the device is XLA.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or isinstance(scaler, OptimizerScalesLoss):
        return
    if is_lazy_device():
        raise ValueError(f'precision={plugin.precision!r} does not support XLA; use precision="bf16-true"')
    for optimizer in optimizers:
        plugin.scaler = OptimizerScalesLoss(optimizer, scaler.state_dict())


class NeuronXLAPrecisionPlugin(PrecisionBase):
    """Full precision, or that of the model's parameters and `mixed_precision_config`.

    It replaces the Trainer's `precision`: pass one of them; the strategy works with either.

    It inherits Lightning's `XLAPrecision` on torch-xla, but leaves the reduction of gradients to the optimizer.

    Args:
        mixed_precision_enabled: accepted without effect; the config determines the precision.
    """

    def __init__(self, mixed_precision_enabled: bool = False) -> None:
        super().__init__()

    def __repr__(self) -> str:
        # Lightning shows this when it refuses a plugin together with precision=, before calling any of our code.
        return "<NeuronXLAPrecisionPlugin (remove NeuronXLAPrecisionPlugin or precision=; the strategy needs neither)>"

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run forward and backward with `closure`, then update; on torch-xla the step's graph ends here."""
        result = _Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)
        step_boundary()
        return result
