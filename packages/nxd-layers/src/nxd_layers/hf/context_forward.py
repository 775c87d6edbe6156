"""What the parts of a model of transformers know of the forward under way, where its sequences are cut."""

from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nxd_layers.context import AttentionPlan, IntervalMask, MaskRule, SequenceCut, Transport, interval_mask


@dataclass
class ContextForward:
    """What a forward under way knows of the whole sequences.

    Attributes:
        cut: of the sequences.
        position_ids: `[batch or 1, seq]`, of the whole sequences.
        document_ids: `[batch or 1, seq]`, for masks that keep documents apart; None where each sequence is one.
        padding_mask: bool `[batch, seq]`; None without padding.
        shift_labels: `[batch, local]`, the next tokens of this rank's positions.
        transport: of its attention.
        learned: bool `[batch, seq]`, whether the next token is learned, of the whole sequences: at those positions a
            query must have keys. None if it need not, see `ContextDoor`.
        keeps_apart: whether the model has looked for documents in the positions, for the mask that it makes next.
    """

    cut: SequenceCut
    position_ids: Tensor
    document_ids: Tensor | None
    padding_mask: Tensor | None
    shift_labels: Tensor | None
    transport: Transport | None
    learned: Tensor | None = None
    keeps_apart: bool = False
    _masks: dict[tuple[MaskRule, bool], "ContextMask"] = field(default_factory=dict)

    def mask_of(self, rule: MaskRule, device: torch.device) -> "ContextMask":
        """Made once for all layers."""
        key = rule, self.keeps_apart
        if key not in self._masks:
            document_ids = self.document_ids if self.keeps_apart else None
            mask = interval_mask(
                self.cut.length, rule, document_ids=document_ids, padding_mask=self.padding_mask, device=device
            )
            if self.learned is not None:
                _check_learned_queries(mask, self.learned)
            self._masks[key] = ContextMask(AttentionPlan(mask, self.cut), self.transport)
        self.keeps_apart = False
        return self._masks[key]


def _check_learned_queries(mask: IntervalMask, learned: Tensor) -> None:
    without_keys = learned & (mask.last < mask.first)
    if bool(without_keys.any()):
        row, place = without_keys.nonzero()[0].tolist()
        raise ValueError(
            f"the label of row {row}, position {place + 1}, is predicted at padding that attends to no token: eager "
            "attention in one process averages over all tokens there, which context parallelism does not; set that "
            "label to -100, pad at the end, or load the model with attn_implementation='sdpa'"
        )


@dataclass(frozen=True, eq=False)
class ContextMask:
    """What a model of transformers takes for its mask, and hands to its attention."""

    plan: AttentionPlan
    transport: Transport | None


forward_under_way: ContextVar[ContextForward | None] = ContextVar("forward_under_way", default=None)
