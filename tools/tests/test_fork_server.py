"""A program in a fork prints and ends as in an interpreter of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif("NXD_TEST_PYTHON" not in os.environ, reason="programs run in fresh interpreters here")

PROGRAMS = {
    "arguments": ["-c", "import sys; print(sys.argv, sys.path[0])", "a", "b"],
    "module": ["-m", "json.tool", "--indent", "1"],
    "unbuffered": ["-u", "-c", "import os; print(1); os._exit(0)"],
    "isolated": ["-I", "-c", "import sys; print(sys.flags.isolated)"],
    "exit code": ["-c", "raise SystemExit(3)"],
    "exit text": ["-c", "raise SystemExit('no')"],
    "error": ["-c", "def f():\n    1 / 0\nf()"],
    "interrupt": ["-c", "raise KeyboardInterrupt"],
    "signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    "thread": [
        "-c",
        "import threading; after = threading.Event(); "
        "threading.Thread(target=lambda: after.wait() and print('late')).start(); print('early'); after.set()",
    ],
    "at exit": ["-c", "import atexit; atexit.register(print, 'last'); print('first')"],
    "descriptors": ["-c", "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:3])"],
    "environment": ["-c", "import os; print(os.environ['GREETING'], os.getcwd())"],
    "child": ["-c", "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(5)']))"],
    "no program": ["missing.py"],
}


def outcome(python: str, arguments: list[str], folder: Path) -> tuple[int, str, list[str]]:
    finished = subprocess.run(
        [python, *arguments],
        input='{"a": 1}',
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"GREETING": "hello"},
        check=False,
    )
    return finished.returncode, finished.stdout, finished.stderr.strip().splitlines()[-1:]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_forked_program_ends_as_in_a_fresh_interpreter(fresh_python: str, tmp_path: Path, name: str) -> None:
    forked, fresh = (outcome(python, PROGRAMS[name], tmp_path) for python in (sys.executable, fresh_python))

    if name == "no program":  # where the interpreter says so, the fork has a traceback
        assert forked[0] != 0 != fresh[0]
    else:
        assert forked == fresh


def test_script_is_main_and_has_its_folder_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 7")
    (tmp_path / "script.py").write_text("import helper, os; print(__name__, os.path.basename(__file__), helper.value)")

    assert outcome(sys.executable, [str(tmp_path / "script.py")], Path("/"))[:2] == (0, "__main__ script.py 7\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_to_the_client_ends_the_program(number: signal.Signals) -> None:
    # A session in the background has SIGINT ignored, and so has its program until it says otherwise.
    program = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "print('ready', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        assert client.stdout is not None
        client.stdout.readline()
        client.send_signal(number)
        assert client.stdout.read() == b""  # the program held it, and is gone

    assert client.returncode == -number


def test_programs_differ_in_the_order_of_sets() -> None:
    hashes = {outcome(sys.executable, ["-c", "print(hash('a'))"], Path("/"))[1] for _ in range(20)}

    assert len(hashes) == 2
