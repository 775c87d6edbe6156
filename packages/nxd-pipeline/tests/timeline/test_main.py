"""The command line that prints a trace."""

import sys

import pytest
from nxd_pipeline.timeline.__main__ import main


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["timeline", *map(str, arguments)])
    main()


def test_command_prints_each_pipeline_of_the_last_step(monkeypatch, capsys, file_of_two_pipelines):
    call(monkeypatch, file_of_two_pipelines, "--columns", 80)

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("step")] == [
        "step 0 of the pipeline of ranks 0, 2",
        "step 0 of the pipeline of ranks 1, 3",
    ]
    assert len([line for line in lines if line.startswith("1f1b: ")]) == 2
    assert all(len(line) == 90 for line in lines if line.startswith("rank"))


@pytest.mark.parametrize("content", [None, "[]"])
def test_command_with_another_file_says_what_is_wrong(monkeypatch, capsys, tmp_path, content):
    if content is not None:
        (tmp_path / "other.json").write_text(content)

    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path / "other.json")

    assert "other.json" in capsys.readouterr().err
