"""`neuronx_distributed.utils`: what training scripts import beside the documented API, from nxd_trainer."""

from nxd_trainer.script_helpers import cpu_mode

from neuronx_distributed.utils import adamw_fp32_optim_params, logger, model_utils

__all__ = ["adamw_fp32_optim_params", "logger", "model_utils", "cpu_mode"]
