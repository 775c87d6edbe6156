"""Running `nxd` as a person does: as a process of its own, in a folder of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from nxd_testing import deadline

TIMEOUT_SECONDS = 180


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "nxd_cli", *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline(TIMEOUT_SECONDS))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@pytest.fixture(scope="session")
def nxd_in() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nxd_in(folder, "train", ...)`: runs the command there to its end."""
    return _run


@pytest.fixture
def nxd(nxd_in, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nxd("train", ...)`: runs the command in this test's folder to its end."""
    return partial(nxd_in, tmp_path)


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """`mount(folder, *options)` mounts a file system, until the test has ended."""
    mounted: list[Path] = []

    def mount_at(folder: Path, *options: str) -> None:
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"may not mount a file system here: {done.stderr.strip()}")
        if folder not in mounted:  # else mounted again with other options
            mounted.append(folder)

    yield mount_at
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)


CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + tools[0]['function']['name'] + '<end>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="session")
def save_chat_model(tmp_path_factory) -> Callable[..., Path]:
    """`save_chat_model(name, configure)`: the folder of a chat model of transformers, with random weights.

    `configure(vocab_size=..., eos_token_id=..., pad_token_id=None)` gives its config.
    """
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<end>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "the dog sat on the cat"], trainer)

    def save(name: str, configure: Callable[..., object], chat_template: str | None = CHAT_TEMPLATE) -> Path:
        folder = tmp_path_factory.mktemp("model") / name
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
        fast.chat_template = chat_template
        fast.save_pretrained(folder)
        config = configure(vocab_size=len(fast), eos_token_id=fast.eos_token_id, pad_token_id=None)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.generation_config.pad_token_id = fast.eos_token_id
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def make_chat_model(save_chat_model) -> Callable[..., Path]:
    """`make_chat_model("Qwen3", **sizes)`: the folder of a small chat model of transformers, with random weights."""
    transformers = pytest.importorskip("transformers")

    def make(family: str = "Qwen3", chat_template: str | None = CHAT_TEMPLATE, **sizes: object) -> Path:
        config_class = getattr(transformers, f"{family}Config")
        return save_chat_model(family, lambda **tokens: config_class(**SMALL | tokens | sizes), chat_template)

    return make
