"""With a draft model, every text is the same as without, whatever shares the batch; there are only fewer steps."""

import os
import signal

import pytest
import tiny_decoder
from nxd_trace import WorkerError
from nxd_trace.generation import GenerationEngine, Generator, SamplingSettings, compile_generator

pytestmark = pytest.mark.sample(3)  # each takes its time

PROMPTS = [[3, 5, 7], [2], [31, 1, 26, 5, 8, 9, 7, 9, 30, 4, 6], [11, 12], [9] * 5]
NEW = 16
SIZES = {"batch_size": 2, "max_length": 40, "prefill_lengths": (4,), "compiler": "export", "progress": False}


@pytest.fixture(scope="module")
def model():
    """A generator that verifies three draft tokens for each of two sequences."""
    with compile_generator(tiny_decoder.TinyDecoder, num_speculative_tokens=3, **SIZES) as generator:
        yield generator.model


@pytest.fixture(scope="module")
def draft():
    with compile_generator(tiny_decoder.TinyDraft, num_speculative_tokens=1, **SIZES) as generator:
        yield generator.model


@pytest.fixture
def engine(model, draft):
    engine = GenerationEngine(model, draft)
    engine.clear()
    return engine


def written(engine, prompts, settings) -> list[list[int]]:
    """Return the texts of prompts that run together."""
    sequences = [engine.add(prompt, it) for prompt, it in zip(prompts, settings, strict=True)]
    while not engine.is_idle:
        engine.step()
    return [sequence.tokens for sequence in sequences]


def test_greedy_texts_are_those_without_a_draft(model, draft):
    reported = {}
    generator = Generator(model, draft)

    found = generator.generate(
        PROMPTS, max_new_tokens=NEW, on_token=lambda prompt, token: reported.setdefault(prompt, []).append(token)
    )

    expected = [tiny_decoder.plain_greedy(prompt, NEW) for prompt in PROMPTS]
    assert [completion.tokens for completion in found] == expected
    assert [reported[index] for index in range(len(PROMPTS))] == expected
    proposed, accepted = generator.engine.num_draft_tokens
    assert 0 < accepted < proposed


def test_accepted_draft_tokens_save_steps(engine):
    sequence = engine.add(PROMPTS[0], SamplingSettings(max_new_tokens=NEW))
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1

    assert len(sequence.tokens) == NEW
    assert steps == NEW - engine.num_draft_tokens[1]


def test_stop_token_among_draft_tokens_ends_the_text(engine):
    expected = tiny_decoder.plain_greedy(PROMPTS[0], NEW)
    for stop in set(expected):
        (found,) = written(engine, PROMPTS[:1], [SamplingSettings(max_new_tokens=NEW, stop_tokens=(stop,))])
        assert found == expected[: expected.index(stop) + 1]


def test_sampled_and_penalized_texts_beside_a_greedy_one_are_those_without_a_draft(model, engine):
    plain = GenerationEngine(model)
    greedy = SamplingSettings(max_new_tokens=NEW, num_logprobs=2)
    for other in (
        SamplingSettings(max_new_tokens=NEW, temperature=9.0, seed=5),
        SamplingSettings(max_new_tokens=NEW, repetition_penalty=1.5, frequency_penalty=0.5),
        SamplingSettings(max_new_tokens=NEW, prompt_logprobs=True, num_logprobs=0),
    ):
        plain.clear()
        expected = written(plain, PROMPTS[:2], [greedy, other])
        engine.clear()
        assert written(engine, PROMPTS[:2], [greedy, other]) == expected


def test_logprobs_are_those_without_a_draft(model, engine):
    plain = GenerationEngine(model)
    found = []
    for it in (plain, engine):
        sequence = it.add(PROMPTS[0], SamplingSettings(max_new_tokens=NEW, num_logprobs=2))
        while not it.is_idle:
            it.step()
        found.append(sequence.logprobs)

    for without, having in zip(*found, strict=True):
        assert without.token == having.token
        assert without.logprob == pytest.approx(having.logprob, abs=1e-12)


def test_prefixes_are_shared_and_sequences_that_leave_change_nothing(engine):
    settings = SamplingSettings(max_new_tokens=NEW)
    system = list(range(20))
    written(engine, [[*system, 4]], [settings])

    leaving = engine.add([*system, 5], settings)
    staying = engine.add([*system, 6], settings)
    for _ in range(3):
        engine.step()
    engine.remove(leaving)
    joining = engine.add([*system, 7], settings)
    while not engine.is_idle:
        engine.step()

    assert leaving.num_cached == staying.num_cached == joining.num_cached == 20
    assert staying.tokens == tiny_decoder.plain_greedy([*system, 6], NEW)
    assert joining.tokens == tiny_decoder.plain_greedy([*system, 7], NEW)


def test_text_may_fill_the_cache(engine):
    prompt = list(range(30))

    assert written(engine, [prompt], [SamplingSettings(max_new_tokens=10)]) == [tiny_decoder.plain_greedy(prompt, 10)]


@pytest.mark.slow
def test_draft_that_does_not_fit_is_refused(model, draft):
    with (
        compile_generator(tiny_decoder.LargerVocabulary, num_speculative_tokens=1, **SIZES) as other,
        pytest.raises(ValueError, match="the draft model has vocab_size=33, but the model vocab_size=32; use a draft"),
    ):
        Generator(model, other.model)
    with (
        compile_generator(tiny_decoder.TinyDecoder, **SIZES) as without,
        pytest.raises(ValueError, match="compiled without speculative tokens; pass compile_generator num_speculative"),
    ):
        Generator(without.model, draft)
    with pytest.raises(ValueError, match=r"num_speculative_tokens=-1 must be 0 \(no draft model\) or more"):
        compile_generator(tiny_decoder.TinyDecoder, num_speculative_tokens=-1, **SIZES)


@pytest.mark.slow
def test_death_of_a_drafts_worker_is_raised_and_the_model_restarts(model):
    with compile_generator(tiny_decoder.TinyDraft, num_speculative_tokens=1, **SIZES) as draft:
        engine = GenerationEngine(model, draft.model)
        os.kill(draft.model.worker_pids[0], signal.SIGKILL)

        with pytest.raises(WorkerError, match="SIGKILL"):
            written(engine, PROMPTS[:1], [SamplingSettings(max_new_tokens=NEW)])
        draft.model.restart()
        engine.clear()

        found = written(engine, PROMPTS[:1], [SamplingSettings(max_new_tokens=NEW)])
    assert found == [tiny_decoder.plain_greedy(PROMPTS[0], NEW)]
