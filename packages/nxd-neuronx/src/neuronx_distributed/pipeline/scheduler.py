"""`neuronx_distributed.pipeline.scheduler`: schedules as tasks, from nxd_neuronx."""

from nxd_neuronx.pipeline_tasks import (
    BackwardPostprocessTask,
    BackwardPreprocessTask,
    BackwardStepTask,
    ForwardPostprocessTask,
    ForwardPreprocessTask,
    ForwardStepTask,
    InferenceSchedule,
    PipelineTask,
    PipeSchedule,
    PostProcessTask,
    ReduceGradsTask,
    Train1F1BSchedule,
    TrainSchedule,
)

__all__ = [
    "BackwardPostprocessTask",
    "BackwardPreprocessTask",
    "BackwardStepTask",
    "ForwardPostprocessTask",
    "ForwardPreprocessTask",
    "ForwardStepTask",
    "InferenceSchedule",
    "PipeSchedule",
    "PipelineTask",
    "PostProcessTask",
    "ReduceGradsTask",
    "Train1F1BSchedule",
    "TrainSchedule",
]
