"""Times 32 requests at a time with a shared system prompt: a server, and transformers' batched `generate`.

    python tools/bench/serving.py [--requests 32] [--batch-size 32] [--new-tokens 32] [--compiler export]

A server of a small Llama with random weights is started as a process of its own, on one worker. All requests are sent
at once and streamed. Shown are the tokens written per second over all requests, and the 50th and 99th percentile of the
seconds to the first token; beside them the tokens per second of transformers' `generate` for the same prompts in one
padded batch, whose first tokens all come at its end. An earlier version of the server is timed by the same file, with
its sources on PYTHONPATH and the `--batch-size` that it served by default. Takes minutes and leaves nothing behind.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time

SIZES = {
    "vocab_size": 257,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 768,
}
SYSTEM = "You are a helpful assistant. Answer in short sentences, and say so when you do not know. " * 5


def prompts_of(number: int) -> list[str]:
    """Each begins with the system prompt, and goes on by itself."""
    return [f"{SYSTEM}\nQuestion {index}: what is {index} times {index + 7}?" for index in range(number)]


def serve_llama(batch_size: int, compiler: str) -> None:
    """What the server's process does."""
    import torch  # noqa: PLC0415 - not for the clients
    from nxd_trace.generation import compile_generator  # noqa: PLC0415
    from nxd_trace.serving import CompletionService, serve  # noqa: PLC0415
    from nxd_trainer.compiled_generation import BuildLlamaDecoder  # noqa: PLC0415
    from nxd_trainer.data import ByteTokenizer  # noqa: PLC0415
    from nxd_trainer.models import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

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
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    first, number = 0.0, 0
    async for line in reader:
        if line.startswith(b'data: {"'):
            number += 1
            first = first or time.perf_counter() - begun
    writer.close()
    return first, number


async def timed_requests(port: int, prompts: list[str], new_tokens: int) -> str:
    """All at once."""
    begun = time.perf_counter()
    found = await asyncio.gather(*(timed_request(port, prompt, new_tokens) for prompt in prompts))
    seconds = time.perf_counter() - begun
    firsts = sorted(first for first, _ in found)
    rate = len(prompts) * new_tokens / seconds
    p50, p99 = firsts[len(firsts) // 2], firsts[int(len(firsts) * 0.99)]
    return f"{rate:8.1f} tokens/s   first token: p50 {p50:6.2f} s, p99 {p99:6.2f} s"


def time_server(options: argparse.Namespace) -> None:
    """Start a server, and time the requests twice: the first time finds nothing in the cache."""
    command = [sys.executable, __file__, "--serve", "--batch-size", str(options.batch_size)]
    server = subprocess.Popen([*command, "--compiler", options.compiler], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        log = ""
        while not (found := re.search(r"running on http://\S+:(\d+)", log)):
            line = server.stderr.readline()
            if not line:
                raise SystemExit(f"the server ended:\n{log}")
            log += line
        prompts = prompts_of(options.requests)
        for what in ("server, first time", "server, again"):
            print(f"{what:22}", asyncio.run(timed_requests(int(found[1]), prompts, options.new_tokens)), flush=True)
    finally:
        server.kill()
        server.wait()


def time_transformers(options: argparse.Namespace) -> None:
    """One padded batch."""
    import torch  # noqa: PLC0415 - not for the clients
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=None)).eval()
    rows = [list(prompt.encode()) for prompt in prompts_of(options.requests)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    begun = time.perf_counter()
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=options.new_tokens,
        min_new_tokens=options.new_tokens,
        do_sample=False,
    )
    seconds = time.perf_counter() - begun
    rate = options.requests * options.new_tokens / seconds
    print(f"{'transformers, a batch':22} {rate:8.1f} tokens/s   first token: {seconds:6.2f} s, with all others")


def main() -> None:
    """Time both."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
    time_server(options)
    time_transformers(options)


if __name__ == "__main__":
    main()
