"""The config of a training run, of a model and of how it lies on the ranks."""

from typing import Any

from nxd_pipeline import make_schedule

from nxd_engine.model_spec import ModelSpec


def training_config(
    spec: ModelSpec,
    *,
    num_microbatches: int,
    pipeline_parallel_size: int = 1,
    schedule: str = "1f1b",
    virtual_pipeline_size: int | None = None,
    activation_checkpointing: str = "none",
    zero1: bool = False,
    max_grad_norm: float = 1.0,
    **degrees: Any,
) -> dict[str, Any]:
    """The arguments of `neuronx_distributed_config` that train a model.

    With ZeRO-1, weights narrower than float32 learn by float32 masters, which checkpoints hold, and gradients are
    accumulated in float32.

    Args:
        spec: the model.
        num_microbatches: of a step.
        pipeline_parallel_size: ranks that the layers are distributed over.
        schedule: of the pipeline, by its name in nxd-pipeline.
        virtual_pipeline_size: stages of a rank; None for as many as the schedule has by itself.
        activation_checkpointing: "none", "full", "selective", or names of classes with commas between.
        zero1: whether the replicas shard the optimizer's state.
        max_grad_norm: to which gradients are clipped; 0: not at all.
        degrees: the other degrees, by their names in `neuronx_distributed_config`.

    Raises:
        ValueError: the schedule cannot be played.
    """
    pipeline: dict[str, Any] = {
        "num_microbatches": num_microbatches,
        "input_names": list(spec.input_names),
        "return_loss_on_cpu": False,
    }
    if spec.layer_class is not None:
        pipeline["transformer_layer_cls"] = spec.layer_class
    if pipeline_parallel_size > 1:
        played = make_schedule(
            schedule, pipeline_parallel_size, num_microbatches, virtual_pipeline_size=virtual_pipeline_size
        )
        pipeline |= {
            "auto_partition": True,
            "schedule": schedule,
            "virtual_pipeline_size": played.num_stages // played.num_ranks,
        }
    checkpointed = {"none": None, "full": "full", "selective": "selective"}
    return {
        "pipeline_parallel_size": pipeline_parallel_size,
        **degrees,
        "pipeline_config": pipeline,
        "activation_checkpoint_config": checkpointed.get(activation_checkpointing, activation_checkpointing.split(",")),
        "model_init_config": {"param_init_fn": spec.param_init_fn},
        "optimizer_config": {
            "zero_one_enabled": zero1,
            "grad_clipping": max_grad_norm > 0,
            "max_grad_norm": max_grad_norm or 1.0,
        },
        "mixed_precision_config": {"use_master_weights_in_ckpt": zero1},
    }
