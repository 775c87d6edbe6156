"""Ending torch.distributed with the program that has it, which runs in processes of its own here."""

from nxd_state.testing import run_torchrun

ENDS_WITHOUT_DESTROY = """
import atexit, sys
import nxd_state, torch
import torch.distributed as dist

def report():  # registered before the hook of nxd_state, hence called after it
    sys.stdout.write(f"left at exit: {dist.is_initialized()}, {nxd_state.model_parallel_is_initialized()}\\n")

atexit.register(report)
nxd_state.initialize_model_parallel(tensor_model_parallel_size=2)
total = nxd_state.all_reduce(torch.ones(1), nxd_state.get_world_group())
sys.stdout.write(f"total: {total.item()}\\n")
"""


def test_program_that_ends_without_destroy_gives_up_its_groups_and_leaves_quietly(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(ENDS_WITHOUT_DESTROY)

    returncode, stdout, stderr = run_torchrun([str(script)], 2)

    assert (returncode, stderr) == (0, "")
    assert stdout.count("total: 2.0") == 2
    assert stdout.count("left at exit: False, False") == 2
