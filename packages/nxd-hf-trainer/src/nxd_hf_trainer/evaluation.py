"""What Trainer evaluates at a layout: losses always, logits where a rank has those of whole sequences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nxd_state import get_group
from transformers import Trainer

from nxd_hf_trainer.replacing import replaced


@contextmanager
def evaluation_is_checked() -> Iterator[None]:
    """Context in which an evaluation that needs logits of whole sequences is refused where no rank has them."""
    with replaced(Trainer, {"evaluation_loop": _evaluation_loop}):
        yield


def _evaluation_loop(own: Any) -> Any:
    def evaluation_loop(
        trainer: Trainer,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        only_loss = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if get_group("cp").size > 1 and not only_loss:
            raise ValueError(
                "with context parallelism each rank has the logits of its part of the sequences, so metrics and "
                "predictions cannot be computed; set prediction_loss_only=True, or leave compute_metrics out"
            )
        return own(trainer, dataloader, description, prediction_loss_only, *args, **kwargs)

    return evaluation_loop
