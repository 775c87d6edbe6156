import json
import math

import pytest
from nxd_trainer.report import read_records
from nxd_trainer.report.metrics import line_to_record, record_to_line


def test_line_gives_the_record_back(record):
    full = record(7, grad_norm=0.1, held_out_loss=3.25, layout="TP 2 x DP 2", resumed_from=6, tokens_per_second=1 / 3)

    assert line_to_record(record_to_line(full)) == full
    assert line_to_record(record_to_line(record(7))) == record(7)


def test_line_leaves_out_what_is_unset(record):
    assert set(json.loads(record_to_line(record(7)))) == {
        "step",
        "loss",
        "learning_rate",
        "tokens",
        "tokens_per_second",
        "seconds",
        "peak_memory_bytes",
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_strict_json_and_comes_back_as_nan(record, loss):
    line = record_to_line(record(7, loss=loss))

    assert json.loads(line)["loss"] is None
    assert "NaN" not in line
    assert math.isnan(line_to_record(line).loss)


def test_keys_of_a_later_version_are_left_out(record):
    line = json.dumps({**json.loads(record_to_line(record(7))), "new": 1})

    assert line_to_record(line) == record(7)


def test_read_leaves_out_a_line_that_was_not_finished(tmp_path, record):
    file = tmp_path / "metrics.jsonl"
    file.write_text(record_to_line(record(1)) + record_to_line(record(2)) + record_to_line(record(3))[:-1])

    assert read_records(file) == [record(1), record(2)]


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"step": 1}'])
def test_read_names_the_line_that_is_no_record(tmp_path, record, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f"{record_to_line(record(1))}{line}\n{record_to_line(record(2))}")

    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
        read_records(file)
