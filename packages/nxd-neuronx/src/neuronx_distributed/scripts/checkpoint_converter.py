"""`neuronx_distributed.scripts.checkpoint_converter`: converts between whole weights and rank files, over nxd_ckpt."""

import sys

from nxd_neuronx.checkpoint_converter import HOW_TO_RUN, CheckpointConverterBase

__all__ = ["CheckpointConverterBase"]

if __name__ == "__main__":
    print(HOW_TO_RUN, file=sys.stderr)
    sys.exit(2)
