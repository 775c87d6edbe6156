"""Fine-tuning on conversations beside TRL: ten architectures, each in four layouts, have the losses of `SFTTrainer`.

Twenty steps on the same rows, chat template and weights, in float32. TRL trains in one process, with the loss on what
the assistant says. It gets the rows in the order in which the recipe's seed has them.
"""

import json
import random

import numpy as np
import pytest
import runs_by_hand
import torch
from beside_trl import losses_of_sft
from nxd_data.loader import shuffled
from nxd_state import initialize_model_parallel
from nxd_trainer.from_recipe import PACKED_TYPES
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import train
from nxd_trainer.training.run_data import open_data, prepare_data
from runs_by_hand import byte_tokenizer

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
datasets = pytest.importorskip("datasets", reason="TRL needs it: pip install datasets")
tokenizers = pytest.importorskip("tokenizers", reason="chat templates need them: pip install tokenizers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's and those of what it imports

STEPS, BATCH, LENGTH, RATE = 20, 4, 40, 1e-3
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<u>' + m['content'] + '<end>' }}"
    "{% else %}{{ '<a>' }}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SIZES = runs_by_hand.SIZES | {"max_position_embeddings": 128}
SPECIAL = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
HEADS = {"head_dim": 8}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "Llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "Qwen3": ("qwen3", HEADS),
    "Gemma 3": ("gemma3_text", HEADS | {"sliding_window": 8, "tie_word_embeddings": True}),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("qwen3_moe", HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "GPT-OSS": ("gpt_oss", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "Phi-3": ("phi3", {}),
    "GLM-4": ("glm4", HEADS),
    "Falcon-H1": ("falcon_h1", HEADS | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}),
    "Granite 4": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
}
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
MICROBATCHES = "train.gradient_accumulation_steps=2"
LAYOUTS = {
    "one process": (1, []),
    "TP 2": (2, [TP2]),
    "PP 2": (2, [PP2, MICROBATCHES]),
    "TP 2 x PP 2": (4, [TP2, PP2, MICROBATCHES]),
}
# Conversations that fit into sequences whole; a step has all of them, however they are packed.
NUM_PACKED, PACKED_LENGTH = 12, 64


@pytest.fixture(scope="module")
def rows():
    """Conversations of one turn or two; some do not fit into a sequence."""
    generator = random.Random(0)
    return [
        [
            {"role": role, "content": "".join(generator.choices("abcdef", k=generator.choice([1, 3, 7, 15])))}
            for _ in range(generator.randint(1, 2))
            for role in ("user", "assistant")
        ]
        for _ in range(STEPS * BATCH)
    ]


@pytest.fixture(scope="module")
def chat_file(rows, tmp_path_factory):
    file = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows))
    return file


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(TEMPLATE, pad_token="<end>")


@pytest.fixture(scope="module")
def folder_of(tokenizer, tmp_path_factory):
    """`folder_of("Qwen3")`: a model with random weights and its tokenizer, as transformers saves them."""
    root = tmp_path_factory.mktemp("models")

    def make(name):
        folder = root / name
        if not folder.exists():
            torch.manual_seed(0)
            model_type, further = MODELS[name]
            config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **SPECIAL, **further})
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def losses_of_trl(folder_of, rows, tmp_path_factory):
    """`losses_of_trl("Qwen3")`: of each step, in one process; with `packing`, of the first rows, all in each step."""
    found = {}

    def run(name, packing=False):
        if (name, packing) in found:
            return found[name, packing]
        order = range(NUM_PACKED) if packing else shuffled(np.arange(len(rows)), len(rows), seed=0, epoch=0)
        found[name, packing] = losses_of_sft(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32),
            train_dataset=datasets.Dataset.from_list([{"messages": rows[row]} for row in order]),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder_of(name)),
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=NUM_PACKED if packing else BATCH,
            max_length=PACKED_LENGTH if packing else LENGTH + 1,
            assistant_only_loss=True,
            packing=packing,
            router_aux_loss_coef=0.0,
            max_steps=STEPS,
            learning_rate=RATE,
        )
        return found[name, packing]

    return run


def run(settings):
    recipe = load_recipe(None, settings)
    degrees = recipe.parallel
    initialize_model_parallel(
        degrees.tensor_parallel_size,
        degrees.pipeline_parallel_size,
        context_parallel_size=degrees.context_parallel_size,
    )
    train(recipe)


@pytest.fixture
def settings(folder_of, chat_file, tmp_path):
    """`settings("Qwen3")`: of a run as TRL's."""

    def make(name):
        return [
            f"model.path={folder_of(name)}",
            f"data.path={chat_file}",
            "data.chat=true",
            f"data.sequence_length={LENGTH}",
            "data.held_out_fraction=0",
            f"train.steps={STEPS}",
            f"train.global_batch_size={BATCH}",
            "train.log_every=1",
            "train.eval_every=0",
            f"optimizer.lr={RATE}",
            "optimizer.schedule=constant",
            "optimizer.warmup_steps=0",
            "optimizer.weight_decay=0",
            "checkpoint.save_every=0",
            f"output={tmp_path / 'run'}",
        ]

    return make


def check(name, layout, folder, expected):
    losses = [record.loss for record in read_records(folder / "run/metrics.jsonl")]
    print(f"{name}, {layout}: {max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)):.1e}")
    assert losses == pytest.approx(expected, rel=1e-5, abs=0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_fine_tuning_are_those_of_trl(run_ranks, settings, losses_of_trl, tmp_path, name, layout):
    ranks, degrees = LAYOUTS[layout]

    run_ranks(run, ranks, [*settings(name), *degrees])

    check(name, layout, tmp_path, losses_of_trl(name))


@pytest.mark.parametrize("layout", ["one process", "TP 2 x PP 2", "CP 2"])
@pytest.mark.parametrize("name", [name for name, (model_type, _) in MODELS.items() if model_type in PACKED_TYPES])
def test_losses_of_packed_conversations_are_those_of_trl(
    run_ranks, settings, losses_of_trl, rows, tmp_path, name, layout
):
    ranks, degrees = (LAYOUTS | {"CP 2": (2, ["parallel.context_parallel_size=2"])})[layout]
    (tmp_path / "few.jsonl").write_text("\n".join(json.dumps({"messages": it}) for it in rows[:NUM_PACKED]))
    packed = [f"data.path={tmp_path / 'few.jsonl'}", "data.packing=true", f"data.sequence_length={PACKED_LENGTH}"]
    count = num_sequences([*settings(name), *packed])

    run_ranks(run, ranks, [*settings(name), *packed, *degrees, f"train.global_batch_size={count}"])

    assert count < NUM_PACKED / 2
    check(name, f"{layout}, packed", tmp_path, losses_of_trl(name, packing=True))


def num_sequences(settings):
    recipe = load_recipe(None, settings)
    return len(open_data(recipe, prepare_data(recipe)).train)
