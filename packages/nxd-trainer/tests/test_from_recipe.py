"""What a recipe means to the documented API."""

import json

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer
from nxd_lora import LoraConfig
from nxd_state import initialize_model_parallel
from nxd_trainer.from_recipe import build_model, nxd_config, recipe_model
from nxd_trainer.optimizers import build_optimizer
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
    ("given", "expected"),
    [
        ("none", None),
        ("full", "full"),
        ("selective", "selective"),
        ("CoreAttention,LlamaMLP", ["CoreAttention", "LlamaMLP"]),
    ],
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


FACTORY = """
from torch import nn

def make(width=4):
    return nn.Linear(int(width), 2)

def needs(width, names):
    return nn.Linear(width, 2)

class Counting(nn.Linear):
    def forward(self, input_ids, labels, num_items_in_batch):
        return super().forward(input_ids).sum() / num_items_in_batch

def counting():
    return Counting(4, 2)
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "factory_of_a_test.py").write_text(FACTORY)
    (tmp_path / "broken_factory_of_a_test.py").write_text("raise KeyError('x')")
    monkeypatch.syspath_prepend(tmp_path)
    return "model.factory=factory_of_a_test:make"


def test_seed_of_the_recipe_is_that_of_a_factorys_weights(factory):
    first, other, again = (recipe_model(load_recipe(None, [factory, f"train.seed={it}"])).make() for it in (1, 2, 1))

    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.config.width=wide"], r"make failed with model.config=.*ValueError: invalid literal"),
        (["model.factory=factory_of_a_test:needs"], r"needs failed with .*TypeError: .*'names'"),
        (["model.factory=broken_factory_of_a_test:make"], r"cannot be imported from here: KeyError: 'x'"),
    ],
)
def test_factory_that_fails_is_a_mistake_of_the_recipe(factory, settings, message):
    with pytest.raises(ValueError, match=message):
        recipe_model(load_recipe(None, [factory, *settings]))


@pytest.fixture
def chat(tmp_path):
    pytest.importorskip("tokenizers", reason="needs it: pip install tokenizers")
    model = {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "</s>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    return ["data.chat=true", "data.path=chat.jsonl", f"data.tokenizer={tmp_path}"]


def test_factory_of_conversations_must_take_what_the_loss_is_divided_by(factory, chat):
    with pytest.raises(ValueError, match=r"a Linear whose forward does not take num_items_in_batch; with data\.chat"):
        recipe_model(load_recipe(None, [factory, *chat]))

    model = recipe_model(load_recipe(None, ["model.factory=factory_of_a_test:counting", *chat]))

    assert model.input_names == ("input_ids", "labels", "num_items_in_batch")


def test_factory_of_packed_conversations_is_refused(factory, chat):
    settings = ["model.factory=factory_of_a_test:counting", *chat, "data.packing=true"]

    with pytest.raises(ValueError, match=r"data\.packing=true is for our Llama .*; leave it out for factory_of_a"):
        recipe_model(load_recipe(None, settings))


def test_model_that_would_see_what_it_is_to_predict_is_refused():
    pytest.importorskip("transformers", reason="needs it: pip install transformers")

    with pytest.raises(ValueError, match=r"BertLMHeadModel with is_decoder=False sees .*model.config.is_decoder=true"):
        recipe_model(load_recipe(None, ["model.type=bert", "model.num_key_value_heads=4"]))


@pytest.mark.parametrize(("key", "near"), [("num_hiden_layers", "num_hidden_layers"), ("hiden_act", "hidden_act")])
def test_key_that_a_folders_config_does_not_have_is_named_with_the_nearest(tmp_path, key, near):
    transformers = pytest.importorskip("transformers", reason="needs it: pip install transformers")
    config = transformers.Qwen3Config(hidden_size=16, num_hidden_layers=1, vocab_size=320, intermediate_size=16)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=rf"model.config.{key} is not a key of Qwen3Config; did you mean {near}"):
        recipe_model(load_recipe(None, [f"model.path={tmp_path}", f"model.config.{key}=1"]))


def test_compiled_model_without_a_cpp_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)

    with pytest.raises(ValueError, match=r"train\.compile=true needs a C\+\+ compiler, .* install one, or leave"):
        recipe_model(load_recipe(None, ["train.compile=true"]))
