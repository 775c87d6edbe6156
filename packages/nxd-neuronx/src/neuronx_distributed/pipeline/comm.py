"""`neuronx_distributed.pipeline.comm`: messages between stages, from nxd_neuronx."""

from nxd_neuronx.stage_messages import (
    MAX_LENGTH,
    MAX_RETRY,
    recv_from,
    recv_python_object,
    send,
    send_python_object,
)
from nxd_state.mesh_getters import rmsg

__all__ = ["MAX_LENGTH", "MAX_RETRY", "recv_from", "recv_python_object", "rmsg", "send", "send_python_object"]
