"""`neuronx_distributed.utils.logger`: log lines of many ranks, from nxd_engine."""

from nxd_engine.logs import PackagePathFilter, get_logger
from nxd_engine.logs import log_level as get_log_level

__all__ = ["PackagePathFilter", "get_logger", "get_log_level"]
