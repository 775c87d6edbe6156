"""`neuronx_distributed.overrides.transformer_overrides`: rotary positions, from nxd_neuronx."""

from nxd_neuronx.attention import apply_rotary_pos_emb, rotate_half

__all__ = ["apply_rotary_pos_emb", "rotate_half"]
