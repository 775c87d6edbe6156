"""Starts `serve_tiny.py` as a process of its own, and talks to it."""

import json
import re
import socket
import subprocess
import sys
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any


class TinyServer:
    """A server of the tiny decoder, which listens once this is made; for a `with` block.

    Args:
        limits: as `ServerLimits` has them.
        restarts: as `RestartPolicy` has them.
        steps: of the model, after which each waits for a line.

    Attributes:
        process: which runs it.
        workers: process ids of the model's.
        folder: of the model.
        log: the lines that it has logged, as far as they have been read.
    """

    def __init__(
        self,
        limits: dict[str, Any] | None = None,
        restarts: dict[str, Any] | None = None,
        steps: int | None = None,
    ) -> None:
        script = Path(__file__).with_name("serve_tiny.py")
        arguments = [json.dumps(limits or {}), json.dumps(restarts or {}), *([] if steps is None else [str(steps)])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, str(script), *arguments], text=True, **pipes)
        self.log: list[str] = []
        try:
            self.log_until("Started server process")
            said = json.loads(self.process.stdout.readline())
            self.workers: list[int] = said["workers"]
            self.folder = Path(said["folder"])
            self.port = int(re.search(r":(\d+) ", self.log_until("running on"))[1])
        except BaseException:
            self.close()
            raise

    def log_until(self, text: str) -> str:
        """The next line that has this text."""
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"the server ended without {text!r}: {''.join(self.log)}")

    def connect(self, timeout: float) -> socket.socket:
        """A connection whose reads raise TimeoutError after so many seconds."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def post(self, body: dict[str, Any], timeout: float) -> HTTPResponse:
        """The answer to a request for a completion; that to a stream has begun."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Connection": "close", "Content-Type": "application/json"}
        )
        return connection.getresponse()

    def make_steps(self, number: int) -> None:
        """Let the model make so many more."""
        self.process.stdin.write("\n" * number)
        self.process.stdin.flush()

    def wait(self, timeout: float) -> int:
        """Its exit code, once the rest of the log has been read."""
        self.log += self.process.communicate(timeout=timeout)[1].splitlines(keepends=True)
        return self.process.returncode

    def close(self) -> None:
        """Kill it, which ends its workers as well."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()

    def __enter__(self) -> "TinyServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
