import json
import os

from nxd_trainer.report import MetricsLog, read_records


def write(folder, record, steps, *, first_step=0, **settings):
    with MetricsLog(folder, first_step=first_step, **settings) as metrics:
        for step in steps:
            metrics.log(record(step))
    return metrics.file


def steps_in(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_log_writes_a_line_for_each_record(tmp_path, record):
    file = write(tmp_path / "run", record, [1, 2, 3])

    assert file == tmp_path / "run" / "metrics.jsonl"
    assert read_records(file) == [record(1), record(2), record(3)]


def test_line_is_in_the_file_before_the_log_is_closed(tmp_path, record):
    with MetricsLog(tmp_path) as metrics:
        metrics.log(record(1))

        assert read_records(metrics.file) == [record(1)]


def test_resume_cuts_off_later_steps_and_goes_on(tmp_path, record):
    write(tmp_path, record, [10, 20, 30, 40])

    file = write(tmp_path, record, [30, 40, 50], first_step=25)

    assert steps_in(file) == [10, 20, 30, 40, 50]
    assert [r.resumed_from for r in read_records(file)] == [None, None, 25, None, None]


def test_resume_keeps_the_step_of_its_checkpoint(tmp_path, record):
    write(tmp_path, record, [10, 20])

    assert steps_in(write(tmp_path, record, [30], first_step=20)) == [10, 20, 30]


def test_resume_after_resume_keeps_the_mark_of_the_first(tmp_path, record):
    write(tmp_path, record, [10, 20])
    write(tmp_path, record, [20, 30, 40], first_step=10)

    file = write(tmp_path, record, [40], first_step=30)

    assert [(r.step, r.resumed_from) for r in read_records(file)] == [(10, None), (20, 10), (30, None), (40, 30)]


def test_resume_after_a_kill_in_the_middle_of_a_line(tmp_path, record):
    file = write(tmp_path, record, [10, 20])
    os.truncate(file, file.stat().st_size - 9)

    assert steps_in(write(tmp_path, record, [20], first_step=15)) == [10, 20]


def test_resume_without_a_file_begins_one(tmp_path, record):
    assert steps_in(write(tmp_path, record, [30], first_step=25)) == [30]


def test_new_run_in_an_old_folder_begins_a_new_file(tmp_path, record):
    write(tmp_path, record, [10, 20])

    file = write(tmp_path, record, [10])

    assert read_records(file) == [record(10)]


def test_layout_stands_in_the_first_record_of_each_invocation(tmp_path, record):
    write(tmp_path, record, [1, 2], layout="TP 2 x DP 2")

    file = write(tmp_path, record, [3, 4], first_step=2, layout="TP 1 x DP 2")

    assert [r.layout for r in read_records(file)] == ["TP 2 x DP 2", None, "TP 1 x DP 2", None]


def test_rank_that_does_not_write_touches_nothing(tmp_path, record):
    write(tmp_path / "run", record, [1], is_writer=False)

    assert not (tmp_path / "run").exists()
