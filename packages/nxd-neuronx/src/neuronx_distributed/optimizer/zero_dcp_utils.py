"""`neuronx_distributed.optimizer.zero_dcp_utils`: ZeRO-1 states apart from the model; use checkpoints."""

from nxd_neuronx.not_here import not_here

MAX_RETRY = 3  # of the old writer
(
    get_dcp_aux_infos,
    load_optim_state_dict,
    save_optim_state_dict,
) = not_here(__name__, "dcp", "get_dcp_aux_infos", "load_optim_state_dict", "save_optim_state_dict")

__all__ = ["get_dcp_aux_infos", "load_optim_state_dict", "save_optim_state_dict", "MAX_RETRY"]
