"""The prompt of `generate()` over context-parallel ranks.

Each rank computes its own positions and keeps their keys and values. Then all ranks get all of them, in the cache that
`generate()` has made, and decode together, as without context parallelism.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import active_group, broadcast
from torch import Tensor

from nxd_layers.context import SequenceCut, whole_sequence
from nxd_layers.hf.transformers_models import empty_cache

_SHORTEST_PROMPT = 512  # positions; shorter prompts are not worth splitting
_KEYS_DIM = 2  # of the sequence in keys and values `[batch, kv_heads, seq, head]`
_NOT_CUT = ("output_attentions", "output_hidden_states")
_TENSORS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")


def is_prompt(given: Mapping[str, Any], length: int, cache: Any) -> bool:
    """Return whether a forward of `generate()` reads a prompt that is worth splitting; the same on all ranks.

    Args:
        given: the model's arguments, by name.
        length: number of positions.
        cache: the cache of transformers that is given to the model, or None.
    """
    mask = given.get("attention_mask")
    last_only = given.get("logits_to_keep")
    return (
        length >= _SHORTEST_PROMPT
        and cache is not None
        and cache.get_seq_length() == 0
        and isinstance(last_only, int)
        and last_only == 1
        and not any(given.get(name) for name in _NOT_CUT)
        and all(name in _TENSORS for name, it in given.items() if isinstance(it, Tensor))
        and (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2))
    )


@dataclass
class Prefill:
    """The forward of a prompt.

    Attributes:
        cut: how its positions are split.
        cache: the cache that `generate()` reads.
        local: the cache of this rank's positions.
    """

    cut: SequenceCut
    cache: Any
    local: Any

    @classmethod
    def of(cls, cut: SequenceCut, cache: Any) -> "Prefill":
        """Prepare a forward whose keys and values are for a cache of transformers that is still empty."""
        return cls(cut, cache, empty_cache())

    def arguments(self, device: torch.device, cache_name: str) -> dict[str, Any]:
        """Return the arguments that replace the cache, by its name in the model, and `logits_to_keep=1`."""
        positions = self.cut.positions_of(active_group("cp").rank)
        # The prompt's last position on the rank that has it; any position on the others, which get that rank's logits.
        place = int((positions - self.cut.length + 1).abs().argmin())
        return {cache_name: self.local, "logits_to_keep": torch.tensor([place], device=device)}

    def finish(self, output: Any, cache_name: str) -> None:
        """Give all ranks the last position's logits, and fill the cache with all ranks' keys and values."""
        group = active_group("cp")
        last = self.cut.rank_of((self.cut.length - 1) // self.cut.chunk_length)
        output.logits = broadcast(output.logits.contiguous(), group, source=last)
        for number, layer in enumerate(self.local.layers):
            if layer.is_initialized:
                keys, values = (whole_sequence(it, self.cut, dim=_KEYS_DIM) for it in (layer.keys, layer.values))
                self.cache.update(keys, values, number)
        setattr(output, cache_name, self.cache)
