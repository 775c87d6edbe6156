"""`send_weights` into a running `nxd serve`: afterwards it answers as a server of the exported folder does."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from urllib.request import Request, urlopen

import nxd_engine
import pytest
import torch
from nxd_engine.hugging_face import save_pretrained
from nxd_state import PeerError
from nxd_testing import deadline

pytest.importorskip("uvicorn", reason="nxd serve needs it: pip install 'nxd-trace[serve]'")
transformers = pytest.importorskip("transformers")

TOKEN = "0123456789abcdef"
GREEDY = {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}


class Server:
    """A running `nxd serve` on two workers that accepts weights."""

    def __init__(self, process, url):
        self.process, self.url = process, url

    def complete(self, **body):
        request = Request(
            f"{self.url}/v1/completions", json.dumps(GREEDY | body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=deadline(60)) as response:
            return json.load(response)

    def choice(self):
        return self.complete()["choices"][0]

    def version(self):
        with urlopen(f"{self.url}/health", timeout=deadline(60)) as response:
            return json.load(response)["weights_version"]


@contextmanager
def serving(model, folder):
    (folder / "token").write_text(f"{TOKEN}\n")
    command = [sys.executable, "-m", "nxd_cli", "serve", str(model), "--port", "0", "--nproc", "2"]
    command += ["--compiler", "export", "--max-length", "64", "--accept-weights", str(folder / "token")]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    log = []
    try:
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        assert found, "".join(log)
        reader = threading.Thread(target=lambda: log.extend(server.stderr))
        reader.start()
        yield Server(server, found[1])
        server.send_signal(signal.SIGINT)
        assert server.wait(deadline(60)) == 0, "".join(log)
        reader.join()
        assert "Traceback" not in "".join(log)
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.fixture(scope="module")
def llama(make_chat_model):
    return make_chat_model("Llama")


@pytest.fixture(scope="module")
def server(llama, tmp_path_factory):
    with serving(llama, tmp_path_factory.mktemp("server")) as running:
        yield running


def trained(folder, seed, **degrees):
    """A model of the folder's config with other weights, at a layout."""
    stage = degrees.pop("zero_stage", None)
    options = {} if stage is None else {"optimizer_config": {"zero_stage": stage}}
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    return nxd_engine.initialize_parallel_model(
        nxd_engine.neuronx_distributed_config(**degrees, **options),
        lambda: transformers.AutoModelForCausalLM.from_config(config),
    )


def export_and_send(folder, target, url, seed, degrees, **options):
    model = trained(folder, seed, **degrees)
    save_pretrained(model, target)
    return nxd_engine.send_weights(model, url, token=TOKEN, bucket_size=5000, **options)


def answer_of(exported, model, folder):
    """What a server of the exported folder answers."""
    for file in model.glob("token*"):
        shutil.copy(file, exported)
    with serving(exported, folder) as server:
        return server.choice()


def assert_same(choice, expected):
    assert choice["text"] == expected["text"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], rel=1e-5)


LAYOUTS = {"TP 2": {"tensor_parallel_size": 2}, "ZeRO-3": {"zero_stage": 3}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updated_server_answers_as_a_server_of_the_exported_folder(run_ranks, llama, server, tmp_path, layout):
    before, seed = server.choice(), 1 + list(LAYOUTS).index(layout)

    versions = run_ranks(
        partial(export_and_send, llama, tmp_path / "new", server.url, seed, LAYOUTS[layout], version=layout), 2
    )

    after = server.complete()
    assert versions == [layout, layout]
    assert after["weights_version"] == server.version() == layout
    assert after["choices"][0] != before
    assert_same(after["choices"][0], answer_of(tmp_path / "new", llama, tmp_path))


@pytest.mark.slow
def test_experts_that_transformers_fuses_are_updated_too(run_ranks, make_chat_model, tmp_path):
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = make_chat_model("Qwen3Moe", **more)
    with serving(model, tmp_path) as server:
        before = server.choice()

        run_ranks(partial(export_and_send, model, tmp_path / "new", server.url, 1, {"expert_parallel_size": 2}), 2)

        after = server.choice()
    assert before != after
    assert_same(after, answer_of(tmp_path / "new", model, tmp_path))


def test_server_that_refuses_raises_on_all_ranks_and_keeps_its_weights(run_ranks, llama, server):
    def refused(url, token, hidden_size):
        config = transformers.AutoConfig.from_pretrained(llama)
        config.hidden_size = hidden_size
        model = nxd_engine.initialize_parallel_model(
            nxd_engine.neuronx_distributed_config(tensor_parallel_size=2),
            lambda: transformers.AutoModelForCausalLM.from_config(config),
        )
        try:
            nxd_engine.send_weights(model, url, token=token)
        except (RuntimeError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    before, version = server.choice(), server.version()
    other_shape = run_ranks(partial(refused, server.url, TOKEN, 64), 2)
    other_token = run_ranks(partial(refused, server.url, "another token", 32), 2)
    nobody = run_ranks(partial(refused, "http://127.0.0.1:9", TOKEN, 32), 2)

    own = f"RuntimeError: {server.url} refused the weights: "
    assert other_shape[0].startswith(f"{own}the update is refused: it does not match its config: ")
    assert other_shape[1] == f"PeerError: finishing the update of the weights failed on rank 0: {other_shape[0]}"
    assert other_token[0].startswith(f"{own}weights are accepted with the server's token")
    assert other_token[1] == f"PeerError: starting the update of the weights failed on rank 0: {other_token[0]}"
    assert "http://127.0.0.1:9 did not answer /start_weight_update" in nobody[0]
    assert (server.choice(), server.version()) == (before, version)


def test_sender_that_is_killed_leaves_the_server_with_its_weights(run_ranks, llama, server, tmp_path):
    before, version = server.choice(), server.version()
    script = f"""
import os, signal
import nxd_engine.hugging_face.sending as sending
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(llama)!r})
send, number = sending._Update._send, iter(range(3))
def send_or_die(update):
    if next(number, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    send(update)
sending._Update._send = send_or_die
sending.send_weights(model, {server.url!r}, token={TOKEN!r}, bucket_size=5000)
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    kept = (server.choice(), server.version())
    run_ranks(partial(export_and_send, llama, tmp_path / "new", server.url, 9, {}), 1)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert kept == (before, version)
    assert server.choice() != before


def test_requests_during_updates_are_of_one_version_each(run_ranks, llama, server, tmp_path):
    """Many requests while two versions take turns: each is answered with one or the other, and says which."""
    ended, found = threading.Event(), []

    def ask():
        while not ended.is_set():
            answer = server.complete(max_tokens=40)
            found.append((answer["weights_version"], answer["choices"][0]["text"]))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    try:
        for turn in range(4):
            version = f"turn {turn}"
            run_ranks(partial(export_and_send, llama, tmp_path / version, server.url, turn % 2, {}, version=version), 1)
    finally:
        ended.set()
        for asker in askers:
            asker.join()

    texts = {version: {text for of, text in found if of == version} for version, _ in found}
    assert all(len(of_version) == 1 for of_version in texts.values())
    assert texts["turn 0"] == texts["turn 2"] != texts["turn 1"]
