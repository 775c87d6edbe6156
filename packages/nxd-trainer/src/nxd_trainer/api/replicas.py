"""Which rank speaks for the replicas of a model, where they hold the same or are to be made the same."""

from nxd_state import active_group


def is_first_replica() -> bool:
    """Whether this rank's data- and context-parallel replicas have it for their first."""
    return not (active_group("dp").rank or active_group("cp").rank)
