"""Prompts with features in the places of tokens are continued as a plain model would, whatever shares the batch."""

from functools import partial

import openai
import pytest
import serve_tiny
import tiny_decoder
import torch
from nxd_trace.generation import GenerationEngine, PromptInputs, SamplingSettings, compile_generator
from nxd_trace.serving import CompletionService, make_app
from starlette.testclient import TestClient

NEW = 8
SIZES = {"batch_size": 3, "max_length": 40, "prefill_lengths": (4, 6), "compiler": "export", "progress": False}
LETTERS = serve_tiny.Letters()


def features(seed: int, at: list[int], length: int, spans=(), shift: int = 0) -> PromptInputs:
    """Features of the tokens `at`, which lie at rotary positions of their own, as an image's do."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(len(at), 2, tiny_decoder.HIDDEN, generator=random, dtype=torch.float64)
    rotary = torch.arange(length).unsqueeze(1).repeat(1, 2)
    rotary[at, 1] = at[0] + shift
    rotary[at[-1] + 1 :] -= 1  # as if the image were one position shorter than its tokens
    return PromptInputs(torch.tensor(at), values, tuple(spans), rotary)


PROMPTS = [
    ([3, 5, 7, 2, 9], None),
    ([3, 0, 0, 0, 0, 7], features(0, [1, 2, 3, 4], 6, [(1, 5)])),
    ([3, 0, 0, 0, 0, 7], features(1, [1, 2, 3, 4], 6, [(1, 5)])),
    ([1, 2, 0, 0, 3, 4, 5, 0, 0, 0, 0, 0, 7, 8, 9], features(2, [2, 3, 7, 8, 9, 10, 11], 15, [(7, 12)], shift=1)),
    ([0] * 12 + [4, 5], features(3, list(range(12)), 14)),
]
EXPECTED = [tiny_decoder.plain_greedy(prompt, NEW, inputs, num_layers=2) for prompt, inputs in PROMPTS]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def generator(request):
    sizes = {"input_shapes": tiny_decoder.FEATURES, "tp_degree": request.param, "num_speculative_tokens": 2, **SIZES}
    with compile_generator(tiny_decoder.DecoderWithFeatures, **sizes) as generator:
        yield generator


def greedy(engine: GenerationEngine, prompt, inputs=None, salt=b""):
    sequence = engine.add(prompt, SamplingSettings(max_new_tokens=NEW, temperature=0), salt, inputs)
    while not engine.is_idle:
        engine.step()
    return sequence


def test_prompts_with_features_are_continued_as_by_a_plain_model(generator):
    prompts, inputs = zip(*PROMPTS, strict=True)

    found = generator.generate(prompts, inputs=inputs, max_new_tokens=NEW, temperature=0)
    reversed_too = generator.generate(prompts[::-1], inputs=inputs[::-1], max_new_tokens=NEW, temperature=0)

    assert [it.tokens for it in found] == EXPECTED
    assert [it.tokens for it in reversed_too] == EXPECTED[::-1]
    assert len({tuple(it) for it in EXPECTED}) == len(EXPECTED)  # so that features and positions matter


def test_prefixes_are_shared_by_equal_features_only(generator):
    engine = generator.engine
    block = engine._block_size
    prompt = [3, *[0] * (2 * block), 7, 8]
    first, other = (features(seed, list(range(1, 2 * block + 1)), len(prompt)) for seed in (4, 5))
    again = features(4, list(range(1, 2 * block + 1)), len(prompt))
    elsewhere = features(4, list(range(1, 2 * block + 1)), len(prompt), shift=2)

    found = [greedy(engine, prompt, inputs, b"shared") for inputs in (first, other, again, elsewhere, None)]

    assert [it.num_cached for it in found] == [0, 0, 2 * block, 0, 0]
    assert found[0].tokens == found[2].tokens != found[1].tokens


def test_a_block_depends_on_the_whole_span_that_it_begins(generator):
    engine = generator.engine
    block = engine._block_size
    at = list(range(block - 2, block + 2))
    prompt = [3] * (block - 2) + [0] * 4 + [7]
    first = features(6, at, len(prompt), [(at[0], at[-1] + 1)])
    other = features(6, at, len(prompt), [(at[0], at[-1] + 1)])
    other.features[-1] += 1  # in the second block

    found = [greedy(engine, prompt, inputs, b"spans") for inputs in (first, other)]

    assert [it.num_cached for it in found] == [0, 0]
    assert [it.tokens for it in found] == [
        tiny_decoder.plain_greedy(prompt, NEW, it, num_layers=2) for it in (first, other)
    ]


def test_a_draft_reads_the_ids_and_changes_nothing(generator):
    sizes = {**SIZES, "num_speculative_tokens": 1}
    with compile_generator(tiny_decoder.TinyDraft, **sizes) as draft:
        engine = GenerationEngine(generator.model, draft.model)
        engine.clear()

        assert [greedy(engine, *it).tokens for it in PROMPTS] == EXPECTED


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (features(0, [1, 2], 4), "the rotary positions have shape"),
        (features(0, [1, 5], 6), "outside the prompt of 5 tokens"),
        (PromptInputs(torch.tensor([1]), torch.zeros(1, 1, 3)), "the features have shape"),
        (features(0, [0, 1, 2, 3, 4], 5, [(0, 5)]), None),
        (features(0, list(range(7)), 7, [(0, 7)]), "7 tokens of the prompt attend to each other"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused(generator, inputs, text):
    prompt = [1] * (7 if len(inputs.at) == 7 else 5)
    if text is None:
        generator.engine.check(prompt, SamplingSettings(max_new_tokens=1), inputs)
        return

    with pytest.raises(ValueError, match=text):
        generator.engine.check(prompt, SamplingSettings(max_new_tokens=1), inputs)


def test_a_model_of_text_alone_refuses_features(tiny_generator):
    with pytest.raises(ValueError, match="compiled for text alone"):
        tiny_generator.engine.check([1, 2], SamplingSettings(max_new_tokens=1), features(0, [1], 2))


class LettersAndFeatures:
    """A chat template of letters, in which `#` stands for an image; its URL is the seed of its features."""

    def encode_prompt(self, messages, images=(), tools=None, variables=None, *, longest=None):
        del tools, variables
        said = "".join(
            part if isinstance(part, str) else part.get("text", "#") for it in messages for part in it["content"]
        )
        if not images:
            return LETTERS.encode(said)
        if any(url == "broken" for _, url in images):
            raise ValueError(f"{images[0][0]}: the image is damaged")
        parts = said.split("#")
        tokens, at = list(LETTERS.encode(parts[0])), []
        for part in parts[1:]:
            at += range(len(tokens), len(tokens) + 3)
            tokens += [0] * 3 + list(LETTERS.encode(part))
        assert longest == SIZES["max_length"] - 1
        return tokens, features(sum(int(url) for _, url in images), at, len(tokens))


@pytest.fixture
def connect(generator):
    """`connect(images)`: a client of a server that reads images with this encoder."""
    open_clients = []

    def connect_to(images):
        service = CompletionService(generator.engine, LETTERS, model="tiny", chat=LettersAndFeatures(), images=images)
        http = TestClient(make_app(service), base_url="http://localhost", raise_server_exceptions=False)
        open_clients.append(http.__enter__())
        return openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)

    yield connect_to
    for http in open_clients:
        http.__exit__(None, None, None)


def ask(client, *content):
    parts = [
        {"type": "text", "text": it} if isinstance(it, str) else {"type": "image_url", "image_url": {"url": str(it)}}
        for it in content
    ]
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=NEW, temperature=0
    )


def test_parts_with_images_are_answered(connect):
    client = connect(LettersAndFeatures())

    found = ask(client, "once", 7, "upon")

    tokens, inputs = LettersAndFeatures().encode_prompt(
        [{"content": ["once#upon"]}], [("", "7")], longest=SIZES["max_length"] - 1
    )
    expected = tiny_decoder.plain_greedy(tokens, NEW, inputs, num_layers=2)
    assert found.choices[0].message.content == LETTERS.decode(expected[: (*expected, 31).index(31)])
    assert found.usage.prompt_tokens == len("once") + 3 + len("upon")
    assert ask(client, "once", 8, "upon").choices[0].message.content != found.choices[0].message.content
    assert client.models.list().data[0].input_modalities == ["text", "image"]


@pytest.mark.parametrize(
    ("make", "part", "text"),
    [
        (type(None), 7, r"the model 'tiny' reads text alone; remove the image in messages\[0\].content\[1\]"),
        (LettersAndFeatures, "broken", r"messages\[0\].content\[1\]: the image is damaged"),
    ],
)
def test_images_that_cannot_be_read_are_refused(connect, make, part, text):
    parts = [{"type": "text", "text": "once"}, {"type": "image_url", "image_url": {"url": str(part)}}]

    with pytest.raises(openai.BadRequestError, match=text) as raised:
        connect(make()).chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])

    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_audio"}, "type 'input_audio'; expected text, or image_url"),
        ({"type": "image_url"}, "no image_url.url"),
        ({"type": "image_url", "image_url": {"url": 7}}, "no image_url.url"),
        ({"type": "text"}, "type 'text'; expected text"),
        ("text", "type 'text'; expected text"),
    ],
)
def test_parts_of_other_types_are_refused(connect, part, text):
    ask_with = partial(connect(LettersAndFeatures()).chat.completions.create, model="tiny")

    with pytest.raises(openai.BadRequestError, match=text):
        ask_with(messages=[{"role": "user", "content": [part]}])
