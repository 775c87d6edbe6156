"""`neuronx_distributed.optimizer.convert_zero_checkpoints`: the command, from nxd_neuronx."""

from nxd_neuronx.zero_conversion import (
    get_parallel_info,
    is_full,
    is_xser,
    main,
    merge_optim_dp_checkpoints,
    split_and_save_ckpts,
)

if __name__ == "__main__":
    main()

__all__ = ["get_parallel_info", "is_full", "is_xser", "main", "merge_optim_dp_checkpoints", "split_and_save_ckpts"]
