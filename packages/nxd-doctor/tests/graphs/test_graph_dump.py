import pytest
from nxd_doctor.graphs import read_graphs

GRAPH = "HloModule IrToHlo.3\n\nENTRY %IrToHlo.3 (p: f32[2]) -> f32[2] {\n  ROOT %p = f32[2] parameter(0)\n}\n"
DUMP = f"""[ScheduleSyncTensorsGraph]
TensorsGraphInfo:
  sync (/venv/torch_xla/torch_xla.py:87)
  step_boundary (/venv/nxd_state/device.py:53)
  train step (/home/me/my script.py:12)
  main (/home/me/train.py:3)

Root Hashes: (ecc9975e9786a8e41489ed335b9d2b77)

## BEGIN_GRAPH
{GRAPH}

## END_GRAPH

[ScheduleSyncTensorsGraph]
TensorsGraphInfo:
  main (/home/me/train.py:4)

## BEGIN_GRAPH
{GRAPH}
## END_GRAPH

"""


def test_graphs_of_a_dump_come_with_the_lines_that_asked_for_them():
    first, second = read_graphs(DUMP)

    assert first.text == second.text == GRAPH
    assert first.asked_by == "main (/home/me/train.py:3)"
    assert second.frames == ("main (/home/me/train.py:4)",)
    assert [str(parameter.shape) for parameter in first.module.parameters] == ["f32[2]"]


def test_dump_that_is_cut_off_is_refused():
    with pytest.raises(ValueError, match="ends in the middle of a graph"):
        read_graphs(DUMP[: DUMP.rindex("## END_GRAPH")])
    assert read_graphs("") == []
