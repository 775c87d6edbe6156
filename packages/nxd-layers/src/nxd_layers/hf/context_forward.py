"""What the parts of a model of transformers know of the forward under way, where its sequences are cut."""

from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nxd_layers.context import AttentionPlan, MaskRule, SequenceCut, Transport, interval_mask


@dataclass
class ContextForward:
    """What a forward under way knows of the whole sequences.

    Attributes:
        cut: of the sequences.
        position_ids: `[batch or 1, seq]`, of the whole sequences.
        document_ids: `[batch or 1, seq]`; None where each sequence is one document.
        padding_mask: bool `[batch, seq]`; None without padding.
        shift_labels: `[batch, local]`, the next tokens of this rank's positions.
        transport: of its attention.
    """

    cut: SequenceCut
    position_ids: Tensor
    document_ids: Tensor | None
    padding_mask: Tensor | None
    shift_labels: Tensor | None
    transport: Transport | None
    _masks: dict[MaskRule, "ContextMask"] = field(default_factory=dict)

    def mask_of(self, rule: MaskRule, device: torch.device) -> "ContextMask":
        """Made once for all layers."""
        if rule not in self._masks:
            mask = interval_mask(
                self.cut.length, rule, document_ids=self.document_ids, padding_mask=self.padding_mask, device=device
            )
            self._masks[rule] = ContextMask(AttentionPlan(mask, self.cut), self.transport)
        return self._masks[rule]


@dataclass(frozen=True, eq=False)
class ContextMask:
    """What a model of transformers takes for its mask, and hands to its attention."""

    plan: AttentionPlan
    transport: Transport | None


forward_under_way: ContextVar[ContextForward | None] = ContextVar("forward_under_way", default=None)
