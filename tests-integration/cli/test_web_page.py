"""The page at `/` of `nxd serve`, in a real browser: what a person types is answered as the model's template has it."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nxd_testing import deadline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


class Browser:
    """A page in a headless Chromium, over the pipe of its DevTools protocol.

    Args:
        profile: a folder for it to write to.

    Attributes:
        errors: what the page's script raises, and what its policy forbids.
    """

    def __init__(self, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=900,700", "--no-first-run"]
        # The pipe's ends are descriptors 3 and 4 there.
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', CHROMIUM]
        self._process = subprocess.Popen(
            [*shell, "--remote-debugging-pipe", f"--user-data-dir={profile}", *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._numbers = itertools.count(1)
        self._held = b""
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"],
        }
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """The result of one command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, expression):
        """Of a JavaScript expression, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition):
        """Until a JavaScript expression holds; it is looked at whenever the page changes."""
        watch = "{ childList: true, subtree: true, characterData: true }"
        self.value(
            f"""new Promise((resolve) => {{
                const look = () => ({condition}) && (watcher.disconnect(), resolve(true));
                const watcher = new MutationObserver(look);
                watcher.observe(document, {watch});
                look();
            }})"""
        )

    def say(self, text):
        """Type a message, and send it by the Enter key."""
        self.value("document.getElementById('said').focus()")
        self.call("Input.insertText", text=text)
        self.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
        self.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter")

    def turns(self):
        """What the page shows: the kind and the text of each turn."""
        found = "[...document.querySelectorAll('.turn')].map((turn) => [turn.classList[1], turn.textContent])"
        return [tuple(turn) for turn in self.value(found)]

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _next_message(self):
        while b"\0" not in self._held:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def folder(make_chat_model):
    return make_chat_model("Qwen3")


@pytest.fixture
def address(folder):
    """Of a server of the model."""
    command = [sys.executable, "-m", "nxd_cli", "serve", str(folder), "--port", "0", "--compiler", "export"]
    server = subprocess.Popen([*command, "--batch-size", "2", "--name", "small"], stderr=subprocess.PIPE, text=True)
    try:
        log = []
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        assert found, "".join(log)
        yield found[1]
    finally:
        server.kill()
        server.wait(deadline(60))
        server.stderr.close()


def of_transformers(folder, *said) -> str:
    """The answer to the last of what was said in turns."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


ANSWERED = "document.getElementById('send').textContent === 'Send'"
RUNNING = "document.querySelector('.assistant')?.textContent.length > 3"


def set_to(browser, **settings):
    for name, value in settings.items():
        browser.value(f"document.getElementById('{name}').value = '{value}'")


def test_page_talks_to_the_model_in_turns_and_forgets_what_is_cleared(browser, address, folder):
    browser.call("Page.navigate", url=address)
    browser.wait_for("document.getElementById('model')?.textContent === 'small'")

    set_to(browser, temperature=0, max_tokens=200)
    browser.say("the dog")
    browser.wait_for(RUNNING)
    browser.value("document.getElementById('clear').click()")  # while the answer is written
    browser.wait_for(ANSWERED)
    assert browser.turns() == []

    set_to(browser, max_tokens=12)
    browser.say("the cat sat")
    browser.wait_for(ANSWERED)
    first = of_transformers(folder, "the cat sat")
    assert browser.turns() == [("user", "the cat sat"), ("assistant", first)]

    set_to(browser, max_tokens=100000)
    browser.say("the mat")
    browser.wait_for(ANSWERED)
    assert browser.turns()[-1][0] == "error"
    assert "max_tokens" in browser.turns()[-1][1]

    set_to(browser, max_tokens=12)
    browser.say("the dog <b>sat</b>")  # as text, not as HTML
    browser.wait_for(ANSWERED)
    second = of_transformers(folder, "the cat sat", first, "the dog <b>sat</b>")
    assert browser.turns()[-2:] == [("user", "the dog <b>sat</b>"), ("assistant", second)]
    assert [error for error in browser.errors if "400" not in error] == []  # of the refused one, which the log notes
