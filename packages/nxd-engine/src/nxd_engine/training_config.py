"""The config of a training run, made from a model and its parallel degrees."""

from typing import Any

from nxd_pipeline import make_schedule
from nxd_state import ParallelDegrees

from nxd_engine.model_spec import ModelSpec


def training_config(
    spec: ModelSpec,
    degrees: ParallelDegrees,
    *,
    num_microbatches: int,
    schedule: str = "1f1b",
    virtual_pipeline_size: int | None = None,
    activation_checkpointing: str = "none",
    max_grad_norm: float = 1.0,
    loss_scaling: bool = False,
    stochastic_rounding: bool = False,
) -> dict[str, Any]:
    """Return the arguments of `neuronx_distributed_config` to train a model.

    With ZeRO-1, weights narrower than float32 have float32 master weights, which checkpoints hold, and gradients are
    accumulated in float32.

    Args:
        spec: the model.
        degrees: the parallel degrees.
        num_microbatches: number of microbatches per step.
        schedule: name of the pipeline schedule in nxd-pipeline.
        virtual_pipeline_size: stages per rank; None for the schedule's default.
        activation_checkpointing: "none", "full", "selective", or class names separated by commas.
        max_grad_norm: the norm to clip gradients to; 0 for no clipping.
        loss_scaling: whether the loss is scaled, for float16.
        stochastic_rounding: whether bfloat16 weights are rounded stochastically, in place of master weights.
    """
    pipeline: dict[str, Any] = {
        "num_microbatches": num_microbatches,
        "input_names": list(spec.input_names),
        "return_loss_on_cpu": False,
    }
    if spec.layer_class is not None:
        pipeline["transformer_layer_cls"] = spec.layer_class
    if degrees.pp > 1:
        played = make_schedule(schedule, degrees.pp, num_microbatches, virtual_pipeline_size=virtual_pipeline_size)
        pipeline |= {
            "auto_partition": True,
            "schedule": schedule,
            "virtual_pipeline_size": played.num_stages // played.num_ranks,
        }
    checkpointed = {"none": None, "full": "full", "selective": "selective"}
    return {
        **degrees.as_config(),
        "pipeline_config": pipeline,
        "activation_checkpoint_config": checkpointed.get(activation_checkpointing, activation_checkpointing.split(",")),
        "model_init_config": {"param_init_fn": spec.param_init_fn},
        "optimizer_config": {
            "zero_one_enabled": degrees.zero1,
            "grad_clipping": max_grad_norm > 0,
            "max_grad_norm": max_grad_norm or 1.0,
        },
        "mixed_precision_config": {
            "use_master_weights_in_ckpt": degrees.zero1 and not stochastic_rounding,
            "use_loss_scaling": loss_scaling,
            "use_stochastic_rounding": stochastic_rounding,
        },
    }
