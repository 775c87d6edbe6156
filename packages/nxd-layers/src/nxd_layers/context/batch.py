"""This rank's part of a batch, for models that cut their sequences themselves; each function is one call in a trace."""

from nxd_state import active_group, all_gather
from torch import Tensor

from nxd_layers.context.balance import balanced_cut
from nxd_layers.context.cut import SequenceCut
from nxd_layers.context.mask import MaskRule, interval_mask
from nxd_layers.context.plan import AttentionPlan
from nxd_layers.tracing import leaf_of_traces


@leaf_of_traces
def own_part(whole: Tensor, multiple: int = 1, fill: int = 0, document_ids: Tensor | None = None) -> Tensor:
    """What this context-parallel rank has of a batch: `[batch, seq, ...]` to `[batch, local, ...]`.

    Args:
        whole: ids, labels or the like, the same on all these ranks.
        multiple: divisor of each chunk's length, as for `SequenceCut`.
        fill: the value at positions that are filled up.
        document_ids: `[batch or 1, seq]`, the document of each token, where several are packed.
    """
    rank = active_group("cp").rank_tensor(whole)
    return _cut_of(whole, multiple, document_ids).part_of(whole, rank, fill=fill)


@leaf_of_traces
def own_positions(whole: Tensor, multiple: int = 1, document_ids: Tensor | None = None) -> Tensor:
    """Where the tokens of this rank stand in the sequence, for `[batch, seq, ...]`: `[local]`, int64."""
    return _cut_of(whole, multiple, document_ids).positions_of(active_group("cp").rank_tensor(whole))


def whole_sequence(part: Tensor, cut: SequenceCut, *, dim: int = 1) -> Tensor:
    """What all context-parallel ranks have, in order and without filling: `[..., local, ...]` to `[..., length, ...]`.

    No gradients go back. By all ranks of the group.

    Args:
        part: this rank's part.
        cut: cut of the sequence.
        dim: dim of the sequence.
    """
    return cut.whole_of(all_gather(part.contiguous(), active_group("cp"), dim=dim), dim=dim)


@leaf_of_traces
def causal_plan(
    input_ids: Tensor, document_ids: Tensor | None = None, padding_mask: Tensor | None = None, multiple: int = 1
) -> AttentionPlan:
    """Causal attention within the documents of a batch, or of padded sequences.

    Args:
        input_ids: `[batch, seq]`.
        document_ids: `[batch, seq]`, the document of each token.
        padding_mask: `[batch, seq]`, 1 for tokens and 0 for padding.
        multiple: as for `own_part`.
    """
    cut = _cut_of(input_ids, multiple, document_ids)
    mask = interval_mask(
        cut.length, MaskRule(), document_ids=document_ids, padding_mask=padding_mask, device=input_ids.device
    )
    return AttentionPlan(mask, cut)


def _cut_of(whole: Tensor, multiple: int, document_ids: Tensor | None) -> SequenceCut:
    if document_ids is not None:
        return balanced_cut(document_ids, active_group("cp").size, multiple=multiple)
    return SequenceCut(whole.shape[1], active_group("cp").size, multiple=multiple)
