"""Times requests to a server alone, and beside a thousand hostile and slow clients.

    python tools/bench/hostile_clients.py [--rounds 3] [--seconds 8] [--hostile 1000] [--good 20]

A server of a small Llama is started as a process of its own, on one worker. Good clients ask for 16 tokens, one request
after the other. Hostile clients, in a process of their own, say nothing, send heads and bodies a byte at a time, send
bodies that are too large, too deep, too long or no HTTP at all, stop texts of 200,000 characters, ask without reading
the answers, and leave streams that they began; each begins again a second after it is refused. Shown are the requests
that the good clients got answered and the 50th and 99th percentile of their seconds, alone and beside the hostile
clients, and the server's peak memory. The hostile clients need cores themselves: the floor is what the good clients get
beside a process that only burns as much processor time. Takes a minute and a half and leaves nothing behind.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

PATH = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GOOD = {"prompt": "once upon a time", "max_tokens": 16, "temperature": 0}


def serve_small_llama() -> None:
    """What the server's process does."""
    import torch  # noqa: PLC0415 - not for the clients
    from nxd_data import ByteTokenizer  # noqa: PLC0415
    from nxd_engine.models import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415
    from nxd_trace.generation import compile_generator  # noqa: PLC0415
    from nxd_trace.serving import CompletionService, ServerLimits, serve  # noqa: PLC0415
    from nxd_trainer.compiled_generation import BuildLlamaDecoder  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    weights = {name: value.detach() for name, value in LlamaForCausalLM(config).state_dict().items()}
    with compile_generator(
        BuildLlamaDecoder(config, torch.float32),
        batch_size=8,
        max_length=512,
        weights=weights,
        compiler="export",
        progress=False,
    ) as generator:
        limits = ServerLimits(client_timeout=5.0)
        serve(CompletionService(generator.engine, ByteTokenizer(), model="small", limits=limits), port=0)


def request(body: bytes, length: int | None = None) -> bytes:
    return PATH + b"Content-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


async def good_client(port: int, until: float) -> list[float]:
    """Ask until then; the seconds of each request."""
    seconds = []
    body = request(json.dumps(GOOD).encode())
    while (begun := time.perf_counter()) < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        answered = re.fullmatch(rb"HTTP/1.1 200 .*content-length: (\d+)\r\n.*", head, re.DOTALL)
        assert answered, head
        await reader.readexactly(int(answered[1]))
        writer.close()
        seconds.append(time.perf_counter() - begun)
    return seconds


async def drip(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A byte per second, until the server closes the connection."""
    for byte in data:
        if reader.at_eof() or reader.exception() is not None:
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def send(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All at once; waits for the server to close the connection."""
    writer.write(data)
    while await reader.read(1 << 16):
        pass


async def send_and_ignore(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All at once and again, without reading."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        writer.write(data)
        await writer.drain()


async def send_and_leave(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Go after the first piece of the answer."""
    writer.write(data)
    await reader.read(1 << 10)


Behaviour = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

STOP = json.dumps(GOOD | {"stop": "x" * 200_000}).encode()
HOSTILE: list[tuple[Behaviour, bytes]] = [
    *[(send, b"")] * 5,
    *[(drip, PATH + b"X-Slow: " + b"x" * 1000)] * 5,
    *[(drip, request(b"{" * 1000))] * 5,
    (send, request(STOP)),
    (send, request(b"{}", 10**12)),
    (send, request(b"[" * 100_000)),
    (send, request(b'{"prompt": [' + b"[]," * 100_000 + b"[]]}")),
    (send, request(b'{"prompt": [' + b"1," * 300_000 + b"1]}")),
    (send, bytes(10_000)),
    (send_and_ignore, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100),
    (send_and_leave, request(json.dumps(GOOD | {"stream": True}).encode())),
]


async def hostile_client(port: int, behaviour: Behaviour, data: bytes) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await behaviour(data, reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(1)


async def all_hostile(port: int, number: int) -> None:
    await asyncio.gather(*(hostile_client(port, *HOSTILE[index % len(HOSTILE)]) for index in range(number)))


async def all_good(port: int, number: int, seconds: float) -> list[float]:
    until = time.perf_counter() + seconds
    return list(chain.from_iterable(await asyncio.gather(*(good_client(port, until) for _ in range(number)))))


def burn(share: float) -> None:
    """Use this share of a core, in pieces of some milliseconds."""
    while True:
        end = time.perf_counter() + 0.005 * share
        while time.perf_counter() < end:
            pass
        time.sleep(0.005 * (1 - share))


def processor_seconds(process: int) -> float:
    """That a process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def time_beside(command: list[str], port: int, number: int, seconds: float) -> tuple[list[float], float]:
    """Of the good clients beside this process: the seconds of each request, and the share of a core that it used."""
    with subprocess.Popen(command) as other:
        asyncio.run(all_good(port, number, 2))
        used, begun = processor_seconds(other.pid), time.perf_counter()
        timed = asyncio.run(all_good(port, number, seconds))
        share = (processor_seconds(other.pid) - used) / (time.perf_counter() - begun)
        other.kill()
    return timed, share


def show(what: str, seconds: list[float]) -> float:
    """The 99th percentile."""
    seconds = sorted(seconds)
    p50, p99 = (seconds[min(len(seconds) - 1, int(len(seconds) * part))] for part in (0.5, 0.99))
    print(f"{what:<24} {len(seconds):6} requests   p50 {1000 * p50:7.1f} ms   p99 {1000 * p99:7.1f} ms", flush=True)
    return p99


def peak_mib(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def port_of(log: Iterable[str]) -> int:
    for line in log:
        if found := re.search(r"running on \S+:(\d+)", line):
            return int(found[1])
    raise RuntimeError("the server ended before it listened; see what it printed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--hostile", type=int, default=1000)
    parser.add_argument("--good", type=int, default=20)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--burn", type=float, metavar="SHARE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_small_llama()
    if options.attack is not None:
        return asyncio.run(all_hostile(options.attack, options.hostile))
    if options.burn is not None:
        return burn(options.burn)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the clients need the other cores
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        port = port_of(server.stderr)
        logging = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        alone: list[float] = []
        beside: list[float] = []
        floor: list[float] = []
        attack = [sys.executable, __file__, "--attack", str(port), "--hostile", str(options.hostile)]
        for _ in range(options.rounds):  # in turns, since other programs may use the machine
            asyncio.run(all_good(port, options.good, 1))
            alone += asyncio.run(all_good(port, options.good, options.seconds))
            before = peak_mib(server.pid)
            timed, share = time_beside(attack, port, options.good, options.seconds)
            beside += timed
            burner = [sys.executable, __file__, "--burn", str(min(1.0, share))]
            floor += time_beside(burner, port, options.good, options.seconds)[0]
        p99 = show("alone", alone)
        p99_beside = show(f"beside {options.hostile} hostile", beside)
        p99_floor = show(f"floor, {share:.2f} cores", floor)
        print(
            f"ratios of the p99s: {p99_beside / p99:.2f}, of the floor {p99_floor / p99:.2f}; "
            f"peak memory {before:.0f} -> {peak_mib(server.pid):.0f} MiB"
        )
        server.terminate()
        logging.wait()
    return None


if __name__ == "__main__":
    main()
