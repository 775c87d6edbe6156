"""Compiled generation writes, token for token, what the same models write by other means."""

from dataclasses import replace

import generating_llama
import pytest
import torch
from nxd_trace.compilers.builtin import has_cpp_compiler
from nxd_trace.generation import compile_generator
from nxd_trace.manifest import RankManifest, rank_folder
from nxd_trainer.compiled_generation import BuildLlamaDecoder
from nxd_trainer.generate import generate

pytestmark = pytest.mark.sample(1)  # each takes its time

PROMPTS = [[3, 5, 7, 11, 13], [2], [31, 41, 59, 26, 53, 58, 9, 7, 9, 32, 38]]  # the last is fed in two parts
NEW = 64
SETTINGS = {"batch_size": 3, "max_length": 80, "prefill_lengths": (8,), "compiler": "export"}
SLOW = pytest.mark.slow
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 16,  # more than the prompts, fewer than the texts
}


def check(generator, expected: list[list[int]]) -> None:
    assert all(len(set(tokens)) > NEW // 8 for tokens in expected), "tokens that repeat would hide mistakes"
    with generator:
        found = generator.generate(PROMPTS, max_new_tokens=NEW)
    assert [completion.tokens for completion in found] == expected


def transformers_writes(name: str) -> list[list[int]]:
    import generating_models

    model = generating_models.whole(name)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "degree"),
    [
        pytest.param("llama", 1, marks=SLOW),
        ("llama", 2),
        pytest.param("qwen2", 1, marks=SLOW),
        pytest.param("qwen2", 2, marks=SLOW),
        pytest.param("qwen3", 1, marks=SLOW),
        pytest.param("qwen3", 2, marks=SLOW),
        ("qwen3_moe", 1),
        pytest.param("qwen3_moe", 2, marks=SLOW),
    ],
)
def test_greedy_tokens_of_ragged_prompts_equal_those_of_transformers(name, degree):
    pytest.importorskip("transformers", reason="the reference is transformers' generate: pip install transformers")
    import generating_models

    check(compile_generator(generating_models.DECODERS[name], tp_degree=degree, **SETTINGS), transformers_writes(name))


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="AOTInductor needs g++ or clang++")
@pytest.mark.parametrize("degree", [1, 2])
def test_greedy_tokens_of_the_default_compiler_equal_those_of_transformers(degree, tmp_path, capfd):
    pytest.importorskip("transformers", reason="the reference is transformers' generate: pip install transformers")
    import generating_models

    settings = SETTINGS | {"compiler": None, "tp_degree": degree, "cache_dir": tmp_path}

    check(compile_generator(generating_models.llama, **settings), transformers_writes("llama"))

    assert "compiling 4 of 4 distinct programs with inductor" in capfd.readouterr().err


@pytest.mark.parametrize("rope_scaling", [None, pytest.param(LONG_ROPE, marks=SLOW)], ids=["plain", "long"])
def test_our_llama_compiled_on_meta_writes_what_it_writes_eagerly(rope_scaling):
    if rope_scaling is not None:
        pytest.importorskip("transformers", reason="it computes the frequencies: pip install transformers")
    config = replace(generating_llama.CONFIG, rope_scaling=rope_scaling)
    model = generating_llama.whole(config)
    expected = [list(generate(model, torch.tensor(it), max_new_tokens=NEW, temperature=0)) for it in PROMPTS]
    build = BuildLlamaDecoder(config, torch.float64)

    check(compile_generator(build, tp_degree=2, weights=dict(model.state_dict()), **SETTINGS), expected)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"context_parallel_size": 2}),
        pytest.param("qwen3", {"context_parallel_size": 2, "tp_degree": 2}, marks=SLOW),
        pytest.param("qwen3_moe", {"context_parallel_size": 4}, marks=SLOW),
    ],
)
def test_prompts_that_replicas_read_together_go_on_as_transformers_writes(name, sizes):
    pytest.importorskip("transformers", reason="the reference is transformers' generate: pip install transformers")
    import generating_models

    check(compile_generator(generating_models.DECODERS[name], **sizes, **SETTINGS), transformers_writes(name))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_moe", {"tp_degree": 2, "expert_parallel_size": 2}),
        pytest.param("qwen3_moe", {"context_parallel_size": 2, "expert_parallel_size": 2}, marks=SLOW),
        pytest.param("qwen3_moe", {"tp_degree": 2, "context_parallel_size": 2, "expert_parallel_size": 2}, marks=SLOW),
        pytest.param("qwen3_moe", {"tp_degree": 2, "context_parallel_size": 2, "expert_parallel_size": 4}, marks=SLOW),
        pytest.param("mixtral", {"tp_degree": 2, "expert_parallel_size": 2}, marks=SLOW),
        pytest.param("mixtral", {"context_parallel_size": 4, "expert_parallel_size": 4}, marks=SLOW),
        pytest.param("mixtral", {"tp_degree": 4, "expert_parallel_size": 2}, marks=SLOW),
        pytest.param("deepseek_v3", {"tp_degree": 2, "expert_parallel_size": 2}, marks=SLOW),
        pytest.param("deepseek_v3", {"context_parallel_size": 2, "expert_parallel_size": 2}, marks=SLOW),
    ],
)
def test_experts_on_several_ranks_write_as_transformers_does(name, sizes):
    pytest.importorskip("transformers", reason="the reference is transformers' generate: pip install transformers")
    import generating_models

    generator = compile_generator(generating_models.DECODERS[name], **sizes, **SETTINGS)

    bank = "decoder.model.model.layers.1.mlp.experts.down_proj"
    stored = RankManifest.read(generator.model.folder / rank_folder(0)).weights[bank]
    assert stored.shape[0] == 4 // sizes["expert_parallel_size"]
    check(generator, transformers_writes(name))


@pytest.mark.parametrize("rope_scaling", [None, pytest.param(LONG_ROPE, marks=SLOW)], ids=["plain", "long"])
def test_prompts_that_replicas_read_together_go_on_as_our_llama_writes(rope_scaling):
    if rope_scaling is not None:
        pytest.importorskip("transformers", reason="it computes the frequencies: pip install transformers")
    config = replace(generating_llama.CONFIG, rope_scaling=rope_scaling)
    model = generating_llama.whole(config)
    expected = [list(generate(model, torch.tensor(it), max_new_tokens=NEW, temperature=0)) for it in PROMPTS]
    build = BuildLlamaDecoder(config, torch.float64)
    sizes = {"tp_degree": 2, "context_parallel_size": 2}

    check(compile_generator(build, **sizes, weights=dict(model.state_dict()), **SETTINGS), expected)
