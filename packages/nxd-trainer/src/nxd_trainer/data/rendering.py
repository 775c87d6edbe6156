"""Renders chat templates in a process of their own, within limits of time, memory and output.

A template comes with a model and so from a stranger, and a server's clients choose the messages and tools that it is
given. `template_process.py` is the program of that process.
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
MAX_SECONDS_OF_CLOCK = 300.0  # for a machine that is busy
MAX_BYTES = 512 << 20
MAX_CHARACTERS = 1 << 18  # and those that are rendered, so many times:
MAX_GROWTH = 16
# Variables and functions that the process gives to templates, and what transformers takes in their place.
OWN_VARIABLES = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler", "joiner", "loop", "self",
)  # fmt: skip
_PROGRAM = Path(__file__).with_name("template_process.py")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to render.

    Attributes:
        count: of the messages, from the first on.
        messages: in their place.
        asks: whether the assistant is asked for an answer.
        marked: whether to find out what comes from which message. Templates may render a text with marks differently.
    """

    count: int = 0
    messages: Sequence[Mapping[str, Any]] | None = None
    asks: bool = False
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text, and where its parts come from; without marks they are not known.

    Attributes:
        text: all of it; empty where the template failed.
        passes: the number of a message, and from where to where one pass of a loop over messages wrote.
        generated: from where to where it is marked by `{% generation %}`.
        end: of the last loop over messages.
        error: why the template failed; None where it did not.
    """

    text: str = ""
    passes: Sequence[Sequence[int]] = ()
    generated: Sequence[Sequence[int]] = ()
    end: int = 0
    error: str | None = None


class TemplateRenderer:
    """Processes that render templates: one, unless several threads render at a time. They end with this object."""

    def __init__(self) -> None:
        self._start_in_this_process()

    def render(
        self,
        template: str,
        variables: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        jobs: Sequence[Job],
    ) -> list[Rendered]:
        """What jobs render.

        Args:
            template: its source.
            variables: those of the tokenizer, such as `bos_token`, and others; none of `OWN_VARIABLES`.
            messages: in the form of chat templates.
            tools: JSON schemas of tools.
            jobs: what to render of them.

        Raises:
            ValueError: it takes too long, or too much memory.
        """
        request: dict[str, Any] = {"template": template, "variables": variables, "messages": messages, "tools": tools}
        given = len(json.dumps(request, default=str))
        request |= {"jobs": [asdict(job) for job in jobs], "max_characters": MAX_CHARACTERS + MAX_GROWTH * given}
        if self._owner != os.getpid():  # in a fork, whose parent talks to the processes
            self._start_in_this_process()
        try:
            process = self._idle.pop()
        except IndexError:
            if find_spec("jinja2") is None:
                raise ValueError("it needs the package jinja2: pip install 'nxd-trainer[data]'") from None
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
        # -P: modules beside the program do not stand in for those of the standard library.
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
        """The answers to a request.

        Raises:
            ValueError: the process has died of it, or gives none.
        """
        try:
            self._requests.send_bytes(request)
            if not self._answers.poll(MAX_SECONDS_OF_CLOCK):
                raise ValueError(f"it is not rendered after {MAX_SECONDS_OF_CLOCK:g} s")
            answers: list[dict[str, Any]] = json.loads(self._answers.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.wait()
            if self.process.returncode == -signal.SIGPROF:
                raise ValueError(f"it takes more than {MAX_SECONDS:g} s of processor time") from error
            raise ValueError(
                f"the process that renders it has died (exit code {self.process.returncode}), as of too little memory"
            ) from error
        return answers

    def end(self) -> None:
        """Kill it, if it runs."""
        with suppress(OSError):
            self._requests.close()
        with suppress(OSError):
            self._answers.close()
        self.process.kill()
        self.process.wait()
