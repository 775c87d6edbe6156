"""A pipeline schedule as data: one list of actions per pipeline rank, and which rank holds which stage.

`catalog` makes the schedules of the known methods; `communication` adds the messages to an order of computation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from nxd_pipeline.schedules.action import Action, ActionKind, parse_action


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank in one step, in order.

    Attributes:
        name: for messages and pictures.
        num_microbatches: they are counted from 0.
        rank_of_stage: the pipeline rank of each stage.
        actions: those of each pipeline rank.

    Raises:
        ValueError: an action's stage is not on its rank, or a stage, rank or microbatch does not exist.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"schedule {self.name!r}: num_microbatches={self.num_microbatches}; use 1 or more")
        if not self.actions or set(self.rank_of_stage) != set(range(self.num_ranks)):
            raise ValueError(
                f"schedule {self.name!r} has actions for {self.num_ranks} ranks and its stages on ranks "
                f"{self.rank_of_stage}; give every rank a stage, and every stage one of these ranks"
            )
        for rank, actions in enumerate(self.actions):
            stages = frozenset(self.stages_of(rank))
            for position, action in enumerate(actions):
                if action.stage not in stages:
                    raise ValueError(f"{self.where(rank, position)}: the stages of this rank are {sorted(stages)}")
                if not 0 <= action.microbatch < self.num_microbatches:
                    raise ValueError(f"{self.where(rank, position)}: num_microbatches={self.num_microbatches}")
                if action.peer is not None and not 0 <= action.peer < self.num_stages:
                    raise ValueError(f"{self.where(rank, position)}: stages are 0 to {self.num_stages - 1}")

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline; several may live on one rank."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """The size of the pipeline-parallel group."""
        return len(self.actions)

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether nothing in it goes backward, so that no activation has to be kept."""
        return all(action.kind is ActionKind.FORWARD for action in self.compute_actions())

    @cached_property
    def has_communication(self) -> bool:
        """Whether any rank sends or receives."""
        return any(action.is_communication for actions in self.actions for action in actions)

    def where(self, rank: int, position: int) -> str:
        """Names an action in an error message."""
        return f"schedule {self.name!r}, rank {rank}, position {position} ({self.actions[rank][position]})"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a pipeline rank, ascending."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    def without_communication(self) -> "Schedule":
        """The same order of computation, without any messages."""
        return replace(self, actions=tuple(tuple(it for it in row if not it.is_communication) for row in self.actions))

    def compute_actions(self) -> Iterable[Action]:
        """Those of all ranks that neither send nor receive."""
        return (action for actions in self.actions for action in actions if not action.is_communication)


def custom_schedule(actions: Sequence[Sequence[Action | str]], *, name: str = "custom") -> Schedule:
    """A schedule of one's own from one list per rank, of actions or their notation: `[["0F0", "0B0"], ["1F0", "1B0"]]`.

    Stages live where their actions stand. Messages may be left out; `insert_communication` adds them.

    Raises:
        ValueError: an action is not understood, a stage computes on two ranks or nowhere, or there is nothing to do.
    """
    parsed = tuple(tuple(_parse(rank, action) for action in row) for rank, row in enumerate(actions))
    rank_of_stage: dict[int, int] = {}
    for rank, row in enumerate(parsed):
        for position, action in enumerate(row):
            if rank_of_stage.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"schedule {name!r}, rank {rank}, position {position} ({action}): stage {action.stage} is on "
                    f"rank {rank_of_stage[action.stage]} already; a stage lives on one rank"
                )
    num_stages = max(rank_of_stage, default=-1) + 1
    if len(rank_of_stage) < max(num_stages, 1):
        missing = next(stage for stage in count() if stage not in rank_of_stage)
        raise ValueError(f"schedule {name!r}: no rank has actions of stage {missing}")
    return Schedule(
        name=name,
        num_microbatches=max(action.microbatch for row in parsed for action in row) + 1,
        rank_of_stage=tuple(rank_of_stage[stage] for stage in range(num_stages)),
        actions=parsed,
    )


def _parse(rank: int, action: Action | str) -> Action:
    if isinstance(action, Action):
        return action
    try:
        return parse_action(action)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None
