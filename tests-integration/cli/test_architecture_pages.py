"""The commands that the site's page of an architecture shows run, on a small model of that architecture."""

import re
import socket
import sys
from pathlib import Path

import pytest
from nxd_plan import FixedDegrees, TrainingJob, find_device, make_plan, planned_model
from nxd_testing import deadline
from pages import run_page

pytest.importorskip("transformers")
sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("tools", "tools/site")]
from architectures import architecture_pages
from hf_survey.architectures import tiny_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CHATS = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "the cat sat"}]}\n'
SHORT = " train.steps=1 train.global_batch_size=2 data.sequence_length=32"


def with_commands():
    return [Path(page).stem for page, text in architecture_pages().items() if "## Commands" in text]


@pytest.fixture(scope="module")
def commands_of():
    pages = architecture_pages()

    def commands(name):
        (block,) = re.findall(r"```sh\n(.*?)```", pages[f"reference/architectures/{name}.md"], flags=re.DOTALL)
        shown = {line.split()[1]: line for line in block.splitlines()}  # by the word after nxd
        serve = answered(shown["serve"]) if "serve" in shown else REFUSED
        return shown | {"train": shown["train"] + SHORT, "serve": serve}

    return commands


@pytest.fixture
def make_model(save_chat_model):
    """`make_model("llama")`: the folder of a small chat model of this architecture."""

    def make(name):
        known = set(tiny_config(name).to_dict()) | set(tiny_config(name).attribute_map)

        def configure(**tokens):
            # Texts are served up to the smallest window only.
            longer = dict.fromkeys(("max_position_embeddings", "sliding_window", "attention_chunk_size"), 256)
            tables = {key: tokens["vocab_size"] for key in known if "vocab_size" in key}
            changes = tokens | tables | longer | {"use_cache": True}
            return tiny_config(name, **{key: value for key, value in changes.items() if key in known})

        return save_chat_model(name, configure)

    return make


def answered(serve):
    """The command in the background, and a request that it answers; the shell is to end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    request = '{"model": "nxd", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'
    return (
        f"{serve} --port {port} --compiler export > server.log 2>&1 &\ntrap 'kill %1; wait' EXIT\n"
        f"until curl --silent --output /dev/null localhost:{port}; do\n"
        "kill -0 $! || { cat server.log; exit 1; }\nsleep 1\ndone\n"
        f"curl --silent --show-error --fail-with-body localhost:{port}/v1/chat/completions "
        f"-H 'content-type: application/json' -d '{request}'"
    )


REFUSED = (
    "if nxd serve run/checkpoints --compiler export 2> refusal.txt; then exit 1; fi\n"
    "grep 'cannot be compiled' refusal.txt"
)


def run_commands(commands, model, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model").symlink_to(model)
    page = tmp_path / "page.md"
    page.write_text(f'```json title="chats.jsonl"\n{CHATS * 4}```\n\n```sh\n' + "\n".join(commands) + "\n```\n")
    run_page(page, tmp_path / "folder", timeout=deadline(600))


def test_plan_of_an_architecture_page_accepts_its_model(commands_of, make_model, tmp_path):
    run_commands([commands_of("llama")["plan"]], make_model("llama"), tmp_path)


@pytest.mark.slow
def test_every_model_whose_page_has_a_plan_is_planned(tmp_path):
    planned = [Path(page).stem for page, text in architecture_pages().items() if "nxd plan model" in text]
    refused = {}
    for name in planned:
        config = tiny_config(name)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
        (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
        try:
            job = TrainingJob(planned_model(tmp_path), find_device("trn2"), 1, sequence_length=32, global_batch_size=8)
            make_plan(job, FixedDegrees(1, 1, False, 0, 1, "none"), top=1)
        except ValueError as error:
            refused[name] = str(error)

    assert len(planned) > 100
    assert not refused


@pytest.mark.slow
@pytest.mark.parametrize("name", with_commands())
def test_commands_of_an_architecture_page_run(commands_of, make_model, tmp_path, name):
    run_commands(commands_of(name).values(), make_model(name), tmp_path)
