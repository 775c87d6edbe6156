"""Sends random and damaged requests to every endpoint of `nxd serve`, and looks at what the server does.

    python tools/fuzz_server.py [--minutes 60] [--seed 0]

`nxd serve` runs on a small model with random weights. Each case takes a good request, changes it by its own seed
(values of its JSON, bytes of its body, bytes of the whole request, its method and path) and waits for the answer.
Whatever comes must be answered by less than 500, or its connection closed, within a minute; the server's memory may
grow by ten times the request and 64 MiB; and it must print no traceback and stay well. Anything else is printed with
the seed that repeats it, and the exit code is 1. Leaves nothing behind.
"""

import argparse
import collections
import copy
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fuzz import ODD, change_bytes, places_in

MEMORY = 64 << 20  # bytes, beside ten times the request
SECONDS_OF_A_CASE = 60
SECONDS_OF_THE_START = 600
CLIENT_TIMEOUT = 0.5  # seconds
LONGEST = 1 << 16  # bytes of a part that is repeated
MAX_TOKENS = 2
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"

COMPLETION: dict[str, Any] = {
    "model": "nxd",
    "prompt": "once upon a time",
    "max_tokens": MAX_TOKENS,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x", "yz"],
    "logprobs": 2,
    "echo": False,
    "seed": 1,
    "logit_bias": {"3": -1.0},
    "presence_penalty": 0.1,
    "stream": False,
    "stream_options": None,
    "user": "somebody",
}
CHAT: dict[str, Any] = {
    "model": "nxd",
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "max_completion_tokens": MAX_TOKENS,
    "top_logprobs": 2,
    "logprobs": True,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "response_format": {"type": "text"},
    "stream": True,
    "stream_options": {"include_usage": True},
}
PATHS = ["/v1/models", "/v1/models/nxd", "/v1/models/%00", "/health", "/metrics", "/", "/v1", "/%ff/../..", "*"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X"]


def make_model(folder: Path) -> None:
    """A Hugging Face folder with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - only for this model
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), eos_token_id=fast.eos_token_id, **sizes, **heads))
    model.save_pretrained(folder)


class Server:
    """`nxd serve` of that model. A context manager.

    Attributes:
        port: that it listens at.
    """

    def __init__(self, folder: Path) -> None:
        make_model(folder / "model")
        self._log = folder / "log.txt"
        self._read = 0
        command = [sys.executable, "-m", "nxd_cli", "serve", "model", "--port", "0", "--compiler", "export"]
        limits = ["--max-length", "64", "--batch-size", "4", "--client-timeout", str(CLIENT_TIMEOUT)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, *limits], cwd=folder, stderr=log, stdout=log, env=environment)
        give_up = time.monotonic() + SECONDS_OF_THE_START
        while (found := re.search(r"running on http://\S+:(\d+)", self._log.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the server does not listen: {self._log.read_text()}")
            time.sleep(0.1)
        self.port = int(found[1])

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()

    def new_log(self) -> str:
        """What it has printed since this was asked last."""
        with self._log.open(errors="replace") as log:
            log.seek(self._read)
            text = log.read()
            self._read = log.tell()
        return text

    def memory(self, what: str) -> int:
        """VmRSS, or VmHWM for the most since `forget_peak`, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.partition(f"{what}:")[2].split()[0])

    def forget_peak(self) -> None:
        """From now on VmHWM counts anew."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def answer(self, request: bytes) -> bytes:
        """Everything that comes until the server closes the connection.

        Raises:
            TimeoutError: it does not within a minute.
        """
        give_up = time.monotonic() + SECONDS_OF_A_CASE
        received = bytearray()
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS_OF_A_CASE) as connection:
            try:
                connection.sendall(request)
                while part := connection.recv(1 << 16):
                    received += part
                    if time.monotonic() > give_up:
                        raise TimeoutError("the answer does not end")
            except (ConnectionResetError, BrokenPipeError):
                pass
        return bytes(received)


def make_request(chance: random.Random) -> bytes:
    """A request, its connection to be closed by the answer."""
    path, body = chance.choice([("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
    method, data = "POST", json.dumps(body).encode()
    kind = chance.choice(["values", "values", "values", "bytes", "request", "endpoint", "large"])
    if kind == "values":
        tree = copy.deepcopy(body)
        for _ in range(chance.randint(1, 4)):
            places = places_in(tree)
            (holder, key), (other, of) = chance.choice(places), chance.choice(places)
            holder[key] = copy.deepcopy(chance.choice([*ODD, other[of], other[of]]))
        data = json.dumps(tree).encode("utf-8", "surrogatepass")
    elif kind == "bytes":
        data = change_bytes(data, chance)
    elif kind == "endpoint":
        method, path = chance.choice(METHODS), chance.choice([*PATHS, path, path + "x" * chance.choice([1, 5000])])
    elif kind == "large":
        part = chance.choice([b"[", b'{"a":', b"1,", b'"', b"\\u00e9", "é".encode(), b" ", chance.randbytes(7)])
        field = chance.choice(["prompt", "stop", "messages", "logit_bias", "tools", "user", "model"]).encode()
        data = b'{"' + field + b'": ' + chance.choice([b"", b"[", b'"']) + part * chance.randrange(LONGEST)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    request = head.encode() + data
    return change_bytes(request, chance) if kind == "request" else request


def run_case(server: Server, seed: int) -> str:
    """Its class of status, "closed" without an answer, or what is wrong."""
    request = make_request(random.Random(f"server {seed}"))
    server.forget_peak()
    before = server.memory("VmRSS")
    try:
        answer = server.answer(request)
    except OSError as error:
        return f"{type(error).__name__}: {error}; {request[:300]!r}"
    if grown := max(0, server.memory("VmHWM") - before - MEMORY - 10 * len(request)):
        return f"took {grown} bytes too much for {len(request)}: {request[:300]!r}"
    if "Traceback" in (printed := server.new_log()):
        return f"printed {printed}; {request[:300]!r}"
    status = re.match(rb"HTTP/1\.1 (\d)\d\d ", answer)
    if status is None:
        return "closed" if not answer else f"answered {answer[:300]!r}; {request[:300]!r}"
    return f"answered {answer[:300]!r}; {request[:300]!r}" if int(status[1]) >= 5 else f"{status[1].decode()}xx"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        first = server.memory("VmRSS")
        seed, end = options.seed, time.monotonic() + 60 * options.minutes
        while time.monotonic() < end and server.process.poll() is None:
            outcome = run_case(server, seed)
            known = len(outcome) <= len("closed")
            counts[outcome if known else "wrong"] += 1
            if not known:
                print(f"--seed {seed}: {outcome}", flush=True)
            seed += 1
        if not server.answer(health).startswith(b"HTTP/1.1 200"):
            print(f"the server is not well after --seed {seed - 1}")
            counts["wrong"] += 1
        print(f"memory {first >> 20} -> {server.memory('VmRSS') >> 20} MiB")
    print("  ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
