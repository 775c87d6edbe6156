"""The idle part of a step, as measured beside as simulated."""

import pytest
from nxd_pipeline import Costs, StageCost, insert_communication, make_schedule, simulate
from nxd_pipeline.timeline import bubble_report, measured_costs, read_trace

COSTS = (StageCost(1.0, 2.0, 3.0), StageCost(2.0, 1.0, 4.0), StageCost(3.0, 2.0, 1.0), StageCost(1.0, 4.0, 2.0))


def timeline(name, latency=0.0):
    schedule = insert_communication(make_schedule(name, 2, 8))
    return simulate(schedule, Costs(COSTS[: schedule.num_stages], latency=latency))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_report_of_a_simulated_timeline_equals_the_simulation(name):
    report = bubble_report(timeline(name))

    assert report.measured == pytest.approx(report.simulated)
    assert sum(report.measured) / 2 == pytest.approx(timeline(name).bubble_fraction)


def test_slow_messages_show_as_measured_but_not_as_simulated():
    slow, quick = bubble_report(timeline("1f1b", latency=0.5)), bubble_report(timeline("1f1b"))

    assert all(a > b for a, b in zip(slow.measured, quick.measured, strict=True))
    assert slow.simulated == pytest.approx(quick.simulated)


def test_measured_costs_are_those_of_the_actions():
    whole, split = measured_costs(timeline("1f1b")), measured_costs(timeline("zb-v"))

    assert [cost.forward for cost in whole] == pytest.approx([1, 2])
    assert [cost.backward for cost in whole] == pytest.approx([5, 5])
    assert [(cost.forward, cost.backward_input, cost.backward_weight) for cost in split] == [
        pytest.approx((cost.forward, cost.backward_input, cost.backward_weight)) for cost in COSTS
    ]


def test_idle_part_of_each_rank_is_that_of_the_time_of_all():
    report = bubble_report(simulate(insert_communication(make_schedule("1f1b", 2, 1))))

    assert report.measured == pytest.approx((0.5, 0.5))  # each computes 3 of 6


def test_report_as_text_has_both_numbers_and_the_times_of_each_stage():
    text = str(bubble_report(simulate(insert_communication(make_schedule("1f1b", 2, 1)))))

    assert text.splitlines() == [
        "1f1b: 50.0% of the time idle as measured, 50.0% as simulated",
        "pipeline rank      measured   simulated",
        "0                     50.0%       50.0%",
        "1                     50.0%       50.0%",
        "ms of stage         forward    backward   of inputs  of weights",
        "0                  1000.000    2000.000           -           -",
        "1                  1000.000    2000.000           -           -",
    ]


def test_every_rank_of_a_model_has_the_report_that_the_file_gives(trace_files):
    for file, reports in trace_files.values():
        last = bubble_report(read_trace(file)[-1].timelines[0])
        for report in reports:
            assert report.measured == pytest.approx(last.measured, abs=1e-3)
            assert report.simulated == pytest.approx(last.simulated, abs=1e-3)
            assert all(0 < part < 1 for part in report.measured)


def test_report_of_a_model_without_a_traced_step_raises(make_pipeline):
    with pytest.raises(RuntimeError, match="pass trace_file_path"):
        make_pipeline().bubble_report()
