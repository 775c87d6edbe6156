"""The random stream of each tensor-parallel rank, as scripts ask for it."""

from contextlib import AbstractContextManager

from nxd_state import get_rng_state, rng_stream, set_rng_state
from torch import Tensor


class RngTracker:
    """Leads to the streams of nxd_state, which `model_parallel_xla_manual_seed` seeds."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from this tensor-parallel rank's own stream inside the `with` block.

        Raises:
            RuntimeError: the streams are not seeded.
        """
        return rng_stream("tp")

    def get_states(self) -> dict[str, dict[str, Tensor]]:
        """State of every stream, to be saved."""
        return get_rng_state()

    def set_states(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Go on from `get_states`."""
        set_rng_state(states)


_TRACKER = RngTracker()


def get_xla_rng_tracker() -> RngTracker:
    """The one tracker of this process, on any device."""
    return _TRACKER
