"""Steps that have been begun and whose values nobody has looked at: on an accelerator it computes one meanwhile."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nxd_state import get_device, read_later

from nxd_trainer.training.run_state import RunState
from nxd_trainer.training.step import learning_rate, take_step


@dataclass(frozen=True)
class FinishedStep:
    """A step that has been computed; the same on every rank.

    Attributes:
        number: optimizer steps taken with it, from 1.
        learning_rate: that it was taken with.
        tokens: trained on since the run began.
        loss: mean over all ranks.
        grad_norm: before clipping; None without clipping.
        num_stopping: ranks that had been asked to stop when it began.
    """

    number: int
    learning_rate: float
    tokens: int
    loss: float
    grad_norm: float | None
    num_stopping: int


class StepsUnderWay:
    """Begins steps of a run, and finishes them in order, so late that an accelerator need not wait for this process.

    Attributes:
        stopping: whether a finished step tells that a rank has been asked to stop.
    """

    def __init__(self, state: RunState) -> None:
        self.stopping = False
        self._state = state
        self._begun: deque[Callable[[], FinishedStep]] = deque()
        self._may_be_under_way = 0 if get_device().type == "cpu" else 1  # the CPU has computed a step that has begun

    def begin(self, *, asked_to_stop: bool) -> None:
        """Take a step as far as this process has to do with it: the run's state is then that after the step.

        Args:
            asked_to_stop: this rank.
        """
        state, rate = self._state, learning_rate(self._state)
        sums, norm = take_step(state, stopping=asked_to_stop)
        number, tokens = state.step, state.train_loader.samples_consumed * state.recipe.data.sequence_length
        read_sums, read_norm = read_later(sums), None if norm is None else read_later(norm)

        def finish() -> FinishedStep:
            loss, num_stopping = read_sums().tolist()
            grad_norm = None if read_norm is None else float(read_norm())
            return FinishedStep(number, rate, tokens, loss, grad_norm, int(num_stopping))

        self._begun.append(finish)

    def finish(self, *, all_of_them: bool) -> Iterator[FinishedStep]:
        """Wait for steps: but for the newest on an accelerator, which may still be computed while the next is begun.

        Args:
            all_of_them: also for the newest; in any case so once ranks are to stop.
        """
        while len(self._begun) > (0 if all_of_them or self.stopping else self._may_be_under_way):
            step = self._begun.popleft()()
            self.stopping = self.stopping or step.num_stopping > 0
            yield step
