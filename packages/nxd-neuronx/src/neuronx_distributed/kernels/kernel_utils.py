"""`neuronx_distributed.kernels.kernel_utils`: what scripts do around kernels, from nxd_neuronx."""

from nxd_neuronx.attention_kernels import cast, check_xla_bf16_flags, permute
from nxd_neuronx.not_here import not_here

(
    get_seed,
    move_seed,
    torch_to_nki_dtype,
) = not_here(__name__, "nki", "get_seed", "move_seed", "torch_to_nki_dtype")

__all__ = ["cast", "check_xla_bf16_flags", "permute", "get_seed", "move_seed", "torch_to_nki_dtype"]
