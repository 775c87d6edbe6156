"""Log lines: one for each event, from rank 0, as NXD_LOG_LEVEL says."""

import re

import pytest
from nxd_engine.logs import get_logger


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", "DIWE"), ("INFO", "IWE"), ("warning", "WE"), ("error", "E"), ("off", "")],
)
def test_level_decides_what_is_shown(monkeypatch, capsys, level, shown):
    monkeypatch.setenv("NXD_LOG_LEVEL", level)
    logger = get_logger("levels")

    for say in (logger.debug, logger.info, logger.warning, logger.error):
        say("something")

    assert [line.split()[2] for line in lines(capsys)] == list(shown)


def test_event_is_one_line_with_time_and_rank(monkeypatch, capsys):
    monkeypatch.delenv("NXD_LOG_LEVEL", raising=False)
    logger = get_logger("events")

    logger.info("step %d\n  of %d", 3, 9)
    try:
        raise ValueError("no such thing")
    except ValueError:
        logger.exception("failed")

    first, second = lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I rank 0: step 3 \| of 9", first)
    assert "E rank 0: failed | Traceback" in second
    assert second.endswith("ValueError: no such thing")


def test_other_ranks_are_silent_unless_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")

    get_logger("ranks").error("from one")
    get_logger("ranks", rank0_only=False).error("from all")

    (line,) = lines(capsys)
    assert line.endswith("E rank 3: from all")


def test_same_name_gives_the_same_logger_with_one_handler():
    first, second = get_logger("twice"), get_logger("twice")

    assert first is second
    assert len(first.handlers) == 1


def test_level_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("NXD_LOG_LEVEL", "loud")

    with pytest.raises(ValueError, match="unknown level NXD_LOG_LEVEL='loud'; use one of trace, debug, info"):
        get_logger("levels")
