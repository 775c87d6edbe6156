"""`neuronx_distributed.optimizer.convert_zero_checkpoints`: the command that converts ZeRO-1 states."""

from nxd_neuronx.zero_conversion import main

if __name__ == "__main__":
    main()

__all__ = ["main"]
