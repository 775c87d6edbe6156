"""Weights that kill one of two workers that read them."""

import os
import signal
from collections.abc import Sequence

from nxd_trace.weights import SafetensorsFiles
from torch import Tensor


class DeadlyWeights(SafetensorsFiles):
    """Kills rank 1 when it reads `to_value`, after it has replaced others, and rank 0 perhaps all."""

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box, except of one tensor."""
        if name == "to_value" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_box(name, offsets, shape)
