"""Histograms of a run's gradients for TensorBoard, of all pipeline stages (`train.gradient_histograms_every`)."""

from weakref import ref

from nxd_optim import GradientHistogram, GradientHistograms
from nxd_state import all_gather_object, get_group, records_graphs

from nxd_trainer.report.tensorboard import TensorBoardTracker
from nxd_trainer.training.run_state import RunState


def report_gradients(state: RunState) -> None:
    """Send histograms of the gradients to TensorBoard from now on. Call it on all ranks, when the trackers are open.

    Raises:
        ValueError: the device records graphs.
    """
    every = state.recipe.train.gradient_histograms_every
    if not every:
        return
    if records_graphs():
        raise ValueError(f"train.gradient_histograms_every={every} does not support XLA; set it to 0")
    trackers = [it for it in state.trackers if isinstance(it, TensorBoardTracker)]
    run = ref(state)  # the optimizer's hooks would keep the run, and its lock, alive

    def step() -> int:
        state = run()
        assert state is not None  # it takes the step
        return state.step + 1

    trained = [(name, it) for name, it in state.model.named_parameters() if it.requires_grad]
    own = [(name, it) for name, it in trained if not getattr(it, "shared", False)]  # not copies of tied weights

    def report(number: int, of_stage: dict[str, GradientHistogram]) -> None:
        stages = all_gather_object(of_stage, get_group("pp"))
        histograms = {name: histogram for stage in stages for name, histogram in stage.items()}
        for tracker in trackers:
            tracker.log_gradients(number, histograms)

    GradientHistograms(state.optimizer.optimizer, own, report, every=every, step=step)
