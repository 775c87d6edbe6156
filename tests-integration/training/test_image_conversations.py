"""Training on conversations with images: tokens are those of the models' own processors, and losses those of a loop by
hand that calls transformers' models with them."""

import base64
import json
import os
import re
import resource
import shutil
import weakref
from io import BytesIO

import numpy as np
import pytest
import torch
from hf_survey.vision import VISION_FAMILIES, vision_processor, write_vision_folder
from nxd_cli import main
from nxd_data import (
    ChatTemplate,
    ImageProcessor,
    build_conversations,
    cut_conversations,
    image_folder,
    load_tokenizer,
    open_conversations,
)
from nxd_data.stored_images import ImageFiles
from nxd_parity import InFloat64
from nxd_trainer.from_recipe import recipe_model
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.vision_inputs import PACKED_VISION_TYPES, check_images_are_read
from PIL import Image
from runs_by_hand import train_by_hand, train_in_float64
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="processors need it: pip install transformers")
pytest.importorskip("torchvision", reason="processors need it: pip install torchvision")

SIZES = ((64, 48), (33, 90), (20, 20))  # of images in turn, width and height
STEPS, LENGTH, RATE = 3, 180, 3e-3
NUM_CONVERSATIONS, NUM_TRAINED = 12, 8
# The template lacks the token that Mllama's processor puts first, and PaliGemma's adds some around a prompt.
OTHER_TEXT = ("mllama", "paligemma")


def picture(number):
    width, height = SIZES[number % len(SIZES)]
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image):
    stream = BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory):
    """`processor_folder("gemma3")`: a tokenizer, a processor and a chat template, without weights."""
    root, made = tmp_path_factory.mktemp("processors"), {}

    def folder(family):
        if family not in made:
            made[family] = root / family
            vision_processor(family).save_pretrained(made[family])
        return made[family]

    return folder


def as_parts(messages):
    return [
        {**it, "content": [{"type": "text", "text": it["content"]}]} if isinstance(it["content"], str) else it
        for it in messages
    ]


TURNS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in it?"}]},
    {"role": "assistant", "content": "a red square"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "and "},
            {"type": "image"},
            {"type": "text", "text": " or "},
            {"type": "image"},
        ],
    },
    {"role": "assistant", "content": "blue circles"},
]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tokens_are_those_of_the_processor_and_answers_are_learned(processor_folder, tmp_path, family):
    folder, processor = processor_folder(family), vision_processor(family)
    images = [picture(number) for number in range(3)]
    row = {"messages": TURNS, "images": [{"bytes": png(image)} for image in images]}

    encoded = ChatTemplate(folder).encode_row("here", row, ImageFiles(tmp_path / "a.jsonl", tmp_path)).samples[0]

    text = processor.apply_chat_template(as_parts(TURNS), tokenize=False)
    expected = processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
    decode = processor.tokenizer.decode
    if family in OTHER_TEXT:
        expected = [it for it in expected if it != processor.tokenizer.bos_token_id]
        assert decode(expected).strip() == decode(encoded.tokens)
    else:
        assert list(expected) == encoded.tokens.tolist()
    assert decode(encoded.tokens[encoded.learned]) == "a red square</s>blue circles</s>"
    for image, found in zip(images, encoded.images, strict=True):
        assert found.size == image.size
        assert not encoded.learned[found.start : found.end].any()
    around = np.ones(len(encoded.tokens), dtype=bool)
    for found in encoded.images:
        around[found.start : found.end] = False
    image_tokens = [processor.image_token_id, *np.ravel(processor.image_token_ids)]
    assert not np.isin(encoded.tokens[around], image_tokens).any()
    assert np.isin(encoded.tokens, image_tokens).any()


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_inputs_of_a_batch_are_those_of_its_rows(processor_folder, family):
    processor = vision_processor(family)
    images = [[picture(0)], [], [picture(1), picture(2)]]
    ids = np.full((3, 12), 5)
    for row, of_row in enumerate(images):
        ids[row, 1 : 1 + len(of_row)] = processor.image_token_id

    found = ImageProcessor(processor_folder(family)).image_inputs(images, ids)

    text = [processor.image_token * len(of_row) for of_row in images if of_row]
    expected = processor(text=text, images=[it for it in images if it], return_tensors="pt", padding=True)
    names = set(expected) & set(ImageProcessor(processor_folder(family)).input_names) - {
        "token_type_ids",
        "mm_token_type_ids",
        "cross_attention_mask",
    }
    assert set(found) - {"cross_attention_mask"} == names
    for name in names:
        if family == "mllama":  # rows of the batch
            torch.testing.assert_close(found[name][[0, 2]], expected[name], rtol=0, atol=0)
            assert name == "aspect_ratio_mask" or not found[name][1].any()
        elif family == "idefics3":  # images of all rows as those of one
            flat = expected[name].flatten(0, 1)
            flat = flat[expected["pixel_attention_mask"].flatten(0, 1).any(-1).any(-1)]
            torch.testing.assert_close(found[name][0], flat, rtol=0, atol=0)
        else:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


class Decoded:
    """Images that are decoded when they are taken; counts those in memory."""

    def __init__(self, count):
        self._count, self.most, self._opened = count, 0, []

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        if index >= self._count:
            raise IndexError
        image = picture(index)
        self._opened.append(weakref.ref(image))
        self.most = max(self.most, sum(it() is not None for it in self._opened))
        return image


@pytest.mark.parametrize("family", [it for it in VISION_FAMILIES if it != "mllama"])
def test_images_of_a_batch_are_in_memory_one_after_the_other(processor_folder, family):
    processor, images = ImageProcessor(processor_folder(family)), Decoded(12)
    ids = np.full((1, 20), 5)

    found = processor.image_inputs([images], ids)

    assert images.most <= 3
    expected = vision_processor(family)(
        text=[processor.token * 12], images=[list(map(picture, range(12)))], return_tensors="pt"
    )
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_tokens_of_mllama_attend_to_the_images_before_them(processor_folder):
    processor = vision_processor("mllama")
    text = f"<s>a{processor.image_token}b{processor.image_token}cc"
    expected = processor(text=[text], images=[[picture(0), picture(1)]], return_tensors="pt")

    ids = expected["input_ids"].numpy()
    found = ImageProcessor(processor_folder("mllama")).image_inputs([[picture(0), picture(1)]], ids)

    torch.testing.assert_close(found["cross_attention_mask"], expected["cross_attention_mask"], rtol=0, atol=0)


def test_types_of_tokens_are_those_of_the_processor(processor_folder, tmp_path):
    for family in ("gemma3", "qwen2_5_vl", "glm4v"):
        processor = vision_processor(family)
        text = processor.apply_chat_template(as_parts(TURNS), tokenize=False)
        expected = processor(
            text=[text], images=[[picture(0), picture(1), picture(2)]], return_tensors="pt", add_special_tokens=False
        )
        ids = expected["input_ids"].numpy()

        types = ImageProcessor(processor_folder(family)).token_types(ids, np.zeros_like(ids, dtype=bool))

        [(name, found)] = types.items()
        torch.testing.assert_close(found, expected[name], rtol=0, atol=0)


def test_types_of_tokens_of_paligemma_tell_the_answer_from_the_prompt(processor_folder):
    ids = np.full((1, 6), 5)
    learned = np.array([[False, False, True, True, False, False]])  # labels: the tokens after each

    types = ImageProcessor(processor_folder("paligemma")).token_types(ids, learned)

    assert types["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1]]


def _rows():
    """Conversations with one, two, no and three images, in all forms."""
    for number in range(NUM_CONVERSATIONS):
        images = [f"pictures/{number}_{it}.png" for it in range((1, 2, 0, 3)[number % 4])]
        text = "What is in the image?" * (1 + number % 2)
        answer = {"role": "assistant", "content": "a red square and two blue circles"[: 8 + 2 * number]}
        yield images, text, answer


@pytest.fixture(scope="module")
def image_data(tmp_path_factory):
    """A folder with rows and their pictures."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "pictures").mkdir()
    lines = []
    for number, (images, text, answer) in enumerate(_rows()):
        parts = []
        for index, name in enumerate(images):
            image = picture(number + index)
            (folder / name).write_bytes(png(image))
            uri = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
            parts.append([{"type": "image", "path": name}, {"type": "image_url", "image_url": {"url": uri}}][index % 2])
        question = {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}
        lines.append(json.dumps({"messages": [question, answer]}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def text_data(tmp_path_factory):
    """A file of conversations without images."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"What is {it}?"}, {"role": "assistant", "content": f"It is {it}"}]}
        for it in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(family):
        if family not in made:
            made[family] = root / family
            write_vision_folder(family, made[family], dtype=torch.float64)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def expected_of(model_folder):
    """`expected_of("gemma3")`: the losses of each step and, after the last, that of the held-out conversations."""
    found = {}

    def run(family):
        if family in found:
            return found[family]
        processor = vision_processor(family)
        samples = []
        for number, (images, text, answer) in enumerate(_rows()):
            parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
            messages = as_parts([{"role": "user", "content": parts}, answer])
            pictures = [picture(number + index) for index in range(len(images))]
            whole, prompt = (
                processor(
                    text=[processor.apply_chat_template(given, tokenize=False, add_generation_prompt=asks)],
                    images=[pictures] if pictures else None,
                    return_tensors="pt",
                    add_special_tokens=False,
                )
                for given, asks in ((messages, False), (messages[:1], True))
            )
            inputs = {name: it.double() if it.is_floating_point() else it for name, it in whole.items()}
            samples.append((inputs, prompt["input_ids"].shape[1]))
        held_out = samples[2::3]
        trained = [sample for number, sample in enumerate(samples) if number % 3 != 2]
        assert len(trained) == NUM_TRAINED
        model = transformers.AutoModelForImageTextToText.from_pretrained(model_folder(family), dtype=torch.float64)

        def loss_over(chosen):
            total, count = torch.zeros((), dtype=torch.float64), 0
            for inputs, start in chosen:
                with InFloat64():
                    logits = model(**inputs, use_cache=False).logits[0]
                said = inputs["input_ids"][0, start:]
                total += F.cross_entropy(logits[start - 1 : -1], said, reduction="sum")
                count += len(said)
            return total / count

        losses = train_by_hand(model.parameters(), lambda _: loss_over(trained), steps=STEPS, rate=RATE)
        with torch.no_grad():
            found[family] = losses, loss_over(held_out).item()
        return found[family]

    return run


@pytest.fixture
def settings(image_data, tmp_path):
    return [
        f"data.path={image_data}",
        "data.chat=true",
        "model.towers=train",
        f"data.sequence_length={LENGTH}",
        f"data.held_out_fraction={1 / 3}",
        f"output={tmp_path / 'run'}",
        f"train.steps={STEPS}",
        f"train.global_batch_size={NUM_TRAINED}",
        "train.dtype=float64",
        "train.log_every=1",
        f"train.eval_every={STEPS}",
        f"optimizer.lr={RATE}",
        "optimizer.warmup_steps=2",
        "checkpoint.save_every=0",
    ]


TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
CP2, MICROBATCHES = "parallel.context_parallel_size=2", "train.gradient_accumulation_steps=4"
LAYOUTS = {
    "one process": (1, []),
    "microbatches": (1, [MICROBATCHES]),
    "DP 2": (2, [MICROBATCHES]),
    "TP 2": (2, [TP2]),
    "TP 2 + SP": (2, [TP2, "parallel.sequence_parallel=true"]),
    "CP 2": (2, [CP2]),
    "PP 2": (2, [PP2, MICROBATCHES]),
    "TP 2 x PP 2": (4, [TP2, PP2, MICROBATCHES]),
    "DP 2, ZeRO-3": (2, ["parallel.zero_stage=3", MICROBATCHES]),
}
PACKED_LENGTH, NUM_PACKED = {"idefics3": 300, "llava_next": 400}, 2  # the eight are two sequences
PACKED_LAYOUTS = {
    "one process": (1, []),
    "DP 2": (2, []),
    "TP 2": (2, [TP2]),
    "CP 2": (2, [CP2]),
    "PP 2": (2, [PP2, "train.gradient_accumulation_steps=2"]),
}
QUICK_PACKED = [("qwen2_5_vl", "DP 2"), ("internvl", "one process"), ("idefics3", "one process")]
QUICK = [("gemma3", "DP 2"), ("qwen2_5_vl", "DP 2"), ("qwen2_5_vl", "TP 2"), ("gemma3", "microbatches")]
QUICK += [("gemma3", "CP 2"), ("qwen3_vl", "TP 2 + SP")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, layout) in QUICK else pytest.mark.slow)
        for family in ("gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "llava_next", "internvl", "idefics3")
        for layout in LAYOUTS
    ],
)
def test_losses_are_those_of_a_loop_with_the_processor(
    run_ranks, model_folder, expected_of, settings, tmp_path, family, layout
):
    ranks, degrees = LAYOUTS[layout]

    run_ranks(train_in_float64, ranks, [*settings, f"model.path={model_folder(family)}", *degrees])

    losses, held_out_loss = expected_of(family)
    records = read_records(tmp_path / "run/metrics.jsonl")
    tolerance = 1e-10 if family in ("gemma3", "qwen2_5_vl", "qwen3_vl") else 1e-6
    assert [record.loss for record in records] == pytest.approx(losses, rel=tolerance, abs=0)
    assert records[-1].held_out_loss == pytest.approx(held_out_loss, rel=tolerance, abs=0)
    assert losses[-1] < losses[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, layout) in QUICK_PACKED else pytest.mark.slow)
        for family in PACKED_VISION_TYPES
        for layout in PACKED_LAYOUTS
        if layout == "one process" or family == "qwen2_5_vl"
    ],
)
def test_packed_conversations_have_the_losses_of_each_alone(
    run_ranks, model_folder, expected_of, settings, image_data, tmp_path, family, layout
):
    (ranks, degrees), folder, length = PACKED_LAYOUTS[layout], model_folder(family), PACKED_LENGTH.get(family, 200)
    entry = build_conversations(image_data, load_tokenizer(folder), ChatTemplate(folder), cache_folder=tmp_path)
    packed, _, _ = cut_conversations(
        open_conversations(entry, image_data), sequence_length=length, held_out_fraction=1 / 3, packed=True
    )
    assert len(packed) == NUM_PACKED
    packing = ["data.packing=true", f"data.sequence_length={length}", f"train.global_batch_size={NUM_PACKED}"]

    run_ranks(
        train_in_float64,
        ranks,
        [*settings, f"model.path={folder}", *packing, "train.eval_every=0", *degrees],
    )

    losses, _ = expected_of(family)
    records = read_records(tmp_path / "run/metrics.jsonl")
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-7, abs=0)


@pytest.mark.parametrize("family", ["gemma3", "mllama", "qwen3_5", "paligemma"])
def test_model_that_mixes_packed_documents_is_refused(run_ranks, model_folder, settings, family):
    settings = [*settings, f"model.path={model_folder(family)}", "data.packing=true"]

    with pytest.raises(RuntimeError, match=rf"data\.packing=true .* {family}"):
        run_ranks(train_in_float64, 1, settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["path", "sources", "evaluation_path"])
def test_model_whose_towers_are_left_out_refuses_images(
    run_ranks, model_folder, settings, image_data, text_data, tmp_path, place
):
    """The run ends before its first step, which is where `metrics.jsonl` begins."""
    data = {
        "path": [f"data.path={image_data}"],
        "sources": [f"data.sources={json.dumps({str(text_data): 0.5, str(image_data): 0.5})}", "data.path="],
        "evaluation_path": [f"data.path={text_data}", f"data.evaluation_path={image_data}"],
    }
    settings = [*settings, f"model.path={model_folder('gemma3')}", "model.towers=left_out", *data[place]]

    with pytest.raises(RuntimeError) as caught:
        run_ranks(train_in_float64, 1, settings)

    reason = (
        f"ValueError: {image_data} has images, but model.towers=left_out builds nothing that reads them; set "
        "model.towers to frozen or train, or leave the images out\n"
    )
    assert reason in str(caught.value)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_processor_that_does_not_load_is_named_where_rows_have_images(model_folder, settings, image_data, tmp_path):
    """Text alone does not need it; with images, it may break after they were tokenized."""
    folder = tmp_path / "broken"
    shutil.copytree(model_folder("gemma3"), folder)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text("{")

    vision = recipe_model(load_recipe(None, [*settings, f"model.path={folder}"])).vision

    assert not vision.names
    check_images_are_read(vision, [])
    with pytest.raises(ValueError, match=r"^chats has images, but the image processor of .*broken cannot be loaded: "):
        check_images_are_read(vision, ["chats"])


def test_processor_of_a_run_is_loaded_once(model_folder, settings, monkeypatch):
    loaded = []
    own = ImageProcessor.__init__
    monkeypatch.setattr(ImageProcessor, "__init__", lambda *given, **named: (loaded.append(1), own(*given, **named))[1])

    model = recipe_model(
        load_recipe(None, [*settings, f"model.path={model_folder('qwen2_5_vl')}", "data.packing=true"])
    )

    assert model.vision.processor.rope_index is not None
    assert len(loaded) == 1


@pytest.mark.parametrize(("family", "takes_packing"), [("gemma3", False), ("qwen2_5_vl", True)])
def test_savings_from_packing_are_shown_where_the_model_takes_it(model_folder, settings, capsys, family, takes_packing):
    assert main(["data", *settings, f"model.path={model_folder(family)}"]) == 0

    assert ("data.packing=true" in capsys.readouterr().out) == takes_packing


def test_resumed_run_has_the_losses_of_the_run_that_never_stopped(run_ranks, model_folder, settings, tmp_path):
    settings = [*settings, f"model.path={model_folder('qwen2_5_vl')}", "train.global_batch_size=4", "train.seed=3"]
    run_ranks(train_in_float64, 1, settings)
    whole = read_records(tmp_path / "run/metrics.jsonl")

    stopped = [*settings, f"output={tmp_path / 'again'}"]
    run_ranks(train_in_float64, 1, [*stopped, "train.stop_after=1"])
    run_ranks(train_in_float64, 2, [*stopped, MICROBATCHES.replace("4", "2")])

    again = read_records(tmp_path / "again/metrics.jsonl")
    assert [it.loss for it in again] == pytest.approx([it.loss for it in whole], rel=1e-10, abs=0)


@pytest.fixture
def encode(processor_folder, tmp_path):
    """`encode(row)`: tokenize a row of a file in a folder of its own."""
    folder = tmp_path / "data"
    folder.mkdir()

    def encoded(row, family="gemma3"):
        (folder / "chat.jsonl").write_text(json.dumps(row))
        of_model = processor_folder(family)
        entry = build_conversations(
            folder, load_tokenizer(of_model), ChatTemplate(of_model), cache_folder=tmp_path / "cache"
        )
        return open_conversations(entry, image_folder(folder))

    encoded.folder = folder
    return encoded


def _asks(*parts, **columns):
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}
    return {"messages": [question, {"role": "assistant", "content": "A cat"}], **columns}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (_asks({"type": "image", "path": "missing.png"}), "missing.png cannot be read: No such file"),
        (_asks({"type": "image", "path": "/etc/passwd"}), "passwd is outside the data folder"),
        (_asks({"type": "image", "path": "../secret.png"}), "secret.png is outside the data folder"),
        (_asks({"type": "image", "path": "link.png"}), "link.png is outside the data folder"),
        (_asks({"type": "image", "path": "pipe.png"}), "pipe.png is not a file"),
        (_asks({"type": "image", "path": "text.png"}), "the image is damaged, or none of PNG"),
        (_asks({"type": "image", "url": "http://example.com/a.png"}), "a.png is a URL"),
        (_asks({"type": "image", "url": "file:///etc/passwd"}), "passwd is a URL"),
        (_asks({"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}), "is not valid base64"),
        (_asks({"type": "image"}, {"type": "image"}, images=["good.png"]), "has 2 image parts without an image"),
        (_asks({"type": "image"}, images=[None]), "image is nothing"),
        (_asks({"type": "text", "text": "<start_of_image>"}), "spells '<start_of_image>', which stands for an image"),
        (
            _asks({"type": "text", "text": "<image_soft_token>"}),
            "spells '<image_soft_token>', which stands for an image",
        ),
        (
            _asks({"type": "image", "path": "good.png"}, {"type": "text", "text": "<image_soft_token>"}),
            "spells '<image_soft_token>', which stands for an image",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "<image>What <image>?"},
                    {"role": "assistant", "content": "A cat"},
                ],
                "images": ["good.png"],
            },
            "has 2 times <image> in its texts, but 1 images",
        ),
        (
            _asks({"type": "image", "path": "good.png"}, {"type": "text", "text": "<start_of_image>"}),
            "its 1 images become 2 times '<start_of_image>'",
        ),
    ],
)
def test_row_with_an_image_that_cannot_be_used_is_one_line(encode, tmp_path, row, reason):
    (tmp_path / "secret.png").write_bytes(png(picture(0)))
    (encode.folder / "good.png").write_bytes(png(picture(0)))
    (encode.folder / "link.png").symlink_to(tmp_path / "secret.png")
    (encode.folder / "text.png").write_text("a picture")
    os.mkfifo(encode.folder / "pipe.png")

    with pytest.raises(ValueError, match=r"chat\.jsonl, line 1") as caught:
        encode(row)

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "token", "kind"),
    [
        ("qwen2_5_vl", "<|video_pad|>", "a video"),
        ("glm4v", "<|video|>", "a video"),
        ("aya_vision", "<|IMG_PATCH|>", "an image"),
        ("internvl", "<video>", "a video"),
    ],
)
@pytest.mark.parametrize("has_image", [True, False])
def test_text_that_spells_a_token_of_features_is_one_line(encode, family, token, kind, has_image):
    (encode.folder / "good.png").write_bytes(png(picture(0)))
    image = [{"type": "image", "path": "good.png"}] if has_image else []

    reason = rf"chat\.jsonl, line 1: its text spells {re.escape(repr(token))}, which stands for {kind}; remove"
    with pytest.raises(ValueError, match=reason):
        encode(_asks(*image, {"type": "text", "text": token}), family)


def test_text_may_spell_the_tokens_around_images(encode):
    assert encode(_asks({"type": "text", "text": "<img>"}), "internvl").index.num_with_special_token == 1


def test_model_of_text_alone_refuses_images(encode, processor_folder, tmp_path):
    folder = tmp_path / "text"
    vision_processor("gemma3").tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text((processor_folder("gemma3") / "chat_template.jinja").read_text())
    (encode.folder / "good.png").write_bytes(png(picture(0)))
    row = _asks({"type": "image", "path": "good.png"})

    with pytest.raises(ValueError, match=r"line 1 has images, but .* has no image processor .* takes text alone"):
        ChatTemplate(folder).encode_row("chat.jsonl, line 1", row, ImageFiles(encode.folder / "a", encode.folder))


def test_length_budgets_count_the_tokens_of_images(encode):
    content = base64.b64encode(png(picture(0))).decode()
    row = _asks({"type": "image", "base64": content})
    row["messages"] += [{"role": "user", "content": row["messages"][0]["content"]}, row["messages"][1]]

    found = encode(row, "llava_next")

    tokens = found.images.ends - found.images.starts
    assert tokens.tolist() == [70, 70]
    with pytest.raises(
        ValueError, match=r"0 of 1 .*=70, as an image takes 70 tokens .* set data\.sequence_length=\d+ or"
    ):
        cut_conversations(found, sequence_length=70)
    sequences, _, cuts = cut_conversations(found, sequence_length=140)
    assert cuts.images_cut == 1
    assert len(sequences.images(np.array([0]))[0]) == 1


def test_images_that_just_fit_keep_the_answer(encode):
    row = _asks({"type": "image", "base64": base64.b64encode(png(picture(0))).decode()})
    found = encode(row, "llava_next")
    with pytest.raises(ValueError, match="or use smaller images") as caught:
        cut_conversations(found, sequence_length=60)
    needed = int(re.search(r"set data\.sequence_length=(\d+)", str(caught.value))[1])

    sequences, _, _ = cut_conversations(found, sequence_length=needed)

    assert sequences.count(np.array([0]))[0] == 1
    with pytest.raises(ValueError, match="0 of 1 conversations have a token to learn"):
        cut_conversations(found, sequence_length=needed - 1)


def _row_of_one_image(folder, count):
    Image.new("RGB", (3000, 2000)).save(folder / "large.png")
    return {
        "messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat"}],
        "images": ["large.png"] * count,
    }


def test_row_of_one_image_many_times_takes_the_memory_of_one(encode):
    row = _row_of_one_image(encode.folder, 10_000)
    encode(_asks({"type": "image", "path": "large.png"}))  # loads the processor
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    found = encode(row)

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert found.index.num_images == 10_000
    assert grown < 500 << 10  # KiB


def test_row_of_more_images_than_tokens_of_a_sequence_is_refused_before_they_are_read(
    processor_folder, tmp_path, encode
):
    row = _row_of_one_image(tmp_path, 10_000)
    files = ImageFiles(tmp_path / "chat.jsonl", tmp_path)
    (tmp_path / "large.png").unlink()

    reason = r"^line 1 has 10,000 images, but each takes a token or more of data\.sequence_length=512; give it fewer"
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(processor_folder("gemma3"), sequence_length=512).encode_row("line 1", row, files)
    found = encode(_row_of_one_image(encode.folder, 600))  # a cache that was made for longer sequences
    with pytest.raises(ValueError, match=r"^a conversation has 600 images, but each takes a token or more"):
        cut_conversations(found, sequence_length=512)


def test_images_of_too_many_tokens_are_refused_while_they_are_read(encode):
    row = _row_of_one_image(encode.folder, 100_000)

    with pytest.raises(ValueError, match=r"images\[\d+\]: the images up to this one take 1,048,\d+ tokens"):
        encode(row, "llava_next")
