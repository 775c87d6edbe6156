"""Standard streams of commands: closed ones, readers that have gone, and texts that would steer a terminal."""

import contextlib
import io
import signal
import subprocess
import warnings
from pathlib import Path

import pytest
from nxd_cli import main

ESCAPES = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [
        (">&-", ["ckpt", "gc", "."], 0),  # says something, and returns
        ("<&- >&- 2>&-", ["ckpt", "gc", "."], 0),
        ("<&-", ["data", "missing.toml"], 2),
        ("2>&-", ["data", "missing.toml"], 2),
    ],
)
def test_command_whose_streams_are_closed_ends_as_usual(fresh_python, tmp_path, closed, arguments, code):
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", fresh_python, "-m", "nxd_cli", *arguments]

    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (code, "")
    assert "Error" not in ended.stderr


@pytest.mark.parametrize("arguments", [["data", f"data.path={'x' * 5000}"], ["generate", "x" * 5000, "--prompt", "a"]])
def test_argument_that_is_longer_than_a_file_name_is_a_message(capsys, arguments):
    assert main(arguments) == 2

    assert f"nxd {arguments[0]}: [Errno 36] File name too long" in capsys.readouterr().err


def test_preview_whose_reader_has_gone_ends_with_141(fresh_python, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 1000)
    settings = [f"data.path={tmp_path}", f"output={tmp_path / 'run'}", "data.sequence_length=16"]
    command = [fresh_python, "-m", "nxd_cli", "data", *settings]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        told = process.stderr.read()

    assert (process.returncode, told) == (128 + signal.SIGPIPE, b"")


def test_output_in_pipes_has_no_escape_codes_and_no_bars(nxd, tiny):
    commands = [
        [],
        ["--version"],
        ["init", "--model", "tiny"],
        ["train", *tiny, "train.eval_every=0"],
        ["data", *tiny],
        ["generate", "run", "--max-new-tokens", "3"],
        ["report", "run"],
        ["export", "run", "exported"],
        ["import", "exported", "imported"],
        ["ckpt", "verify", "run/checkpoints", "--deep"],
        ["plan", "exported", "--device", "cpu", "--devices", "2"],
        ["doctor", "--no-ranks"],
        ["train", "--help"],
        ["generate", "nowhere"],
    ]

    for arguments in commands:
        result = nxd(*arguments)
        assert result.returncode == (2 if "nowhere" in arguments else 0), (arguments, result.stderr)
        assert result.stdout + result.stderr
        for text in (result.stdout, result.stderr):
            assert "\x1b" not in text, arguments
            assert "\r" not in text, arguments


def on_stderr(act) -> str:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream), warnings.catch_warnings():
        warnings.simplefilter("default")
        act()
    return stream.getvalue()


def file_named(folder: Path) -> str:
    return f"data.path={folder / ESCAPES.replace('/', '')}"


@pytest.mark.parametrize(
    "arguments",
    [
        lambda folder: ["data", file_named(folder)],
        lambda folder: ["data", str(folder / f"{ESCAPES}.toml")],
        lambda folder: ["data", f"data.suffixes={ESCAPES}", f"data.path={folder}"],
        lambda folder: ["data", f"--data.{ESCAPES}=1"],
        lambda folder: ["train", "--nproc", ESCAPES],
        lambda folder: ["generate", str(folder / ESCAPES)],
        lambda folder: ["ckpt", "inspect", str(folder / ESCAPES)],
    ],
)
def test_message_about_names_with_control_characters_has_none(tmp_path, arguments):
    def act() -> None:
        with contextlib.suppress(SystemExit):
            main([*arguments(tmp_path)])

    told = on_stderr(act)

    assert "x1b" in told
    assert all(it.isprintable() or it in "\n\t" for it in told)
