"""Renders chat templates in a separate process, with limits on time, memory and output.

A template comes with a model, so it is untrusted, and a server's clients choose its messages and tools.
`template_process.py` is the program of that process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MAX_SECONDS = 5.0  # of processor time
MAX_SECONDS_OF_CLOCK = 300.0  # for a busy machine
MAX_BYTES = 512 << 20
MAX_CHARACTERS = 1 << 18  # plus the characters to render, times:
MAX_GROWTH = 16
# Variables and functions that the process gives to templates, and transformers' arguments for them.
OWN_VARIABLES = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler", "joiner", "loop", "self",
)  # fmt: skip
_PROGRAM = Path(__file__).with_name("template_process.py")


class MessageLostError(ValueError):
    """A template omits messages, or hides the answers."""


@dataclass(frozen=True, kw_only=True)
class RenderTask:
    """A rendering to make."""

    count: int = 0  # number of messages to render, from the first
    messages: Sequence[Mapping[str, Any]] | None = None  # messages to render instead
    asks: bool = False  # whether to prompt the assistant for an answer
    # whether to track which text comes from which message. Templates may render marked text differently.
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A rendered text and, for marked jobs, the origins of its parts."""

    text: str = ""  # the whole text; empty if the template failed
    # for each pass of a loop over messages, the message's number and the start and end of its output
    passes: Sequence[Sequence[int]] = ()
    generated: Sequence[Sequence[int]] = ()  # starts and ends of the parts marked by `{% generation %}`
    end: int = 0  # end of the last loop over messages
    error: str | None = None  # why the template failed; None if it did not


class TemplateRenderer:
    """Processes that render templates: one, unless several threads render concurrently. They end with this object."""

    def __init__(self) -> None:
        self._start_in_this_process()

    def render(
        self,
        template: str,
        variables: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        jobs: Sequence[RenderTask],
    ) -> list[Rendered]:
        """Render a template several times.

        Args:
            template: source of the template.
            variables: the tokenizer's variables, such as `bos_token`, and others; none of `OWN_VARIABLES`.
            messages, tools: messages and JSON schemas of tools, for the template.
            jobs: the renderings to make.

        Raises:
            ValueError: rendering takes too much time or memory.
        """
        request: dict[str, Any] = {"template": template, "variables": variables, "messages": messages, "tools": tools}
        given = len(json.dumps(request, default=str))
        request |= {"jobs": [asdict(job) for job in jobs], "max_characters": MAX_CHARACTERS + MAX_GROWTH * given}
        if self._owner != os.getpid():  # in a fork: the processes belong to the parent
            self._start_in_this_process()
        try:
            process = self._idle.pop()
        except IndexError:
            if find_spec("jinja2") is None:
                raise ValueError("it needs the package jinja2: pip install 'nxd-data[text]'") from None
            process = _TemplateProcess()
            self._processes.append(process)
        try:
            answers = process.ask(json.dumps(request, default=str).encode())
        except BaseException:
            self._processes.remove(process)
            process.end()
            raise
        self._idle.append(process)
        return [Rendered(**answer) for answer in answers]

    def _start_in_this_process(self) -> None:
        self._owner = os.getpid()
        self._processes: list[_TemplateProcess] = []
        self._idle: list[_TemplateProcess] = []
        weakref.finalize(self, _end_all, self._processes, self._owner)


def _end_all(processes: Sequence[_TemplateProcess], owner: int) -> None:
    if os.getpid() == owner:  # not in its forks
        for process in processes:
            process.end()


@dataclass(eq=False)
class _TemplateProcess:
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        # -P: modules beside the program must not shadow the standard library.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(MAX_SECONDS), str(MAX_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests = Connection(os.dup(self.process.stdin.fileno()), readable=False)
        self._answers = Connection(os.dup(self.process.stdout.fileno()), writable=False)
        self.process.stdin.close()
        self.process.stdout.close()

    def ask(self, request: bytes) -> list[dict[str, Any]]:
        """Return the answers to a request; raises ValueError if the process died, or does not answer."""
        try:
            self._requests.send_bytes(request)
            if not self._answers.poll(MAX_SECONDS_OF_CLOCK):
                raise ValueError(f"rendering did not finish within {MAX_SECONDS_OF_CLOCK:g} s")
            answers: list[dict[str, Any]] = json.loads(self._answers.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.wait()
            if self.process.returncode == -signal.SIGPROF:
                raise ValueError(f"it takes more than {MAX_SECONDS:g} s of processor time") from error
            raise ValueError(
                f"the rendering process died (exit code {self.process.returncode}), probably for lack of memory"
            ) from error
        return answers

    def end(self) -> None:
        """Kill the process, if it is running."""
        with suppress(OSError):
            self._requests.close()
        with suppress(OSError):
            self._answers.close()
        self.process.kill()
        self.process.wait()
