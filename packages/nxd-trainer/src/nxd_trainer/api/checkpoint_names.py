"""Whether a checkpoint's model is the model: the comparison of names behind `strict`, with one answer for all ranks."""

from collections.abc import Iterable

from nxd_ckpt import CheckpointError, Coordinator

from nxd_trainer.api.optimizer_dict import PREFIX as DICT_PREFIX
from nxd_trainer.checkpoint import OPTIMIZER_PREFIX

_SHOWN = 8


def is_model_name(name: str) -> bool:
    """Whether a checkpoint's tensor is of the model, and not of an optimizer."""
    return not name.startswith((OPTIMIZER_PREFIX, DICT_PREFIX))


def check_names(
    stored: Iterable[str],
    wanted: Iterable[str],
    ignored: Iterable[str],
    what: str,
    coordinator: Coordinator,
    *,
    can_be_lax: bool = True,
) -> None:
    """Compare the names in a checkpoint with those that the ranks want. Called by all ranks.

    Args:
        stored: names in the checkpoint.
        wanted: names of the model's tensors on this rank.
        ignored: names that may be stored though nobody wants them.
        what: the checkpoint, for the message.
        coordinator: reaches the other ranks.
        can_be_lax: whether the caller has `strict=False`.

    Raises:
        CheckpointError: a name is missing or nobody wants it; the same text on all ranks.
    """
    of_all_ranks = coordinator.all_gather_object((sorted(wanted), sorted(ignored)))
    wanted_names = {name for names, _ in of_all_ranks for name in names}
    known = wanted_names | {name for _, names in of_all_ranks for name in names}
    stored_names = {name for name in stored if is_model_name(name)}
    missing, unexpected = sorted(wanted_names - stored_names), sorted(stored_names - known)
    problems = [f"it lacks {_listed(missing)}"] if missing else []
    problems += [f"the model lacks {_listed(unexpected)}"] if unexpected else []
    if problems:
        raise CheckpointError(
            f"{what} does not fit the model: {'; '.join(problems)}. Load it into the model that was saved"
            + (", or pass strict=False to load what both have" if can_be_lax else "")
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
