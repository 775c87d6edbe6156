"""`neuronx_distributed.lightning.launcher`: ranks are started by the strategy of nxd_lightning; nothing is public."""

__all__: list[str] = []
