"""What cannot be right at a layout, refused before the first step, with the nearest way that works."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from nxd_state import get_group, get_mesh, is_peft_model, is_transformers_model, transformers_model_in
from torch import nn
from transformers import Trainer

from nxd_hf_trainer.replacing import replaced


def check_model(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise a ValueError if a script's model cannot be split by the config."""
    if config["pipeline_parallel_size"] > 1:
        _check_stages(module)
    splits = config["tensor_parallel_size"] > 1 or config["context_parallel_size"] > 1 or get_mesh().splits_experts
    if splits and not is_transformers_model(transformers_model_in(module)):
        raise ValueError(
            f"{type(module).__name__} is no model of transformers, and has no plan by which its layers are split; use "
            "--zero-stage 3, which shards any model, or give its layers of nxd_layers to the engine yourself"
        )
    if splits or config["pipeline_parallel_size"] > 1:
        _check_kernels(module)
    if config["tensor_parallel_size"] > 1:
        _check_hooks(module)


def _check_kernels(module: nn.Module) -> None:
    """Refuse Liger's forwards, which read weights that are parts here, or on another rank."""
    if any(inspect.unwrap(part.forward).__module__.startswith("liger_kernel") for part in module.modules()):
        raise ValueError(
            "Liger's kernels replace forwards of this model, and read the weights of layers that are split here; set "
            "use_liger_kernel=False, or use --zero-stage 3"
        )


def _check_hooks(module: Any) -> None:
    whole = transformers_model_in(module)
    embeddings = whole.get_input_embeddings()
    hooked = [
        name
        for name, part in whole.named_modules()
        if isinstance(part, (nn.Linear, nn.Embedding)) and part is not embeddings
        if part._forward_hooks or part._forward_pre_hooks
    ]
    if hooked:
        raise ValueError(
            f"the script has registered hooks at {', '.join(hooked[:3])}; tensor parallelism replaces layers, whose "
            "outputs are then parts: register hooks after Accelerator.prepare, or use --zero-stage 3"
        )


def _check_stages(module: Any) -> None:
    whole = transformers_model_in(module)
    if not is_transformers_model(whole):
        raise ValueError(
            f"a {type(module).__name__} is not cut into pipeline stages here; use one pipeline stage, and "
            "--tensor-parallel-size or --zero-stage 3"
        )
    if sum(child is whole.base_model for child in whole.children()) != 1 or whole._parameters:
        raise ValueError(
            f"{type(whole).__name__} is not a backbone and a head, so it cannot be cut into pipeline stages here; use "
            "--tensor-parallel-size, --expert-parallel-size or --zero-stage 3"
        )
    if is_peft_model(module) and any(config.is_prompt_learning for config in module.peft_config.values()):
        raise ValueError(
            "adapters that learn prompts cannot be trained in pipeline stages, since their gradients are those of "
            "embeddings; use LoRA, or --tensor-parallel-size or --zero-stage 3"
        )
    if get_group("cp").size > 1:
        raise ValueError(
            "context parallelism and pipeline stages cannot be combined here; leave --context-parallel-size or "
            "--pipeline-parallel-size out"
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise a ValueError for what an Accelerator was told to do besides."""
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"the script also asks for {accelerator.distributed_type.value}, which shards the model a second time; "
            "leave its options out: --zero-stage 3 is what fully sharded means here"
        )
    if accelerator.parallelism_config is not None and accelerator.parallelism_config.total_size > 1:
        raise ValueError(
            "the script also has a ParallelismConfig, which splits the model a second time; leave it out, and give "
            "its sizes to nxd run"
        )
    if accelerator.scaler is not None:
        raise ValueError(
            "fp16 with Accelerate's loss scaling does not see the gradients of all ranks; use bf16, or `nxd train` "
            "with train.loss_scaling"
        )


def check_norm_type(norm_type: float) -> None:
    """Raise a ValueError for a norm of gradients other than the 2-norm."""
    if float(norm_type) != 2.0:
        raise ValueError(f"norm_type={norm_type} is not supported for gradients of several ranks; use 2")


@contextmanager
def evaluation_is_checked() -> Iterator[None]:
    """Context in which an evaluation that needs logits of whole sequences is refused where no rank has them."""
    with replaced(Trainer, {"evaluation_loop": _evaluation_loop}):
        yield


def _evaluation_loop(own: Any) -> Any:
    def evaluation_loop(
        trainer: Trainer,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        only_loss = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if get_group("cp").size > 1 and not only_loss:
            raise ValueError(
                "with context parallelism each rank has the logits of its part of the sequences, so metrics and "
                "predictions cannot be computed; set prediction_loss_only=True, or leave compute_metrics out"
            )
        return own(trainer, dataloader, description, prediction_loss_only, *args, **kwargs)

    return evaluation_loop
