"""Parts of models of transformers that need whole sequences, where these are cut over context-parallel ranks.

Layers that pass a state along the sequence (linear attention, state spaces, short convolutions) get whole sequences,
gathered before them, and each rank computes all of them and keeps its part: exact, with neither time nor activations
saved in these layers. Rotary embeddings whose frequencies depend on the longest position get all positions.
"""

import re
from typing import Any

from nxd_state import active_group
from torch import Tensor, nn

from nxd_layers.context import SequenceCut
from nxd_layers.hf.context_forward import forward_under_way
from nxd_layers.mappings import gather_from_sequence_parallel_region

_SEQUENCE_DIM = 1  # of hidden states [batch, seq, hidden]
_WITH_STATE = re.compile(
    r".*(DeltaNet|DeltaAttention|LightningAttention|ShortConv|MambaMixer|Mamba2Mixer|BambaMixer|H1Mixer|MambaLayer)"
)
_DEPENDS_ON_LENGTH = ("dynamic", "longrope")


def layers_with_state(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that pass a state along the sequence."""
    return [module for module in model.modules() if _WITH_STATE.fullmatch(type(module).__name__)]


class WholeSequences:
    """The layers of a model that pass a state along the sequence.

    Attributes:
        layers: those that were found.
        is_active: whether the sequences that they are given are cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = layers_with_state(model)
        self.is_active = True
        for module in self.layers:
            module.register_forward_pre_hook(self._gather, with_kwargs=True)
            module.register_forward_hook(self._keep_part)

    def _gather(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_active:
            return args, kwargs
        if args:
            return (_whole(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _whole(kwargs["hidden_states"])}

    def _keep_part(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_active:
            return output
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        cut = SequenceCut(hidden.shape[_SEQUENCE_DIM], active_group("cp").size)
        part = cut.part_of(hidden, active_group("cp").rank, dim=_SEQUENCE_DIM)
        return (part, *rest) if isinstance(output, tuple) else part


def give_whole_positions(model: nn.Module) -> None:
    """Have rotary embeddings whose frequencies depend on the longest position see all of them."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind in _DEPENDS_ON_LENGTH for kind in kinds):
            module.register_forward_pre_hook(_give_all_positions, with_kwargs=True)
            module.register_forward_hook(_keep_own_positions)


def _whole(part: Tensor) -> Tensor:
    # With what is filled up: it stands at the end, where a state has passed all tokens.
    cut = SequenceCut(part.shape[_SEQUENCE_DIM] * active_group("cp").size, active_group("cp").size)
    gathered = gather_from_sequence_parallel_region(part, _SEQUENCE_DIM, process_group=active_group("cp"))
    return cut.whole_of(gathered, dim=_SEQUENCE_DIM)


def _give_all_positions(module: nn.Module, args: Any, kwargs: Any) -> Any:
    forward = forward_under_way.get()
    if forward is None:  # in generate()
        return args, kwargs
    hidden, *rest = args
    if rest:
        return (hidden, forward.position_ids, *rest[1:]), kwargs
    return args, {**kwargs, "position_ids": forward.position_ids}


def _keep_own_positions(module: nn.Module, args: Any, output: Any) -> Any:
    forward = forward_under_way.get()
    if forward is None:
        return output
    return tuple(forward.cut.part_of(it, active_group("cp").rank, dim=_SEQUENCE_DIM) for it in output)
