"""`under_trainer`: a layout for the trainers of this process, and `install`, the same for the rest of its life."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nxd_engine import complete_config, neuronx_distributed_config
from nxd_state import destroy_model_parallel, get_group, get_world_group, show_replicas_as_world

from nxd_hf_trainer.accelerator import accelerator_prepares_ours
from nxd_hf_trainer.checkpoints import trainer_saves_ours
from nxd_hf_trainer.processes import (
    check_nothing_started,
    forget_processes,
    is_main_process,
    main_process_is_one_rank,
    seed_like_one_process,
)
from nxd_hf_trainer.refusals import evaluation_is_checked


@contextmanager
def under_trainer(
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    num_microbatches: int | None = None,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    sequence_parallel: bool = False,
    zero_stage: int = 0,
    shard_group_size: int | None = None,
    zero_offload: str | None = None,
    hugging_face_checkpoints: bool = False,
) -> Iterator[None]:
    """Context in which transformers' Trainer, TRL's trainers and Accelerate train at a layout. Entered by all ranks.

    Enter it before `TrainingArguments` or an `Accelerator` are made::

        with under_trainer(tensor_parallel_size=2, zero_stage=1):
            trainer = SFTTrainer(model, args=SFTConfig(...), train_dataset=dataset)
            trainer.train()

    The ranks that remain are replicas, between which the trainer divides its data: batch sizes are per replica.

    Args:
        tensor_parallel_size: ranks that split each layer.
        pipeline_parallel_size: ranks over which the layers are distributed.
        num_microbatches: parts of a replica's batch that are in the pipeline at the same time; the number of its ranks
            if None.
        context_parallel_size: ranks that split each sequence.
        expert_parallel_size: ranks that split the experts of a layer.
        sequence_parallel: whether activations between blocks are split along the sequence.
        zero_stage: what is sharded over the replicas: 0 nothing, 1 the optimizer's states, 2 also gradients, 3 also
            parameters.
        shard_group_size: sharded over that many neighboring replicas, and mirrored by the others; None for all.
        zero_offload: what is kept in host memory: "optimizer", or "parameters" too; None for nothing.
        hugging_face_checkpoints: whether each `checkpoint-N` also has the model as a Hugging Face folder.

    Raises:
        RuntimeError: Accelerate has started, or the installed versions are not supported.
        ValueError: the degrees do not fit the number of ranks, or each other.
    """
    check_nothing_started()
    optimizer_config = {
        "zero_stage": zero_stage,
        "shard_group_size": shard_group_size,
        "zero_offload": zero_offload,
        "grad_clipping": False,  # the trainer asks for it, by `Accelerator.clip_grad_norm_`
    }
    config = complete_config(
        neuronx_distributed_config(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            pipeline_config={
                "num_microbatches": num_microbatches or pipeline_parallel_size,
                "auto_partition": pipeline_parallel_size > 1,
                "return_loss_on_cpu": False,
            },
            context_parallel_size=context_parallel_size,
            expert_parallel_size=expert_parallel_size,
            sequence_parallel=sequence_parallel,
            optimizer_config=optimizer_config,
        )
    )
    show_replicas_as_world()
    seed_like_one_process()
    try:
        with (
            main_process_is_one_rank(),
            accelerator_prepares_ours(config),
            evaluation_is_checked(),
            trainer_saves_ours(hugging_face_checkpoints=hugging_face_checkpoints),
        ):
            yield
    finally:
        forget_processes()
        destroy_model_parallel()


_installed = ExitStack()


def install(**layout: Any) -> None:
    """Enter `under_trainer` for the rest of this process: what `nxd run` calls before it runs a script."""
    _installed.enter_context(under_trainer(**layout))
    if is_main_process():
        print(f"nxd: {_described()}", file=sys.stderr, flush=True)


def _described() -> str:
    """The layout in words, such as "4 ranks: tensor parallel 2, 2 replicas"."""
    axes = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    parts = [f"{name} parallel {get_group(axis).size}" for axis, name in axes.items() if get_group(axis).size > 1]
    replicas = get_group("dp").size
    return f"{get_world_group().size} ranks: " + ", ".join([*parts, f"{replicas} replica{'s' * (replicas != 1)}"])
