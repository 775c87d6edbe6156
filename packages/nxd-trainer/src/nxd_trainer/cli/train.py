"""`nxd train`: train a model from a recipe."""

import argparse
import os
import sys

from nxd_trainer.cli.command import (
    Commands,
    UserError,
    add_nproc,
    check_nproc,
    leave_mesh,
    reports_user_errors,
    started_ranks,
)
from nxd_trainer.launch import EXIT_STOPPED, LAUNCHER_PID, is_launched
from nxd_trainer.recipe import Recipe, check_layout, load_recipe, render_recipe_help


def add_parser(commands: Commands) -> None:
    """Add `train` to the commands."""
    parser = commands.add_parser(
        "train",
        help="train a model from a recipe",
        usage="nxd train [RECIPE] [--nproc N] [--KEY VALUE | KEY=VALUE ...]",
        description="Train a language model on text. Every key of the recipe is a flag, as in --train.steps 100.",
        epilog=render_recipe_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a .toml, .yaml or .json file; defaults if unset")
    add_nproc(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, in the ranks that the command line asks for."""
    recipe = reports_user_errors(lambda: load_recipe(options.recipe, options.settings))
    if not is_launched():
        reports_user_errors(lambda: _check_ranks(recipe, 1 if options.nproc is None else options.nproc))
    code = started_ranks(options)
    if code is not None:
        return code

    from nxd_ckpt import CheckpointError  # noqa: PLC0415
    from nxd_ckpt.errors import RanksLostError  # noqa: PLC0415
    from nxd_state import PeerError, initialize_model_parallel  # noqa: PLC0415
    from nxd_state.neuron import computes_on_neuron, prepare_neuron  # noqa: PLC0415

    if computes_on_neuron():
        reports_user_errors(prepare_neuron)  # before torch-xla is imported
    from nxd_trainer.training import StopRequest, TrainingDiverged, prepare_run, run_training  # noqa: PLC0415

    with StopRequest() as stop:
        parallel = recipe.parallel
        if parallel.timeout is not None:
            os.environ["NXD_TIMEOUT"] = str(parallel.timeout)  # which checkpoints obey as well
        reports_user_errors(
            lambda: initialize_model_parallel(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.expert_parallel_size,
                context_parallel_size=parallel.context_parallel_size,
                expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            )
        )
        prepared = reports_user_errors(lambda: prepare_run(recipe))
        try:
            result = run_training(*prepared, stop)
        except RanksLostError as error:  # the rank that speaks for its host may be the lost one
            raise PeerError(str(error)) from error
        except (CheckpointError, TrainingDiverged) as error:  # every rank raises the same
            raise UserError(str(error)) from error
        except OSError as error:  # a full disk; of several ranks, only the one that writes knows
            if is_launched():
                raise
            raise UserError(str(error)) from error
    if result.stopped and LAUNCHER_PID not in os.environ and os.environ.get("RANK", "0") == "0":
        print(f"nxd train: stopped by a signal after step {result.step}, which is saved", file=sys.stderr, flush=True)
    leave_mesh()
    return EXIT_STOPPED if result.stopped else 0


def _check_ranks(recipe: Recipe, nproc: int) -> None:
    """What can be known before any rank is started."""
    check_nproc(nproc)
    tp, pp = recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size
    cp = recipe.parallel.context_parallel_size
    model_ranks = tp * pp * cp
    if nproc % model_ranks:
        pipeline = f" x parallel.pipeline_parallel_size={pp}" if pp > 1 else ""
        context = f" x parallel.context_parallel_size={cp}" if cp > 1 else ""
        raise ValueError(
            f"parallel.tensor_parallel_size={tp}{pipeline}{context} needs a multiple of {model_ranks} ranks, not "
            f"{nproc}; use --nproc {max(1, nproc // model_ranks) * model_ranks}"
        )
    ep = recipe.parallel.expert_parallel_size
    expert_ranks = ep * (recipe.parallel.expert_tensor_parallel_size or tp)
    if nproc // pp % expert_ranks:
        raise ValueError(
            f"parallel.expert_parallel_size={ep} needs a multiple of {expert_ranks} ranks for each pipeline stage, not "
            f"{nproc // pp}; use --nproc {expert_ranks * pp}"
        )
    check_layout(recipe, nproc // model_ranks)
