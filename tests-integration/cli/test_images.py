"""`nxd serve` and `nxd generate` answer about images with the text of transformers, by the model's own processor."""

import base64
import contextlib
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("openai")
pytest.importorskip("uvicorn", reason="nxd serve needs it: pip install 'nxd-trace[serve]'")
pytest.importorskip("torchvision", reason="processors of images need it: pip install torchvision")

import openai
from nxd_trainer.compiled_generation import open_for_compilation
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # which is no package

# Features in embeddings, between layers, attended in both directions, tiles, and a prompt attended as a whole.
FAMILIES = ["gemma3", "qwen2_5_vl", "qwen3_vl", "llava_next", "paligemma"]
OTHERS = ["aya_vision", "cohere2_vision", "glm4v", "granite4_vision", "idefics3", "internvl", "mistral3"]
NEW = 8


def picture(width, height, seed):
    random = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 255, (height, width, 3), generator=random, dtype=torch.uint8).numpy())


def encoded(image, form="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def data_uri(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


TALKS = [
    ["What is in the picture?"],
    [picture(40, 30, 1), "What is this?"],
    [picture(40, 30, 2), "What is this?"],
    ["The red one", picture(40, 30, 1), "or", picture(30, 64, 3), picture(100, 50, 4), "this one?"],
    [picture(33, 47, 5), picture(40, 30, 1)],
]


def parts_of(talk, image_part):
    return [{"type": "text", "text": it} if isinstance(it, str) else image_part(it) for it in talk]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of(family)`: the folder of a small model."""
    from hf_survey.vision import write_vision_folder

    folders = {}

    def make(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            write_vision_folder(family, folders[family])
        return folders[family]

    return make


def of_transformers(folder, talk):
    """The greedy text of `model.generate`, with the inputs of the model's processor."""
    import transformers

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    messages = [{"role": "user", "content": parts_of(talk, lambda _: {"type": "image"})}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [it for it in talk if not isinstance(it, str)]
    if images:
        inputs = processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        inputs.pop("labels", None)
    else:
        inputs = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(tokens, skip_special_tokens=True)


@contextlib.contextmanager
def served(folder, **sizes):
    """A client of a server of the model in a folder."""
    from nxd_trace.serving import CompletionService, ServerLimits, make_app
    from nxd_trainer.served_images import ServedImages
    from starlette.testclient import TestClient

    model = open_for_compilation(folder, images="yes")
    with model.compile(batch_size=3, max_length=256, compiler="export", progress=False, **sizes) as generator:
        service = CompletionService(
            generator.engine,
            model.codec.tokenizer,
            model="small",
            chat=model.codec.chat,
            images=ServedImages(model.images),
            end_tokens=model.codec.end_tokens,
            limits=ServerLimits(max_body_bytes=1 << 24, max_waiting=200),
        )
        with TestClient(make_app(service), base_url="http://localhost", raise_server_exceptions=False) as http:
            yield openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)


def ask(client, content):
    found = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=NEW
    )
    return found.choices[0].message.content


def content_of(talk):
    return parts_of(talk, lambda it: {"type": "image_url", "image_url": {"url": data_uri(encoded(it))}})


@pytest.mark.sample(1)  # each takes its time
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(it, marks=pytest.mark.slow) for it in OTHERS)])
def test_concurrent_requests_with_images_are_answered_with_the_text_of_transformers(folder_of, family):
    expected = [of_transformers(folder_of(family), talk) for talk in TALKS]

    with served(folder_of(family)) as client:
        alone = [ask(client, content_of(talk)) for talk in TALKS]
        with ThreadPoolExecutor(32) as threads:
            numbers = [number % len(TALKS) for number in range(32)]
            together = list(threads.map(lambda number: ask(client, content_of(TALKS[number])), numbers))

    assert alone == expected
    assert together == [expected[number] for number in numbers]
    assert len(set(expected)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_workers_that_share_a_model_answer_about_images_alike(folder_of, family):
    expected = [of_transformers(folder_of(family), talk) for talk in TALKS]

    with served(folder_of(family), tp_degree=2) as client:
        assert [ask(client, content_of(talk)) for talk in TALKS] == expected


def hostile_urls():
    """URLs by the reason why each is refused."""
    gif = encoded(picture(8, 8, 0), "GIF", save_all=True, append_images=[picture(8, 8, 1)])
    whole = encoded(picture(40, 30, 1))
    large = encoded(Image.new("L", (9000, 7000)))
    return {
        "animated": data_uri(gif),
        "damaged": data_uri(whole[:-60]),
        "damaged, or none of": data_uri(b"<svg/>"),
        "is empty": data_uri(b""),
        "pixels": data_uri(encoded(Image.new("1", (60_000, 20_000)))),
        "more than 67,108,864 pixels together": [data_uri(large)] * 2,
        "32 or fewer": [data_uri(whole)] * 33,
        "with its images, more than": [data_uri(encoded(picture(40, 30, it))) for it in range(32)],
        "not valid base64": "data:image/png;base64,!!!!",
        "expected an image": "data:text/html;base64,AAAA",
        "is not a data URI": "file:///etc/passwd",
        "does not fetch": "http://169.254.169.254/latest",
    }


@pytest.mark.slow
def test_hostile_images_are_refused_and_the_server_goes_on(folder_of):
    with served(folder_of("gemma3")) as client:
        for reason, urls in hostile_urls().items():
            parts = [
                {"type": "image_url", "image_url": {"url": it}} for it in ([urls] if isinstance(urls, str) else urls)
            ]
            with pytest.raises(openai.BadRequestError, match=reason) as raised:
                ask(client, parts)
            assert len(raised.value.message) < 600
        with pytest.raises(openai.BadRequestError, match="remove this token"):
            ask(client, [*content_of(TALKS[1]), {"type": "text", "text": "<start_of_image>"}])
        assert ask(client, content_of(TALKS[1])) == of_transformers(folder_of("gemma3"), TALKS[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", [*FAMILIES, "mllama", "qwen3_5", "granite4_vision"])
def test_generate_answers_about_images_with_the_text_of_transformers(folder_of, nxd, tmp_path, family):
    talk = [picture(40, 30, 1), picture(30, 64, 3), "What is this?"]
    (tmp_path / "a.png").write_bytes(encoded(talk[0]))
    (tmp_path / "b.bmp").write_bytes(encoded(talk[1], "BMP"))

    found = nxd(
        *("generate", str(folder_of(family)), "--chat", "--image", "a.png", "--image", "b.bmp"),
        *("--prompt", talk[2], "--max-new-tokens", str(NEW)),
    )

    assert found.stdout == of_transformers(folder_of(family), talk) + "\n", found.stderr


def test_generate_refuses_images_in_one_line(folder_of, nxd, make_chat_model, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(picture(40, 30, 1)))
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    seeing, blind = str(folder_of("gemma3")), str(make_chat_model("Llama"))

    found = [
        nxd("generate", blind, "--image", "a.png", "--prompt", "x"),
        nxd("generate", blind, "--image", "a.png", "--prompt", "x", "--compiled"),
        nxd("generate", seeing, "--image", "b.png", "--prompt", "x"),
        nxd("generate", seeing, "--image", "nowhere.png", "--prompt", "x"),
    ]

    assert [it.returncode for it in found] == [2] * 4
    reasons = ["reads text alone, not images", "reads text alone, not images", "damaged", "cannot be read"]
    for result, reason in zip(found, reasons, strict=True):
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1
        assert not result.stdout  # the line is not in the middle of another
