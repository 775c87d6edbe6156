"""Schedules for tests, drawn by hypothesis."""

import pytest
from hypothesis import strategies as st
from nxd_pipeline.schedules import SCHEDULE_NAMES, insert_communication, make_schedule

ANY_STAGES_PER_RANK = ("gpipe", "interleaved", "inference")


def _draw_computation(data, names=SCHEDULE_NAMES):
    name = data.draw(st.sampled_from(names), label="name")
    return make_schedule(
        name,
        pipeline_size=data.draw(st.integers(1, 6), label="pipeline_size"),
        num_microbatches=data.draw(st.integers(1, 14), label="num_microbatches"),
        virtual_pipeline_size=data.draw(st.integers(1, 3)) if name in ANY_STAGES_PER_RANK else None,
    )


@pytest.fixture(scope="session")
def draw_computation():
    """A function that draws any order of computation, of given methods if need be."""
    return _draw_computation


@pytest.fixture(scope="session")
def draw_schedule():
    """The same with messages."""
    return lambda data, names=SCHEDULE_NAMES: insert_communication(_draw_computation(data, names))
