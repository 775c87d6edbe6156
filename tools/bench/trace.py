"""Times calls of traced models beside the plain model, and loading beside compiling.

    python tools/bench/trace.py [--rounds 7] [--compilers export,inductor] [--degrees 1,2]

First the border between a process and its workers: a program that adds one to eight numbers. Then the forward of a
small Llama, `[1, 16]` tokens to logits, in one plain process and traced at each degree. All variants take their turn in
every round; shown are the best and the median time of a call. For each traced Llama, the seconds of a trace that
compiles, of a trace that finds its programs in the cache, and of loading the saved model. Last, greedy generation of 64
tokens from a prompt of 16: the compiled generator at each degree, our eager loop, and `generate` of transformers where
it is installed, with a model of the same sizes. Takes about ten minutes, of which AOTInductor's compilation is most,
and leaves nothing behind.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_layers import gather_from_tensor_model_parallel_region
from nxd_trace import TensorParallelModel, parallel_model_load, parallel_model_save, parallel_model_trace
from nxd_trace.generation import Generator, compile_generator
from nxd_trainer.compiled_generation import LlamaDecoder
from nxd_trainer.generate import generate
from torch import Tensor, nn

SIZES = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=128,
)
TOKENS = torch.arange(16).view(1, 16)
EIGHT = torch.zeros(8)
NEW_TOKENS = 64


class AddOne(nn.Module):
    """The least that a program can do."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return x + 1


class WholeLogits(nn.Module):
    """A small Llama with its logits gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = LlamaForCausalLM(SIZES)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[batch, seq]` to `[batch, seq, vocab]`."""
        return gather_from_tensor_model_parallel_region(self.llama(tokens))


@dataclass(frozen=True)
class Times:
    """Seconds of bringing one traced model up, in three ways."""

    compiling: float
    cached: float
    loading: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compilers", default="export,inductor")
    parser.add_argument("--degrees", default="1,2")
    options = parser.parse_args()
    degrees = [int(degree) for degree in options.degrees.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        time_border(degrees, options.rounds, Path(folder))
        time_llama(options.compilers.split(","), degrees, options.rounds, Path(folder))
        time_generation(options.compilers.split(","), degrees, options.rounds, Path(folder))


def time_border(degrees: list[int], rounds: int, folder: Path) -> None:
    models = {degree: trace(AddOne, EIGHT, "export", degree, folder) for degree in degrees}
    plain = AddOne()
    calls: dict[str, Callable[[], object]] = {"in this process": partial(plain, EIGHT)}
    calls |= {f"through {degree} workers": partial(model, EIGHT) for degree, model in models.items()}
    print(f"{'adding one to 8 numbers, us per call':44} {'best':>8} {'median':>8}")
    for name, (best, middle) in in_turns(calls, rounds, calls_per_turn=300).items():
        print(f"  {name:42} {best * 1e6:8.1f} {middle * 1e6:8.1f}")
    for model in models.values():
        model.close()


def time_llama(compilers: list[str], degrees: list[int], rounds: int, folder: Path) -> None:
    models: dict[str, TensorParallelModel] = {}
    times: dict[str, Times] = {}
    for compiler in compilers:
        for degree in degrees:
            name = f"{compiler}, tp {degree}"
            models[name], times[name] = bring_up(compiler, degree, folder)
    plain = WholeLogits().eval()
    calls: dict[str, Callable[[], object]] = {"plain, one process": partial(plain, TOKENS)}
    calls |= {name: partial(model, TOKENS) for name, model in models.items()}
    print(f"\n{'forward of a small Llama, ms per call':44} {'best':>8} {'median':>8}")
    with torch.inference_mode():
        for name, (best, middle) in in_turns(calls, rounds, calls_per_turn=20).items():
            print(f"  {name:42} {best * 1e3:8.2f} {middle * 1e3:8.2f}")
    print(f"\n{'bringing it up, s':44} {'compile':>8} {'cached':>8} {'load':>8}")
    for name, of_model in times.items():
        print(f"  {name:42} {of_model.compiling:8.1f} {of_model.cached:8.1f} {of_model.loading:8.1f}")
    for model in models.values():
        model.close()


def time_generation(compilers: list[str], degrees: list[int], rounds: int, folder: Path) -> None:
    prompt = TOKENS[0]
    eager = build_decoder().model.eval()
    calls: dict[str, Callable[[], object]] = {
        "our eager loop": lambda: list(generate(eager, prompt, max_new_tokens=NEW_TOKENS, temperature=0))
    }
    calls |= transformers_generate(prompt)
    generators: list[Generator] = []
    for compiler in compilers:
        for degree in degrees:
            generator = compile_generator(
                build_decoder,
                batch_size=1,
                max_length=SIZES.max_position_embeddings,
                prefill_lengths=(len(prompt),),
                tp_degree=degree,
                compiler=compiler,
                cache_dir=folder / "cache",
                progress=False,
            )
            generators.append(generator)
            calls[f"{compiler}, tp {degree}"] = partial(
                generator.generate, [prompt.tolist()], max_new_tokens=NEW_TOKENS
            )
    print(f"\n{f'generating {NEW_TOKENS} tokens, tokens/s':44} {'best':>8} {'median':>8}")
    with torch.inference_mode():
        for name, (best, middle) in in_turns(calls, rounds, calls_per_turn=1).items():
            print(f"  {name:42} {NEW_TOKENS / best:8.1f} {NEW_TOKENS / middle:8.1f}")
    for generator in generators:
        generator.close()


def build_decoder() -> LlamaDecoder:
    torch.manual_seed(0)
    return LlamaDecoder(LlamaForCausalLM(SIZES))


def transformers_generate(prompt: Tensor) -> dict[str, Callable[[], object]]:
    """A call of transformers' `generate`; none where it is not installed."""
    if find_spec("transformers") is None:
        return {}
    import transformers  # noqa: PLC0415 - optional

    torch.manual_seed(0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id")) | {"pad_token_id": 0}
    config = transformers.LlamaConfig(**asdict(SIZES), **special)
    model = transformers.LlamaForCausalLM(config).eval()
    return {
        "transformers' generate": partial(
            model.generate, prompt.unsqueeze(0), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    }


def bring_up(compiler: str, degree: int, folder: Path) -> tuple[TensorParallelModel, Times]:
    start = time.perf_counter()
    with trace(WholeLogits, TOKENS, compiler, degree, folder) as model:
        compiled = time.perf_counter()
        saved = folder / f"{compiler}_{degree}"
        parallel_model_save(model, saved)
    again = time.perf_counter()
    trace(WholeLogits, TOKENS, compiler, degree, folder).close()
    cached = time.perf_counter()
    loaded = parallel_model_load(saved)
    end = time.perf_counter()
    return loaded, Times(compiling=compiled - start, cached=cached - again, loading=end - cached)


def trace(
    func: Callable[[], nn.Module], inputs: Tensor, compiler: str, degree: int, folder: Path
) -> TensorParallelModel:
    return parallel_model_trace(
        func, inputs, tp_degree=degree, compiler=compiler, cache_dir=folder / "cache", progress=False
    )


def in_turns(
    calls: dict[str, Callable[[], object]], rounds: int, *, calls_per_turn: int
) -> dict[str, tuple[float, float]]:
    """Best and median seconds of a call; the first round, which warms up, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds + 1):
        for name, call in calls.items():
            for _ in range(calls_per_turn):
                start = time.perf_counter()
                call()
                if round_number > 0:
                    seconds[name].append(time.perf_counter() - start)
    return {name: (min(of_name), median(of_name)) for name, of_name in seconds.items()}


if __name__ == "__main__":
    main()
