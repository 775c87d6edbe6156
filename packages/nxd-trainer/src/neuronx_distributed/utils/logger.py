"""`neuronx_distributed.utils.logger`: log lines of many ranks, from nxd_trainer."""

from nxd_trainer.logs import get_logger

__all__ = ["get_logger"]
