"""A served Hugging Face folder answers chats with the text that transformers writes by the same template."""

import re
import signal
import subprocess
import sys

import pytest
import torch
from nxd_testing import deadline

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn", reason="nxd serve needs it: pip install 'nxd-trace[serve]'")

LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "Llama": {"rope_parameters": {**LLAMA_3, "original_max_position_embeddings": 64, "rope_theta": 1e4}},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Phi3": {},
    "Olmo2": {},
}
TALK = [
    {"role": "system", "content": "the dog sat on the mat " * 6},
    {"role": "user", "content": "the cat sat"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "the dog sat on the cat"},
]


def of_transformers(folder, messages, number) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=number, do_sample=False)[0, len(ids) :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_chat_is_answered_with_the_text_of_transformers(make_chat_model, family):
    from nxd_trace.serving import CompletionService, make_app
    from nxd_trainer.compiled_generation import open_for_compilation
    from starlette.testclient import TestClient

    folder = make_chat_model(family, **FAMILIES[family])
    model = open_for_compilation(folder)
    with model.compile(batch_size=2, max_length=128, compiler="export", progress=False) as generator:
        service = CompletionService(
            generator.engine,
            model.codec.tokenizer,
            model="small",
            chat=model.codec.chat,
            end_tokens=model.codec.end_tokens,
        )
        with TestClient(make_app(service), base_url="http://localhost") as http:
            client = openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)
            found = [
                client.chat.completions.create(model="small", messages=talk, temperature=0, max_tokens=24)
                for talk in (TALK[:2], TALK)
            ]

    texts = [answer.choices[0].message.content for answer in found]
    assert texts == [of_transformers(folder, talk, 24) for talk in (TALK[:2], TALK)]
    assert texts[0] != texts[1]
    assert found[1].usage.prompt_tokens_details.cached_tokens > 0  # the system prompt


def nearly_the_same(folder, target):
    """A model that often writes what that in the folder does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight += 0.1 * torch.randn_like(model.lm_head.weight)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


@pytest.mark.slow
def test_draft_model_answers_many_chats_at_once_with_the_texts_of_transformers(make_chat_model, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from nxd_trace.serving import CompletionService, make_app
    from nxd_trainer.compiled_generation import open_for_compilation
    from starlette.testclient import TestClient

    folder = make_chat_model("Qwen3")
    model, draft = open_for_compilation(folder), open_for_compilation(nearly_the_same(folder, tmp_path / "draft"))
    talks = [[*TALK[:1], {"role": "user", "content": f"the {animal} sat on {i}"}] for i in range(4) for animal in "ab"]
    settings = {"batch_size": 3, "max_length": 128, "compiler": "export", "progress": False}

    def drawn(client, seed):
        return client.completions.create(model="small", prompt="the cat", temperature=2, seed=seed, max_tokens=12)

    found, draws = [], []
    for draft_model in (draft, None):
        with model.compile(draft=draft_model, **settings) as generator:
            service = CompletionService(
                generator.engine,
                model.codec.tokenizer,
                model="small",
                chat=model.codec.chat,
                end_tokens=model.codec.end_tokens,
            )
            with TestClient(make_app(service), base_url="http://localhost") as http, ThreadPoolExecutor(8) as threads:
                client = openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)
                asked = {"model": "small", "temperature": 0, "max_tokens": 24}
                chats = [threads.submit(client.chat.completions.create, messages=it, **asked) for it in talks]
                texts = [threads.submit(drawn, client, seed) for seed in range(4)]
                found.append([answer.result().choices[0].message.content for answer in chats])
                draws.append([answer.result().choices[0].text for answer in texts])
                metrics = http.get("/metrics").text
            guesses = dict(re.findall(r'nxd_draft_tokens_total\{kind="(\w+)"\} (\d+)', metrics))
            assert (int(guesses["accepted"]) > 0) == (draft_model is not None)

    assert found[0] == [of_transformers(folder, talk, 24) for talk in talks]
    assert found[1] == found[0]
    assert draws[1] == draws[0]


@pytest.mark.slow
def test_nxd_serve_takes_the_folder_of_a_model_and_says_what_it_does(make_chat_model):
    folder = make_chat_model("Qwen3")
    command = [sys.executable, "-m", "nxd_cli", "serve", str(folder), "--port", "0", "--compiler", "export"]
    server = subprocess.Popen([*command, "--batch-size", "2", "--name", "small"], stderr=subprocess.PIPE, text=True)
    try:
        log = []
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        assert found, "".join(log)
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="-", timeout=deadline(60))
        asked = {"model": "small", "messages": TALK, "temperature": 0, "max_tokens": 24}
        events = client.chat.completions.create(**asked, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in events)
        server.send_signal(signal.SIGINT)
        assert server.wait(deadline(60)) == 0
    finally:
        server.kill()
        server.wait()
        server.stderr.close()

    assert text == of_transformers(folder, TALK, 24)
    said = "".join(log)
    assert "Qwen3ForCausalLM, float32; batches of up to 2, texts of up to 256 tokens" in said
    assert re.search(r"\[nxd-trace\] +[\d.]+ s: compiling \d of 4 distinct programs with export", said)
    assert re.search(r"nxd serve: the model is ready after [\d.]+ s", said)
