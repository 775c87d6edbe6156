"""Each prompt of a batch is continued as if it were alone, whatever joins and leaves."""

import threading

import pytest
import tiny_decoder
import torch
from nxd_trace import parallel_model_load, parallel_model_save
from nxd_trace.generation import Generator, SamplingSettings, compile_generator, unpad_prompts
from nxd_trace.generation.cache import BlockPool

pytestmark = pytest.mark.sample(25)  # each takes its time

PROMPTS = [[3, 5, 7], [2], [31, 1, 26, 5, 8, 9, 7, 9, 30, 4, 6], [11, 12], [9] * 5]
NEW = 16
SETTINGS = {"batch_size": 2, "max_length": 40, "prefill_lengths": (4, 6), "compiler": "export", "progress": False}


@pytest.fixture(scope="module", params=[1, 2])
def generator(request):
    """A generator with two rows for five prompts, the longest of which takes two chunks."""
    with compile_generator(tiny_decoder.TinyDecoder, tp_degree=request.param, **SETTINGS) as generator:
        yield generator


def test_greedy_tokens_equal_those_without_a_cache(generator):
    found = generator.generate(PROMPTS, max_new_tokens=NEW)

    assert [completion.tokens for completion in found] == [tiny_decoder.plain_greedy(prompt, NEW) for prompt in PROMPTS]


def test_tokens_are_reported_as_they_are_chosen(generator):
    reported = {}

    found = generator.generate(
        PROMPTS[:3], max_new_tokens=4, on_token=lambda prompt, token: reported.setdefault(prompt, []).append(token)
    )

    assert [reported[index] for index in range(3)] == [completion.tokens for completion in found]


def test_generation_ends_after_a_stop_token(generator):
    expected = tiny_decoder.plain_greedy(PROMPTS[0], NEW)
    stop = expected[5]

    (found,) = generator.generate(PROMPTS[:1], max_new_tokens=NEW, stop_tokens=(stop,))

    assert found.tokens == expected[: expected.index(stop) + 1]
    assert found.finish_reason == "stop"


def test_samples_depend_on_the_seed_and_not_on_the_batch(generator):
    sampling = {"max_new_tokens": NEW, "temperature": 9.0}

    together = generator.generate(PROMPTS, seed=5, **sampling)
    alone = [generator.generate([prompt], seed=5 + index, **sampling)[0] for index, prompt in enumerate(PROMPTS)]
    other = generator.generate(PROMPTS, seed=6, **sampling)

    assert together == alone
    assert together != other


def test_an_error_of_the_callback_leaves_the_generator_usable(generator):
    def interrupt(prompt: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(PROMPTS, max_new_tokens=NEW, on_token=interrupt)

    assert generator.generate(PROMPTS[:1], max_new_tokens=NEW)[0].tokens == tiny_decoder.plain_greedy(PROMPTS[0], NEW)


def test_threads_generate_one_after_the_other(generator):
    found = {}

    def generate(prompt: tuple[int, ...]) -> None:
        found[prompt] = generator.generate([prompt], max_new_tokens=NEW)[0].tokens

    threads = [threading.Thread(target=generate, args=(tuple(prompt),)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {tuple(prompt): tiny_decoder.plain_greedy(prompt, NEW) for prompt in PROMPTS}


def test_a_callback_that_generates_is_refused(generator):
    with pytest.raises(RuntimeError, match=r"on_token called generate\(\)"):
        generator.generate([[1]], max_new_tokens=2, on_token=lambda prompt, token: generator.generate([[1]]))


def test_prompts_may_be_tensors_and_arrays(generator):
    ids = torch.tensor([[3, 5, 7], [2, 4, 6]])

    for prompts in (ids, ids.numpy(), list(ids)):
        found = generator.generate(prompts, max_new_tokens=2)
        assert [it.tokens for it in found] == [tiny_decoder.plain_greedy(prompt, 2) for prompt in ids.tolist()]


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ([], ValueError, "the prompt is empty"),
        ([1] * 39, ValueError, r"39 prompt tokens and max_new_tokens=2 .* max_length=40 .* 1 or fewer"),
        ([32], ValueError, r"token id 32 is outside the vocabulary 0\.\.31"),
        ([-1], ValueError, "token id -1 is outside the vocabulary"),
        (7, TypeError, "a prompt is 7, a int; expected a list of token ids"),
        ("ab", TypeError, "a prompt is 'ab', a str; expected"),
        ([1.5], TypeError, "holds values that are not token ids: 'float'"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(generator, prompt, error, text):
    with pytest.raises(error, match=text):
        generator.generate([[1], prompt], max_new_tokens=2)
    assert generator.engine.is_idle


def test_a_prompt_may_fill_the_cache(generator):
    prompt = torch.arange(39).remainder(32).tolist()

    assert generator.generate([prompt, [1]], max_new_tokens=1)[0].tokens == tiny_decoder.plain_greedy(prompt, 1)


def test_short_prompts_join_the_batch_in_one_step(generator):
    engine = generator.engine
    first, second = (engine.add(prompt, SamplingSettings(max_new_tokens=1)) for prompt in PROMPTS[:2])

    assert engine.step() == [first, second]
    assert [first.tokens, second.tokens] == [tiny_decoder.plain_greedy(prompt, 1) for prompt in PROMPTS[:2]]


def test_step_processes_two_chunks_of_a_long_prompt_and_a_token_of_the_others(generator):
    engine = generator.engine
    short = engine.add(PROMPTS[0], SamplingSettings(max_new_tokens=9))
    engine.step()
    long = engine.add(torch.arange(30).flip(0), SamplingSettings(max_new_tokens=1))  # no other test's beginning

    extended = engine.step()

    assert extended == [short]
    assert (len(short.tokens), long.num_computed) == (2, 2 * SETTINGS["prefill_lengths"][-1])
    engine.clear()


def test_a_saved_model_generates_the_same_when_loaded(generator, tmp_path):
    expected = generator.generate(PROMPTS, max_new_tokens=NEW)
    parallel_model_save(generator.model, tmp_path / "model")

    with Generator(parallel_model_load(tmp_path / "model")) as loaded:
        assert loaded.generate(PROMPTS, max_new_tokens=NEW) == expected


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 0}, {"max_length": 1}, {"prefill_lengths": (1,)}, {"prefill_lengths": (41,)}]
)
def test_sizes_that_do_not_fit_each_other_are_refused(sizes):
    with pytest.raises(ValueError, match=r"batch_size=.* must be 1 or more, max_length=.* 2 or more, and each of"):
        compile_generator(tiny_decoder.TinyDecoder, **SETTINGS | sizes)


def test_a_model_that_was_not_made_for_generation_is_refused(trace):
    import traced_models

    with pytest.raises(ValueError, match="was not traced for generation; create it with compile_generator"):
        Generator(trace(traced_models.total, torch.ones(2, 3)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpad_prompts_removes_padding_on_either_side(side):
    ids, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    if side == "left":
        ids, mask = ids.flip(1), mask.flip(1)

    expected = [[1, 2, 3], [4]] if side == "right" else [[3, 2, 1], [4]]
    assert unpad_prompts(ids, mask) == expected


@pytest.mark.parametrize(
    ("mask", "text"),
    [([[1, 0, 1]], "padding between tokens"), ([[0, 0, 0]], "0 everywhere"), ([[1, 1]], r"shape \(1, 3\)")],
)
def test_masks_with_padding_between_tokens_are_refused(mask, text):
    with pytest.raises(ValueError, match=text):
        unpad_prompts(torch.tensor([[1, 2, 3]]), torch.tensor(mask))


def test_replicas_split_a_prompt_and_continue_alike(tmp_path):
    settings = SETTINGS | {"prefill_lengths": (2, 4), "tp_degree": 2, "context_parallel_size": 2}
    expected = [tiny_decoder.plain_greedy(prompt, NEW) for prompt in PROMPTS]

    with compile_generator(tiny_decoder.ReadsAtMostTwoColumns, **settings) as generator:
        found = generator.generate(PROMPTS, max_new_tokens=NEW)
        caches = [generator.model.read_state("cache.keys_0", rank) for rank in range(4)]
        parallel_model_save(generator.model, tmp_path / "model")
    with Generator(parallel_model_load(tmp_path / "model")) as loaded:
        again = loaded.generate(PROMPTS, max_new_tokens=NEW)

    assert [completion.tokens for completion in found] == expected
    assert [completion.tokens for completion in again] == expected
    # Ranks 0 and 2 have the first head, 1 and 3 the second; padding, in block 0, is each one's own.
    for rank in (0, 1):
        assert torch.equal(caches[rank][:, 1:], caches[rank + 2][:, 1:])
    assert not torch.equal(caches[0][:, 1:], caches[1][:, 1:])


def test_prefill_lengths_that_replicas_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"multiples of context_parallel_size=2, .*; 3 is not"):
        compile_generator(tiny_decoder.TinyDecoder, **SETTINGS | {"prefill_lengths": (3, 4)}, context_parallel_size=2)


def test_shared_block_is_free_once_its_last_user_frees_it():
    pool = BlockPool(3)
    shared, other = pool.allocate(2)
    pool.cache_full(shared, b"beginning")
    assert pool.get_cached([b"beginning"]) == [shared]

    pool.free([shared])
    pool.free([other])

    assert pool.allocate(1) == [other]
    pool.free([shared])
    assert pool.allocate(1) == [shared]
