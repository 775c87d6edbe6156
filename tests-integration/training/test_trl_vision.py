"""Fine-tuning on conversations with pictures beside TRL: four families have the losses of `SFTTrainer` at each layout.

Twenty steps on the same rows, processor and weights, in float32. TRL trains in one process, with the loss on the
completion. It gets the rows in the order in which the recipe's seed has them.
"""

import json
import random

import numpy as np
import pytest
import torch
from beside_trl import losses_of_sft
from hf_survey.vision import write_vision_folder
from hf_survey.vision_batch import picture
from nxd_data.loader import shuffled
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import train

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
datasets = pytest.importorskip("datasets", reason="TRL needs it: pip install datasets")
pytest.importorskip("torchvision", reason="processors of images need it: pip install torchvision")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's and those of what it imports

STEPS, BATCH, LENGTH, RATE = 20, 4, 320, 1e-3
FAMILIES = ("gemma3", "qwen2_5_vl", "mistral3", "llava_next")
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
MICROBATCHES = "train.gradient_accumulation_steps=2"
LAYOUTS = {
    "one process": (1, []),
    "TP 2": (2, [TP2]),
    "PP 2": (2, [PP2, MICROBATCHES]),
    "DP 2, ZeRO-1": (2, ["parallel.zero_stage=1"]),
}


@pytest.fixture(scope="module")
def rows():
    """Conversations of one turn, with one or two pictures of different sizes."""
    generator = random.Random(0)
    return [
        {
            "pictures": [generator.randrange(8) for _ in range(generator.randint(1, 2))],
            "question": "What is in the image?" * generator.randint(1, 2),
            "answer": "".join(generator.choices("abcdef ", k=generator.choice([1, 3, 7, 15]))),
        }
        for _ in range(STEPS * BATCH)
    ]


@pytest.fixture(scope="module")
def chat_file(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    for number in range(8):
        picture(number).save(folder / f"{number}.png")
    file = folder / "chat.jsonl"
    lines = [{**as_messages(row), "images": [f"{number}.png" for number in row["pictures"]]} for row in rows]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def as_messages(row):
    question = [*({"type": "image"} for _ in row["pictures"]), {"type": "text", "text": row["question"]}]
    answer = [{"type": "text", "text": row["answer"]}]
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of("gemma3")`: a model with random weights and its processor, as transformers saves them."""
    root = tmp_path_factory.mktemp("models")

    def make(family):
        folder = root / family
        if not folder.exists():
            write_vision_folder(family, folder)
        return folder

    return make


@pytest.fixture(scope="module")
def losses_of_trl(folder_of, rows, tmp_path_factory):
    """`losses_of_trl("gemma3")`: of each step, in one process."""
    found = {}

    def run(family):
        if family in found:
            return found[family]
        order = shuffled(np.arange(len(rows)), len(rows), seed=0, epoch=0)
        given = [{**as_messages(rows[it]), "images": [picture(n) for n in rows[it]["pictures"]]} for it in order]
        found[family] = losses_of_sft(
            model=transformers.AutoModelForImageTextToText.from_pretrained(folder_of(family), dtype=torch.float32),
            train_dataset=datasets.Dataset.from_list(given),
            processing_class=transformers.AutoProcessor.from_pretrained(folder_of(family)),
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=BATCH,
            max_length=None,
            completion_only_loss=True,
            max_steps=STEPS,
            learning_rate=RATE,
        )
        return found[family]

    return run


def run(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    train(recipe)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_have_the_losses_of_trl(run_ranks, losses_of_trl, folder_of, chat_file, tmp_path, family, layout):
    expected = losses_of_trl(family)
    num_ranks, of_layout = LAYOUTS[layout]
    settings = [
        f"model.path={folder_of(family)}",
        "model.towers=train",
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
        *of_layout,
    ]

    run_ranks(run, num_ranks, settings, timeout=600)

    losses = [record.loss for record in read_records(tmp_path / "run/metrics.jsonl")]
    print(f"{family}, {layout}: {max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)):.1e}")
    assert losses == pytest.approx(expected, rel=1e-5, abs=0)
