"""The pipelines that are compared: each makes, on its rank, a function that takes one step and gives the mean loss.

A step is forward and backward of all microbatches; gradients add up from step to step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from nxd_pipeline import SCHEDULE_NAMES, NxDPPModel, default_stages_per_rank, make_schedule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from pipeline_step.model import LastStage, Size, WholeModel, chunks, mean_squared_error

RANKS = 2
STAGES_PER_RANK = {name: default_stages_per_rank(name) for name in SCHEDULE_NAMES if name != "inference"}
TORCHS: dict[str, Callable[..., PipelineScheduleSingle | PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
Step = Callable[[], float]


@dataclass(frozen=True)
class Variant:
    """A schedule as one library plays it."""

    library: str  # "ours", "torch", or "one process"
    schedule: str
    size: Size
    num_microbatches: int

    def __str__(self) -> str:
        return f"{self.library}: {self.schedule}"

    def build(self) -> Step:
        """This rank's part."""
        if self.library == "one process":
            return build_one_process(self)
        return build_ours(self).step if self.library == "ours" else build_torchs(self)


class OurPipeline:
    """`NxDPPModel` and its batch."""

    def __init__(self, model: NxDPPModel, size: Size) -> None:
        self.model = model
        self._hidden, self._target = size.batch_of_hidden()

    def step(self) -> float:
        """The loss; 0 where the last stage is not."""
        loss = self.model.run_train(hidden=self._hidden, target=self._target)
        assert not isinstance(loss, list)  # the mean is asked for
        return 0.0 if loss is None else loss.item()


def build_ours(variant: Variant, trace_file_path: Path | None = None) -> OurPipeline:
    stages_per_rank = STAGES_PER_RANK[variant.schedule]
    whole = WholeModel(variant.size.stack())
    stages = chunks(list(whole.layers), RANKS * stages_per_rank)
    model = NxDPPModel(
        whole,
        num_microbatches=variant.num_microbatches,
        stages=[*stages[:-1], LastStage(stages[-1])],
        schedule=variant.schedule,
        virtual_pipeline_size=stages_per_rank,
        trace_file_path=trace_file_path,
    )
    return OurPipeline(model, variant.size)


def build_torchs(variant: Variant) -> Step:
    rank = dist.get_rank()
    rank_of_stage = make_schedule(variant.schedule, RANKS, variant.num_microbatches).rank_of_stage
    modules = chunks(variant.size.stack(), len(rank_of_stage))
    mine = [stage for stage, holder in enumerate(rank_of_stage) if holder == rank]
    stages = [PipelineStage(modules[it], it, len(modules), torch.device("cpu")) for it in mine]
    given = stages if STAGES_PER_RANK[variant.schedule] > 1 else stages[0]
    schedule = TORCHS[variant.schedule](given, variant.num_microbatches, loss_fn=mean_squared_error)
    hidden, target = variant.size.batch_of_hidden()
    arguments = (hidden,) if 0 in mine else ()
    has_loss = len(modules) - 1 in mine

    def step() -> float:
        losses: list[torch.Tensor] = []
        schedule.step(
            *arguments,
            target=target if has_loss else None,
            losses=losses if has_loss else None,
            return_outputs=False,
        )
        return torch.stack(losses).detach().mean().item() if has_loss else 0.0

    return step


def build_one_process(variant: Variant) -> Step:
    """The same microbatches one after the other, on rank 0 alone."""
    model = WholeModel(variant.size.stack()) if dist.get_rank() == 0 else None
    hidden, target = variant.size.batch_of_hidden()

    def step() -> float:
        losses = []
        if model is not None:
            for part in zip(
                hidden.chunk(variant.num_microbatches), target.chunk(variant.num_microbatches), strict=True
            ):
                loss = model(*part) / variant.num_microbatches
                loss.backward()
                losses.append(loss.item())
        return sum(losses)

    return step
