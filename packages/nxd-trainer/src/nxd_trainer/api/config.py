"""The documented training config: one dict that is checked as a whole and read by the other calls of this API."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from nxd_layers.activation_checkpoint import ModuleClass
from nxd_layers.lora import LoraConfig
from nxd_state import get_mesh, initialize_model_parallel, model_parallel_is_initialized

from nxd_trainer.api.config_checks import DEGREES, complete_config


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: ModuleClass | Sequence[ModuleClass] | None = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: LoraConfig | None = None,
    mixed_precision_config: Mapping[str, bool] | None = None,
    *,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    **unknown: Any,
) -> dict[str, Any]:
    """The config of a training job, the same on every rank; initialises model parallelism if nobody has.

    A process that nobody has launched as a rank cannot do that for several ranks: who starts them later, as the
    Trainer of nxd_lightning does, initialises it then, and `initialize_parallel_model` without that is refused.

    Args:
        tensor_parallel_size: ranks that split each layer.
        pipeline_parallel_size: pipeline stages; more than one needs a `pipeline_config`.
        pipeline_config: arguments of `nxd_pipeline.NxDPPModel`, such as `num_microbatches`, `transformer_layer_cls`,
            `pipeline_cuts` or `auto_partition`, `output_loss_value_spec` and `input_names`. They hold without a
            pipeline as well.
        optimizer_config: `zero_one_enabled` (False) shares optimizer states out over the replicas, `grad_clipping`
            (True) and `max_grad_norm` (1.0) clip gradients.
        activation_checkpoint_config: what is computed again in backward: "full" for every transformer layer, a module
            class (or its name, or several) for these modules, None for nothing.
        pad_model: pad attention heads to a multiple of `tensor_parallel_size`; their number is the model's
            `config.num_attention_heads`.
        sequence_parallel: the model's layers split activations along the sequence. The model must be built so.
        model_init_config: `meta_device_init` (False) makes the model without memory, for `param_init_fn` (None) to
            fill, module by module, what this rank keeps; `sequential_move_factor` (11) is how many ranks of a host
            make their model at a time, 1 to 32.
        lora_config: adapters to train instead of the model.
        mixed_precision_config: `use_master_weights` and `use_fp32_grad_acc` (both as `zero_one_enabled`), and
            `use_master_weights_in_ckpt` (False).
        context_parallel_size: ranks that split each sequence.
        expert_parallel_size: ranks that split the experts of a layer.
        **unknown: none; a name that is no argument is reported with the other mistakes.

    Returns:
        A new dict with all arguments under their names, sections complete with their defaults.

    Raises:
        ValueError: every mistake, in one error; or degrees that do not fit the launched ranks, or the mesh there is.
    """
    config = complete_config(
        {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "context_parallel_size": context_parallel_size,
            "expert_parallel_size": expert_parallel_size,
            "pipeline_config": pipeline_config,
            "optimizer_config": optimizer_config,
            "activation_checkpoint_config": activation_checkpoint_config,
            "pad_model": pad_model,
            "sequence_parallel": sequence_parallel,
            "model_init_config": model_init_config,
            "lora_config": lora_config,
            "mixed_precision_config": mixed_precision_config,
            **unknown,
        }
    )
    if not _waits_for_ranks(config):
        ensure_model_parallel(config)
    return config


def _waits_for_ranks(config: Mapping[str, Any]) -> bool:
    is_rank = model_parallel_is_initialized() or dist.is_initialized() or "WORLD_SIZE" in os.environ
    return not is_rank and any(config[name] > 1 for name in DEGREES)


def ensure_model_parallel(config: Mapping[str, Any]) -> None:
    """Initialise model parallelism as a complete config says, or check that it is so. Called by all ranks.

    Raises:
        ValueError: the degrees do not fit the launched ranks, or the mesh that there is.
    """
    if not model_parallel_is_initialized():
        initialize_model_parallel(
            config["tensor_parallel_size"],
            config["pipeline_parallel_size"],
            config["expert_parallel_size"],
            context_parallel_size=config["context_parallel_size"],
        )
        return
    mesh = get_mesh()
    found = {
        "tensor_parallel_size": mesh.tp,
        "pipeline_parallel_size": mesh.pp,
        "context_parallel_size": mesh.cp,
        "expert_parallel_size": mesh.ep,
    }
    different = [f"{name}={config[name]}, but {size} there" for name, size in found.items() if config[name] != size]
    if different:
        raise ValueError(
            f"model parallelism is already initialised with other degrees: {'; '.join(different)}. Give the same ones, "
            "or call destroy_model_parallel() first"
        )
