"""`nxd doctor` as a whole: a line for each finding, and an exit code."""

import os
import signal
import subprocess
import sys

import nxd_doctor as doctor
import pytest
from nxd_cli import main
from nxd_doctor.installation import ok, warning, wrong
from nxd_doctor.machine import check_collective, run_two_ranks


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [
        ([ok("a", "good")], 0, "no problems, 0 warnings"),
        ([warning("a", "odd", "do this")], 0, "no problems, 1 warning"),
        ([wrong("a", "bad", "do that"), ok("b", "good")], 1, "1 wrong, 0 warnings"),
    ],
)
def test_exit_code_says_whether_something_is_wrong(monkeypatch, capsys, findings, code, last):
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: iter(findings))

    assert main(["doctor"]) == code

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert lines[0] == f"{findings[0].status:7}  a: {findings[0].found}"
    assert all(f"         -> {finding.mend}" in lines for finding in findings if finding.mend)


def test_this_machine_is_examined_without_ranks(tmp_path, capsys):
    main(["doctor", "--no-ranks", "--folder", str(tmp_path)])

    shown = capsys.readouterr().out
    for check in ("torch", "devices", "open files", "shared memory", "clock", "ports", f"folder {tmp_path}"):
        assert f"  {check}: " in shown
    assert "two ranks" not in shown


def test_two_ranks_add_here_or_are_ended_in_time():
    assert check_collective(*run_two_ranks()).status == "ok"
    assert run_two_ranks(timeout=0.01)[0] is None


def test_interrupt_ends_the_two_ranks(monkeypatch):
    started = []

    def interrupted(process, *_, **__):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.Popen.communicate", interrupted)

    with pytest.raises(KeyboardInterrupt):
        run_two_ranks()

    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_torch_that_cannot_be_imported_is_a_finding(tmp_path, fresh_python):
    (tmp_path / "torch.py").write_text('raise OSError("libcudart.so.12: cannot open shared object file")')

    result = subprocess.run(
        [fresh_python, "-m", "nxd_cli", "doctor"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "wrong    import torch: fails with OSError: libcudart.so.12: cannot open" in result.stdout, result.stderr
    assert "two ranks" not in result.stdout
    assert result.returncode == 1
