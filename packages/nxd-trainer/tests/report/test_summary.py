import math

from nxd_trainer.report import render_summary


def rows(text):
    """The summary's rows as `{name: value}`; two spaces or more stand between them."""
    return {name: value.strip() for name, value in (line.strip().split("  ", 1) for line in text.splitlines())}


def test_summary_of_a_resumed_run(tmp_path, record):
    records = [
        record(10, held_out_loss=4.0, seconds=60.0, tokens_per_second=100.0),
        record(20, loss=0.25, seconds=120.0, tokens_per_second=99_000.0, peak_memory_bytes=1 << 31),
        record(30, loss=0.5, held_out_loss=3.5, seconds=7.0, resumed_from=20),
    ]

    text = render_summary(records, {"metrics": tmp_path, "timeline": None})

    assert rows(text) == {
        "steps": "30, resumed at 20",
        "tokens": "122.9k",
        "time": "2:07",
        "speed": "12.3k tokens/s (median)",
        "step loss": "1.0000 -> 0.5000, best 0.2500 at step 20",
        "held-out loss": "4.0000 -> 3.5000, best 3.5000 at step 30",
        "peak memory": "2.0 GiB",
        "metrics": str(tmp_path),
    }


def test_summary_columns_are_aligned(record):
    lines = render_summary([record(1, held_out_loss=2.0)], {"a": "x", "checkpoints": "y"}).splitlines()

    assert {line[:2] + line[15:17] for line in lines} == {"    "}
    assert all(line[17] != " " for line in lines)


def test_summary_without_evaluation_has_no_held_out_loss(record):
    assert "held-out loss" not in rows(render_summary([record(1)], {}))


def test_summary_leaves_losses_that_are_not_finite_out_of_the_best(record):
    text = render_summary([record(1, loss=math.nan), record(2, loss=2.0), record(3, loss=math.inf)], {})

    assert rows(text)["step loss"] == "nan -> inf, best 2.0000 at step 2"


def test_summary_of_nothing_says_so():
    assert rows(render_summary([], {"checkpoints": "c"})) == {"steps": "none logged", "checkpoints": "c"}
