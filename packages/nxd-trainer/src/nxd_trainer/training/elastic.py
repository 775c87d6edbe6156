"""`nxd train --elastic`: runs a recipe as elastic training."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nxd_elastic.loop import ChangeMembers, Membership, Options, run_as_trainer
from nxd_elastic.supervisor import SupervisorPipe
from nxd_state import ParallelDegrees, all_gather_object, get_world_group

from nxd_trainer.recipe import Recipe, check_layout
from nxd_trainer.recipe.rules import consistency_mistakes
from nxd_trainer.training import StopRequest, TrainResult, prepare_run, run_training


class ElasticRecipe:
    """A recipe and the layouts that it may run with; the global batch and data order are always the recipe's.

    Args:
        recipe: the recipe, whose own layout is the first choice.
        others: other layouts, in order of preference.
        options: limits on the number of ranks.

    Raises:
        ValueError: a layout never fits the recipe or the number of ranks, or the recipe does not resume.
    """

    def __init__(self, recipe: Recipe, others: Sequence[ParallelDegrees], options: Options) -> None:
        if recipe.checkpoint.resume == "never":
            raise ValueError(
                "checkpoint.resume='never' would restart the run from scratch whenever a rank is lost; leave it out "
                "with --elastic, and set another output to start from scratch"
            )
        self.recipe, self.options = recipe, options
        own = recipe.parallel.degrees
        self.layouts = [own, *(recipe.parallel.at(it).degrees for it in others)]
        self._dp = max(1, options.most // own.model_ranks)  # with no rank lost
        for layout in self.layouts:
            self._check(layout)

    def accepts(self, degrees: ParallelDegrees) -> bool:
        """Whether the recipe can run with these degrees."""
        return self._mistake(degrees) is None

    def at(self, degrees: ParallelDegrees) -> Recipe:
        """Return the recipe at a layout, keeping the microbatch size of the launch if it divides the global batch."""
        train = self.recipe.train
        samples = train.global_batch_size // (train.gradient_accumulation_steps * self._dp)
        steps = train.gradient_accumulation_steps
        if samples and train.global_batch_size % (samples * degrees.dp) == 0:
            steps = max(steps, train.global_batch_size // (samples * degrees.dp))
        parallel = self.recipe.parallel.at(degrees)
        return replace(self.recipe, parallel=parallel, train=replace(train, gradient_accumulation_steps=steps))

    def _check(self, layout: ParallelDegrees) -> None:
        most = self.options.most // layout.model_ranks
        fits = [replace(layout, dp=dp) for dp in range(most, 0, -1) if layout.model_ranks * dp >= self.options.least]
        if not fits:
            raise ValueError(
                f"the layout {layout} needs a multiple of {layout.model_ranks} ranks, but --elastic allows "
                f"{self.options.least} to {self.options.most}"
            )
        mistakes = [self._mistake(fit) for fit in fits]
        if None not in mistakes:
            raise ValueError(f"the layout {layout} of --elastic does not fit the recipe: {mistakes[0]}")

    def _mistake(self, degrees: ParallelDegrees) -> str | None:
        recipe = self.at(degrees)
        try:
            check_layout(recipe, degrees.dp)
        except ValueError as error:
            return str(error)
        return next((mistake.text for mistake in consistency_mistakes(recipe)), None)


def train_elastically(
    elastic: ElasticRecipe, pipe: SupervisorPipe, stop: StopRequest, prepare: Callable[[], None]
) -> TrainResult | None:
    """Train a recipe in a process that a supervisor forked.

    Args:
        elastic: the recipe.
        pipe: the pipe to the supervisor.
        stop: the stop request; may already have been active.
        prepare: function called in each generation before model parallelism is initialized.

    Returns:
        How the run ended; None if the other processes ended it without this one.

    Raises:
        PeerError, ValueError, CheckpointError, TrainingDiverged: as in `prepare_run` and `run_training`, for any
            failure but the loss of a rank.
    """

    def train_once(membership: Membership) -> TrainResult:
        recipe = elastic.at(membership.degrees)
        prepare()
        membership.initialize()
        asked = _Asked(stop, membership)
        result = run_training(*prepare_run(recipe), asked)
        if result.stopped:
            membership.stopped = any(all_gather_object(asked.to_stop, get_world_group()))
            if not membership.stopped:
                raise ChangeMembers
        return result

    trained = run_as_trainer(train_once, pipe, elastic.options, elastic.layouts, elastic.accepts)
    return None if trained is None else trained.value


@dataclass
class _Asked:
    """Stop request between steps: a signal, or a rank waiting to join, ends the training after the next step."""

    stop: StopRequest
    membership: Membership

    @property
    def signal_number(self) -> int:
        wanted = self.membership.step_boundary()
        return int(self.to_stop or wanted)

    @property
    def can_wait(self) -> bool:
        return not self.to_stop

    @property
    def to_stop(self) -> bool:
        return self.stop.signal_number > 0 or self.membership.stopping


def options_of(elastic: tuple[int, int], grace: float, silence: float) -> Options:
    """Return the command line's options for a launch with `WORLD_SIZE` ranks."""
    least, most = elastic
    return Options(least, min(most, int(os.environ.get("WORLD_SIZE", most))), grace, silence)
