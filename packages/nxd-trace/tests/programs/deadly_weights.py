"""Weights that kill the worker that reads the last of them."""

import os
import signal
from collections.abc import Sequence

from nxd_trace.weights import SafetensorsFiles
from torch import Tensor


class DeadlyWeights(SafetensorsFiles):
    """Kills its process when the tensor `to_value` is read, after others have been replaced."""

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box, except of one tensor."""
        if name == "to_value":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_box(name, offsets, shape)
