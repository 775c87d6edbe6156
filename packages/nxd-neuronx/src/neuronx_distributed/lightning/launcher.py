"""`neuronx_distributed.lightning.launcher`: no public names; the strategy of nxd_lightning starts the ranks."""

__all__: list[str] = []
