"""The case that a recipe describes: its model, layout, schedule and optimizer, on tokens drawn at random."""

import torch

from nxd_trainer.data import load_tokenizer
from nxd_trainer.models import LlamaDecoderLayer, LlamaForCausalLM
from nxd_trainer.parity.case import ParityCase
from nxd_trainer.recipe import Recipe, padded_vocab_size
from nxd_trainer.training.pipeline import recipe_schedule
from nxd_trainer.training.run_state import model_config


def case_of_recipe(recipe: Recipe, steps: int) -> ParityCase:
    """What `compare` needs of a recipe; of its batches only the sizes, and neither text nor learning-rate schedule.

    Args:
        recipe: one that `load_recipe` accepted.
        steps: to train.

    Raises:
        ValueError: there are no steps, or the recipe's tokenizer cannot be had.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps compare nothing; use 1 or more (--compare-steps)")
    vocab_size = padded_vocab_size(recipe, load_tokenizer(recipe.data.tokenizer).vocab_size)
    config = model_config(recipe, vocab_size)
    shape = (steps, recipe.train.global_batch_size, recipe.data.sequence_length + 1)
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(recipe.train.seed))
    parallel, options = recipe.parallel, recipe.optimizer
    return ParityCase(
        model_fn=lambda: LlamaForCausalLM(config, sequence_parallel=parallel.sequence_parallel),
        batches=[{"input_ids": step[:, :-1], "labels": step[:, 1:]} for step in tokens],
        nxd_config={
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "sequence_parallel": parallel.sequence_parallel,
            "pipeline_config": _pipeline(recipe),
            "activation_checkpoint_config": None if parallel.activation_checkpointing == "none" else "full",
            "optimizer_config": {
                "zero_one_enabled": parallel.zero1,
                "grad_clipping": recipe.train.max_grad_norm > 0,
                "max_grad_norm": recipe.train.max_grad_norm or 1.0,
            },
        },
        optimizer_arguments={
            "lr": options.lr,
            "betas": options.betas,
            "eps": options.eps,
            "weight_decay": options.weight_decay,
        },
        seed=recipe.train.seed,
    )


def _pipeline(recipe: Recipe) -> dict[str, object]:
    config: dict[str, object] = {
        "num_microbatches": recipe.train.gradient_accumulation_steps,
        "input_names": ["input_ids", "labels"],
    }
    if recipe.parallel.pipeline_parallel_size > 1:
        schedule = recipe_schedule(recipe)
        config |= {
            "transformer_layer_cls": LlamaDecoderLayer,
            "auto_partition": True,
            "schedule": schedule,
            "virtual_pipeline_size": schedule.num_stages // schedule.num_ranks,
        }
    return config
