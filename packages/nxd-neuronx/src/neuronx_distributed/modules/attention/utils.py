"""`neuronx_distributed.modules.attention.utils`: rotary positions."""

from nxd_neuronx.attention import ROPE_DEFAULTS, apply_rotary_polar_compatible, apply_scaling, precompute_freqs_cis

__all__ = ["ROPE_DEFAULTS", "apply_scaling", "precompute_freqs_cis", "apply_rotary_polar_compatible"]
