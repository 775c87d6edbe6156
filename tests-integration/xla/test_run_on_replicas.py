"""`nxd train`'s loop on XLA with several ranks: whole runs, and their checkpoints, beside those over gloo."""

import nxd_ckpt
import pytest
import torch
from nxd_state import initialize_model_parallel
from nxd_testing import run_on_ranks, run_on_replicas
from nxd_testing.replicas import executed_graphs
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import train

pytestmark = [pytest.mark.xla, pytest.mark.slow]

STEPS = [
    "train.gradient_accumulation_steps=2",
    "train.steps=4",
    "train.eval_every=2",
    "optimizer.eps=1e-5",
    "parallel.zero_stage=1",
]
LAYOUTS = {
    "tp2-sp-dp2": ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"],
    "pp2-dp2": ["parallel.pipeline_parallel_size=2"],
}


def run(*settings: str) -> float:
    recipe = load_recipe(None, list(settings))
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    return train(recipe).loss


def run_and_count(*settings: str) -> tuple[float, int]:
    """Also the number of different graphs."""
    return run(*settings), sum(graph.is_new for graph in executed_graphs())


def tensors(folder) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's moments."""
    checkpoint = nxd_ckpt.open_checkpoint(folder / "checkpoints")
    return {name: checkpoint.read(name) for name in checkpoint.tensors if not name.startswith("rng/")}


def assert_same_tensors(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        atol = 1e-4 * tensor.abs().max().item()
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_of_four_ranks_on_xla_equals_the_run_over_gloo_and_goes_on_from_its_checkpoints(
    layout, tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    settings = [*tiny, *STEPS, *LAYOUTS[layout]]
    [expected, *_] = run_on_ranks(run, 4, *settings, "output=gloo", env={"NXD_DEVICE": "cpu"})

    on_xla = run_on_replicas(run_and_count, 4, *settings, "output=xla")
    run_on_ranks(run, 4, *settings, "output=moved", "train.stop_after=2", env={"NXD_DEVICE": "cpu"})
    moved = run_on_replicas(run, 4, *settings, "output=moved")

    assert [loss for loss, _ in on_xla] == pytest.approx([expected] * 4, rel=1e-5)
    assert moved == pytest.approx([expected] * 4, rel=1e-5)
    assert_same_tensors(tensors(tmp_path / "xla"), tensors(tmp_path / "gloo"))
    assert_same_tensors(tensors(tmp_path / "moved"), tensors(tmp_path / "gloo"))
