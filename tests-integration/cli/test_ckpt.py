"""`nxd ckpt` is the command line of nxd-ckpt under another name."""

import nxd_ckpt
import pytest
import torch
from nxd_ckpt.cli import main as nxd_ckpt_main
from nxd_cli import main


@pytest.fixture
def checkpoints(tmp_path):
    for step in (1, 2):
        nxd_ckpt.save(tmp_path, f"step_{step}", {"weight": torch.full((3,), float(step))})
    return tmp_path


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("list {}", 0, "step_2"),
        ("list {} --json", 0, "step_2"),
        ("inspect {}", 0, "weight"),
        ("verify {}", 0, "step_2"),
        ("list {}/nowhere", 2, "nowhere"),
    ],
)
def test_command_answers_as_nxd_ckpt_does(capsys, checkpoints, line, code, said):
    arguments = line.format(checkpoints).split()
    assert nxd_ckpt_main(arguments) == code
    expected = capsys.readouterr()

    assert main(["ckpt", *arguments]) == code

    assert capsys.readouterr() == expected
    assert said in expected.out + expected.err


def test_damaged_checkpoint_ends_verify_with_its_exit_code(capsys, checkpoints):
    largest = max((checkpoints / "step_2").rglob("*.safetensors"), key=lambda it: it.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)

    assert main(["ckpt", "verify", str(checkpoints), "--deep"]) == 1
    assert "damaged" in capsys.readouterr().out


def test_help_is_that_of_nxd_ckpt(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["ckpt", "--help"])

    assert "nxd-ckpt" in capsys.readouterr().out
