"""`neuronx_distributed.modules.moe.loss_function`: the load-balancing loss, from nxd_layers."""

from nxd_neuronx.experts import load_balancing_loss_func

__all__ = ["load_balancing_loss_func"]
