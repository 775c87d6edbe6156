"""What a recipe means to the documented API."""

import pytest
import torch
from nxd_layers import LoraConfig
from nxd_state import initialize_model_parallel
from nxd_trainer.from_recipe import build_model, build_optimizer, nxd_config, recipe_model
from nxd_trainer.models import LlamaConfig, LlamaDecoderLayer
from nxd_trainer.recipe import Recipe, load_recipe

TINY = [
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
]
LORA = ["lora.rank=2", "lora.target_modules=q_proj,up_proj"]


def config_of(*settings):
    recipe = load_recipe(None, settings)
    return nxd_config(recipe, recipe_model(recipe))


def test_recipe_without_a_word_of_its_model_is_the_llama_that_it_has_always_been():
    model = recipe_model(Recipe())

    assert model.layer_class is LlamaDecoderLayer
    assert model.description.own_llama() == LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
    )


@pytest.mark.parametrize(
    ("given", "expected"), [("none", None), ("full", "full"), ("CoreAttention,LlamaMLP", ["CoreAttention", "LlamaMLP"])]
)
def test_activation_checkpointing_is_a_mode_or_names_of_classes(given, expected):
    config = config_of(f"parallel.activation_checkpointing={given}")

    assert config["activation_checkpoint_config"] == expected


@pytest.mark.parametrize(
    ("save", "base", "merged"), [("adapter", False, False), ("both", True, False), ("merged", True, True)]
)
def test_lora_section_is_a_lora_config(save, base, merged):
    config = config_of("lora.rank=4", "lora.alpha=16", "lora.target_modules=q_proj,v_proj", f"lora.save={save}")

    assert config["lora_config"] == LoraConfig(
        lora_rank=4, lora_alpha=16.0, target_modules=["q_proj", "v_proj"], save_lora_base=base, merge_lora=merged
    )
    assert config_of()["lora_config"] is None


def test_pipeline_is_cut_between_the_layers_as_its_schedule_says():
    config = config_of("parallel.pipeline_parallel_size=2", "pipeline.schedule=interleaved")

    section = config["pipeline_config"]
    assert (section["schedule"], section["virtual_pipeline_size"]) == ("interleaved", 2)
    assert section["transformer_layer_cls"] is LlamaDecoderLayer


def test_adapters_alone_are_trained_and_matrices_alone_decayed(run_ranks):
    def groups():
        initialize_model_parallel()
        recipe = load_recipe(None, [*TINY, *LORA])
        model = build_model(recipe, recipe_model(recipe))
        names = {parameter: name for name, parameter in model.named_parameters()}
        optimizer = build_optimizer(recipe, model)
        return [(group["weight_decay"], [names[it] for it in group["params"]]) for group in optimizer.param_groups]

    [[(decay, matrices), (no_decay, others)]] = run_ranks(groups, 1)

    assert (decay, no_decay, others) == (0.1, 0.0, [])
    assert len(matrices) == 2 * 2 * 2
    assert all("lora_" in name for name in matrices)


def test_checkpointed_classes_change_nothing_in_what_is_computed(run_ranks):
    def losses():
        initialize_model_parallel()
        tokens = torch.arange(34).view(2, 17)
        found = []
        for mode in ("none", "CoreAttention,LlamaMLP"):
            recipe = load_recipe(None, [*TINY, f"parallel.activation_checkpointing={mode}"])
            model = build_model(recipe, recipe_model(recipe))
            loss = model.run_train(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
            found.append([loss, *(parameter.grad for parameter in model.parameters())])
        return found

    [[plain, checkpointed]] = run_ranks(losses, 1)

    assert all(map(torch.equal, plain, checkpointed))
