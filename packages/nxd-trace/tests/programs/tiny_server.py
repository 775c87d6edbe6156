"""Starts `serve_tiny.py` as a process, and talks to it."""

import json
import re
import socket
import subprocess
import sys
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any


class TinyServer:
    """A running server of the tiny decoder, for a `with` block.

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
            # torch 2.9's gloo prints a line of its own first.
            said = json.loads(next(line for line in self.process.stdout if not line.startswith("[Gloo]")))
            self.workers: list[int] = said["workers"]
            self.folder = Path(said["folder"])
            self.port = int(re.search(r":(\d+) ", self.log_until("running on"))[1])
        except BaseException:
            self.close()
            raise

    def log_until(self, text: str) -> str:
        """Return the next line that contains this text."""
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"the server ended without {text!r}: {''.join(self.log)}")

    def connect(self, timeout: float) -> socket.socket:
        """Return a connection whose reads raise TimeoutError after this many seconds."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def post(self, body: dict[str, Any], timeout: float) -> HTTPResponse:
        """Send a completion request; returns the response, which has started for a stream."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Connection": "close", "Content-Type": "application/json"}
        )
        return connection.getresponse()

    def make_steps(self, number: int) -> None:
        """Let the model take this many more steps."""
        self.process.stdin.write("\n" * number)
        self.process.stdin.flush()

    def wait(self, timeout: float) -> int:
        """Return the exit code, after reading the rest of the log."""
        self.log += self.process.communicate(timeout=timeout)[1].splitlines(keepends=True)
        return self.process.returncode

    def close(self) -> None:
        """Kill the server, which ends its workers, too."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()

    def __enter__(self) -> "TinyServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
