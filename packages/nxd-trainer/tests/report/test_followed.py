"""A run's metrics as they are followed from outside, by `nxd chaos`."""

from nxd_elastic.chaos import FollowedRun
from nxd_trainer.report.metrics import MetricsLog, StepRecord


def record(step):
    return StepRecord(
        step=step, loss=1.0, learning_rate=1e-3, tokens=step, tokens_per_second=1.0, seconds=1.0, peak_memory_bytes=1
    )


class Ended:
    pid = 0

    def poll(self):
        return 0


def test_records_of_a_resumed_run_are_seen_again_only_where_steps_were_lost(tmp_path):
    run = FollowedRun(Ended(), tmp_path)
    with MetricsLog(tmp_path, layout="TP 2") as log:
        for step in (1, 2, 3):
            log.log(record(step))
    first = run.poll()
    with MetricsLog(tmp_path, first_step=2, layout="TP 2") as log:
        log.log(record(3))
        second = run.poll()
        log.log(record(4))

    assert [it.record.step for it in first] == [1, 2, 3]
    assert [(it.record.step, it.record.resumed_from) for it in second] == [(3, 2)]
    assert [it.record.step for it in run.poll()] == [4]
    assert run.generations == 2


def test_what_was_in_the_metrics_before_counts_as_no_new_step(tmp_path):
    with MetricsLog(tmp_path, layout="TP 2") as log:
        for step in (1, 2, 3):
            log.log(record(step))

    run = FollowedRun(Ended(), tmp_path)

    assert [it.record.step for it in run.seen] == [3]
    assert not run.poll()
