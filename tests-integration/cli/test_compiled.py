"""`nxd generate --compiled` and `nxd serve` use a checkpoint as `nxd generate` does."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from nxd_testing import deadline
from nxd_trace.compilers.builtin import has_cpp_compiler

pytestmark = pytest.mark.sample(1)  # each takes its time

GREEDY = ["--prompt", "the quick", "--max-new-tokens", "24", "--temperature", "0"]


@pytest.fixture(scope="module")
def checkpoints(nxd_in, tiny_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    result = nxd_in(folder, "train", *tiny_in(folder), "train.stop_after=2")
    assert result.returncode == 0, result.stderr
    return folder / "run/checkpoints"


def served_text(checkpoints, *options):
    """What a server of the checkpoint writes after the prompt."""
    pytest.importorskip("uvicorn", reason="nxd serve needs it: pip install 'nxd-trace[serve]'")
    command = [sys.executable, "-m", "nxd_cli", "serve", str(checkpoints), "--port", "0", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        log = []
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        assert found, "".join(log)
        body = {"prompt": "the quick", "max_tokens": 24, "temperature": 0}
        with urlopen(
            Request(f"{found[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}),
            timeout=deadline(60),
        ) as response:
            text = json.load(response)["choices"][0]["text"]
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stderr.close()
    return text


def test_generate_compiled_writes_the_same_text(checkpoints, nxd):
    plain = nxd("generate", str(checkpoints), *GREEDY)
    compiled = nxd("generate", str(checkpoints), *GREEDY, "--compiled", "--compiler", "export", "--nproc", "2")

    assert compiled.returncode == 0, compiled.stderr
    written = "".join(line for line in compiled.stdout.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))
    assert len(written) > len("the quick\n")
    assert written == plain.stdout[plain.stdout.index("the quick") :]


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="the default is then compiler 'export'")
def test_generate_compiled_and_serve_with_the_default_compiler_write_the_same_text(checkpoints, nxd):
    plain = nxd("generate", str(checkpoints), *GREEDY).stdout
    compiled = nxd("generate", str(checkpoints), *GREEDY, "--compiled", "--nproc", "2")

    assert compiled.returncode == 0, compiled.stderr
    assert "programs with inductor" in compiled.stderr
    assert compiled.stdout == plain[plain.index("the quick") :]
    assert plain.endswith(f"the quick{served_text(checkpoints)}\n")


@pytest.mark.slow
def test_experts_of_several_workers_write_the_same_text(tmp_path, nxd):
    transformers = pytest.importorskip("transformers", reason="it makes the model: pip install transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    model = [str(tmp_path / "mixtral"), "--tokenizer", "bytes", *GREEDY]

    plain = nxd("generate", *model)
    of_two = nxd(
        "generate", *model, "--compiled", "--compiler", "export", "--nproc", "2", "--expert-parallel-size", "2"
    )
    of_three = nxd("generate", *model, "--compiled", "--nproc", "3", "--expert-parallel-size", "3")

    assert of_two.returncode == 0, of_two.stderr
    assert len(of_two.stdout) > len("the quick\n")
    assert of_two.stdout == plain.stdout[plain.stdout.index("the quick") :]
    assert of_three.returncode != 0
    assert "expert_parallel_size=3 does not divide the 4 experts of a layer of" in of_three.stderr


def test_experts_of_a_model_without_any_are_refused(checkpoints, nxd):
    result = nxd("generate", str(checkpoints), "--compiled", "--nproc", "2", "--expert-parallel-size", "2")

    assert result.returncode != 0
    assert "expert_parallel_size=2 needs a model with experts" in result.stderr
    assert "Traceback" not in result.stderr


def test_generate_compiled_names_a_degree_that_does_not_divide(checkpoints, nxd):
    result = nxd("generate", str(checkpoints), "--compiled", "--nproc", "3")

    assert result.returncode == 2
    assert "tensor_parallel_size=3 does not divide" in result.stderr


def test_serve_answers_with_the_text_that_generate_writes(checkpoints, nxd):
    written = nxd("generate", str(checkpoints), *GREEDY).stdout

    assert written.endswith(f"the quick{served_text(checkpoints, '--compiler', 'export')}\n")


def children_of(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_interpreter")  # whose children are those of the server
def test_serve_ends_with_its_own_exit_code_when_workers_died_too_often(checkpoints):
    pytest.importorskip("uvicorn", reason="nxd serve needs it: pip install 'nxd-trace[serve]'")
    command = [sys.executable, "-m", "nxd_cli", "serve", str(checkpoints), "--port", "0", "--compiler", "export"]
    with subprocess.Popen([*command, "--max-restarts", "0"], stderr=subprocess.PIPE, text=True) as server:
        log = []
        for line in server.stderr:
            log.append(line)
            if "running on" in line:
                [worker] = [worker for child in children_of(server.pid) for worker in children_of(child)]
                os.kill(worker, signal.SIGKILL)
        code = server.wait(deadline(60))

    assert code == 4
    assert log[-1].startswith("nxd serve: the workers failed too often: rank 0 of 1")
    assert log[-1].endswith("the worker was killed by SIGKILL\n")
    assert "Traceback" not in "".join(log)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--client-timeout", "0", "client_timeout=0.0 must be more than 0"),
        ("--max-restarts", "-1", "max_restarts=-1 must be 0 or more"),
    ],
)
def test_serve_names_a_limit_that_cannot_be(checkpoints, nxd, option, value, text):
    pytest.importorskip("uvicorn", reason="nxd serve needs it: pip install 'nxd-trace[serve]'")
    result = nxd("serve", str(checkpoints), option, value)

    assert result.returncode == 2
    assert result.stderr == f"nxd serve: {text}\n"


@pytest.mark.slow
def test_model_of_transformers_is_served_as_it_is_generated_with(tmp_path, nxd):
    transformers = pytest.importorskip("transformers", reason="needs it: pip install transformers")
    from nxd_engine import save_checkpoint

    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    save_checkpoint(tmp_path / "checkpoints", "first", transformers.Qwen3ForCausalLM(config))
    written = nxd("generate", "checkpoints", *GREEDY, "--tokenizer", "bytes")

    served = served_text(
        tmp_path / "checkpoints", "--compiler", "export", "--tokenizer", "bytes", "--nproc", "2", "--max-length", "64"
    )

    assert written.stdout.endswith(f"the quick{served}\n")
    assert len(served) > 8
