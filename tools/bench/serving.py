"""Times 32 requests at a time with a shared system prompt: servers, and transformers' batched `generate`, in turns.

    python tools/bench/serving.py [--rounds 3] [--requests 32] [--new-tokens 32] [--compiler export] [--old WORKTREE]

A server of a small Llama with random weights is a process of its own, on one worker. All requests are sent at once and
streamed. Shown are the tokens written per second over all requests, and the 50th and 99th percentile of the seconds to
the first token; beside them the tokens per second of transformers' `generate` for the same prompts in one padded batch,
whose first tokens all come at its end. `--old` names a working tree of an earlier version, whose server is timed beside
this one with the 8 sequences at a time that it served by default. Both run for all rounds, and take turns, so that the
ratios, which are shown last as medians, hold on a busy machine. Takes minutes and leaves nothing behind.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SIZES = {
    "vocab_size": 257,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 768,
}
_OLD_BATCH_SIZE = 8
SYSTEM = "You are a helpful assistant. Answer in short sentences, and say so when you do not know. " * 5


def prompts_of(number: int) -> list[str]:
    """Each begins with the system prompt, and goes on by itself."""
    return [f"{SYSTEM}\nQuestion {index}: what is {index} times {index + 7}?" for index in range(number)]


def serve_llama(batch_size: int, compiler: str) -> None:
    """What the server's process does."""
    import torch  # noqa: PLC0415 - not for the clients
    from nxd_data import ByteTokenizer  # noqa: PLC0415
    from nxd_engine.models import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415
    from nxd_trace.generation import compile_generator  # noqa: PLC0415
    from nxd_trace.serving import CompletionService, serve  # noqa: PLC0415
    from nxd_trainer.compiled_generation import BuildLlamaDecoder  # noqa: PLC0415

    config = LlamaConfig(**SIZES)  # type: ignore[arg-type]
    torch.manual_seed(0)
    weights = {name: value.detach() for name, value in LlamaForCausalLM(config).state_dict().items()}
    with compile_generator(
        BuildLlamaDecoder(config, torch.float32),
        batch_size=batch_size,
        max_length=SIZES["max_position_embeddings"],
        weights=weights,
        compiler=compiler,
        progress=False,
    ) as generator:
        serve(CompletionService(generator.engine, ByteTokenizer(), model="small"), port=0)


async def timed_request(port: int, prompt: str, new_tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens."""
    body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    first, number = 0.0, 0
    async for line in reader:
        if line.startswith(b'data: {"'):
            number += 1
            first = first or time.perf_counter() - begun
    writer.close()
    return first, number


@dataclass
class Measured:
    """Of one round.

    Attributes:
        rate: tokens per second, over all requests.
        p50: seconds to the first token of half of them.
        p99: of nearly all.
    """

    rate: float
    p50: float
    p99: float

    def __str__(self) -> str:
        return f"{self.rate:8.1f} tokens/s   first token: p50 {self.p50:6.2f} s, p99 {self.p99:6.2f} s"


async def timed_requests(port: int, prompts: list[str], new_tokens: int) -> Measured:
    """All at once."""
    begun = time.perf_counter()
    found = await asyncio.gather(*(timed_request(port, prompt, new_tokens) for prompt in prompts))
    seconds = time.perf_counter() - begun
    firsts = sorted(first for first, _ in found)
    return Measured(
        len(prompts) * new_tokens / seconds, firsts[len(firsts) // 2], firsts[int((len(firsts) - 1) * 0.99)]
    )


@contextmanager
def running_server(options: argparse.Namespace, worktree: Path | None) -> Iterator[int]:
    """A server's port, while it runs; of another version's sources if a working tree is given."""
    batch_size = options.batch_size if worktree is None else _OLD_BATCH_SIZE
    command = [sys.executable, __file__, "--serve", "--batch-size", str(batch_size), "--compiler", options.compiler]
    sources = [] if worktree is None else [str(path) for path in sorted(worktree.glob("packages/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    try:
        log = ""
        while not (found := re.search(r"running on http://\S+:(\d+)", log)):
            line = server.stderr.readline()
            if not line:
                raise SystemExit(f"the server ended:\n{log}")
            log += line
        yield int(found[1])
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def transformers_batch(options: argparse.Namespace) -> Callable[[], Measured]:
    """A function that generates one padded batch."""
    import torch  # noqa: PLC0415 - not for the clients
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=None)).eval()
    rows = [list(prompt.encode()) for prompt in prompts_of(options.requests)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    lengths = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}

    def measure() -> Measured:
        begun = time.perf_counter()
        model.generate(ids, attention_mask=mask, do_sample=False, **lengths)
        seconds = time.perf_counter() - begun
        return Measured(options.requests * options.new_tokens / seconds, seconds, seconds)

    return measure


def _time_server(port: int, prompts: list[str], new_tokens: int) -> Measured:
    return asyncio.run(timed_requests(port, prompts, new_tokens))


def time_all(options: argparse.Namespace) -> None:
    """Rounds in turns. In the first one the servers' caches have nothing of the system prompt."""
    prompts = prompts_of(options.requests)
    found: dict[str, list[Measured]] = {}
    with ExitStack() as running:
        ports = {"server": running.enter_context(running_server(options, None))}
        if options.old is not None:
            ports["old server"] = running.enter_context(running_server(options, options.old))
        ways: dict[str, Callable[[], Measured]] = {
            name: partial(_time_server, port, prompts, options.new_tokens) for name, port in ports.items()
        }
        ways["transformers, a batch"] = transformers_batch(options)
        for number in range(options.rounds):
            for name, measure in ways.items():
                found.setdefault(name, []).append(measure())
                print(f"round {number + 1}  {name:22} {found[name][-1]}", flush=True)
    ours = found.pop("server")
    for name, theirs in found.items():
        ratio = statistics.median(mine.rate / other.rate for mine, other in zip(ours, theirs, strict=True))
        sooner = statistics.median(other.p50 / mine.p50 for mine, other in zip(ours, theirs, strict=True))
        print(f"server : {name:22} {ratio:.2f} times the tokens/s; first tokens (p50) {sooner:.1f} times sooner")


def main() -> None:
    """Time all."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--old", type=Path, metavar="WORKTREE", help="of an earlier version")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--compiler", default="export")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_llama(options.batch_size, options.compiler)
        return
    print(f"{options.requests} requests of {options.new_tokens} tokens, {os.cpu_count()} processors")
    time_all(options)


if __name__ == "__main__":
    main()
