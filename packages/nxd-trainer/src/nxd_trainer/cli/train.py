"""`nxd train`: train a model from a recipe."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nxd_cli.command import (
    UserError,
    add_nproc,
    check_nproc,
    leave_mesh,
    make_parser,
    parse,
    reports_user_errors,
    started_ranks,
    take_settings,
)
from nxd_cli.launch import (
    EXIT_STOPPED,
    LAUNCHER_PID,
    advice_on_ranks,
    is_launched,
    one_of_several_tasks,
    own_threads,
)

from nxd_trainer.cli.arguments import add_recipe_keys
from nxd_trainer.recipe import Recipe, check_layout, check_paths, load_recipe, recipe_switches

if TYPE_CHECKING:
    from nxd_trainer.training import StopRequest, TrainResult
    from nxd_trainer.training.elastic import ElasticRecipe

FLAGS = ("nproc", "elastic", "elastic-layouts", "elastic-grace", "elastic-silence", "help")  # not a key of the recipe


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "train",
        "Train a language model on text. Every key of the recipe is a flag, as in --train.steps 100.",
        usage="nxd train [RECIPE] [--nproc N] [--elastic MIN:MAX] [--KEY VALUE | KEY=VALUE ...]",
        examples=[
            "nxd train",
            "nxd train recipe.toml --nproc 2 --parallel.tensor_parallel_size 2",
            "nxd train --model.path Qwen3-0.6B --data.path chats.jsonl --data.chat --lora.rank 16 --output run",
        ],
        exit_codes="0 the run has ended, 1 a rank has failed, 2 user error, 143 stopped by a signal; "
        "a checkpoint is saved, unless the ranks had not started",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a .toml, .yaml or .json file; defaults if unset")
    add_nproc(parser)
    parser.add_argument(
        "--elastic", metavar="MIN:MAX", help="keep training when ranks are lost or join, with this many ranks"
    )
    parser.add_argument(
        "--elastic-layouts",
        metavar="LAYOUTS",
        default="",
        help="fallback layouts after the recipe's, in order of preference, such as 'tp=2,pp=2;tp=2'",
    )
    parser.add_argument(
        "--elastic-grace",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="how long to wait for a lost rank before continuing with fewer (default: %(default)g)",
    )
    parser.add_argument(
        "--elastic-silence",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="how long a rank may send no heartbeat before it counts as lost (default: %(default)g)",
    )
    add_recipe_keys(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Train on the ranks that the command line requests."""
    remaining, settings = take_settings(arguments, FLAGS, recipe_switches())
    options = parse(_parser(), remaining)
    recipe = reports_user_errors(lambda: load_recipe(options.recipe, settings))
    if not is_launched():
        reports_user_errors(lambda: check_paths(recipe))
    if not is_launched() and options.nproc is None and (alone := one_of_several_tasks(os.environ)):
        print(f"nxd train: {alone}", file=sys.stderr)
    if not is_launched() and not options.elastic:
        reports_user_errors(lambda: _check_ranks(recipe, 1 if options.nproc is None else options.nproc))
    code = started_ranks(options.nproc, "train", arguments)
    if code is not None:
        if code == EXIT_STOPPED:
            print(f"nxd train: {_to_resume(arguments)}", file=sys.stderr)
        return code

    from nxd_ckpt import CheckpointError  # noqa: PLC0415
    from nxd_ckpt.errors import RanksLostError  # noqa: PLC0415
    from nxd_state import PeerError  # noqa: PLC0415
    from nxd_state.neuron import computes_on_neuron, prepare_neuron  # noqa: PLC0415

    if computes_on_neuron():
        reports_user_errors(prepare_neuron)  # before torch-xla is imported
    from nxd_trainer.training import StopRequest, TrainingDiverged  # noqa: PLC0415

    try:
        if options.elastic:
            return _run_elastic(recipe, options, arguments)
        with StopRequest() as stop, own_threads():
            return _exit_code(_train(recipe, stop), arguments)
    except RanksLostError as error:  # the rank that reports for its host may be the lost one
        raise PeerError(str(error)) from error
    except (CheckpointError, TrainingDiverged) as error:  # every rank raises the same
        raise UserError(str(error)) from error
    except OSError as error:  # a full disk; only the writing rank notices
        if is_launched():
            raise
        raise UserError(str(error)) from error


def _train(recipe: Recipe, stop: "StopRequest") -> "TrainResult":
    from nxd_state import initialize_mesh  # noqa: PLC0415

    from nxd_trainer.training import prepare_run, run_training  # noqa: PLC0415

    _set_timeout(recipe)
    reports_user_errors(lambda: initialize_mesh(recipe.parallel.degrees))
    prepared = reports_user_errors(lambda: prepare_run(recipe))
    return run_training(*prepared, stop)


def _run_elastic(recipe: Recipe, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Return an exit code: its trainer's in the supervisor that the launcher started, the training's in a trainer."""
    from nxd_elastic.loop import check_launch  # noqa: PLC0415
    from nxd_elastic.supervisor import supervise  # noqa: PLC0415
    from nxd_state import is_lazy_device  # noqa: PLC0415

    from nxd_trainer.training import StopRequest  # noqa: PLC0415
    from nxd_trainer.training.elastic import train_elastically  # noqa: PLC0415

    elastic = reports_user_errors(lambda: _elastic_recipe(recipe, options))
    try:
        if is_lazy_device():
            raise RuntimeError("--elastic restarts communication within a process, which XLA cannot do; leave it out")
        check_launch()
        keeps_memory = recipe.checkpoint.memory_every > 0
        pipe = supervise(silence=elastic.options.silence, keeps_memory=keeps_memory)
    except (RuntimeError, OSError) as error:
        raise UserError(str(error)) from error
    if isinstance(pipe, int):
        return pipe
    with StopRequest() as stop:
        try:
            result = train_elastically(elastic, pipe, stop, lambda: _set_timeout(recipe))
        except ValueError as error:
            raise UserError(str(error)) from error
    return (EXIT_STOPPED if stop.signal_number else 0) if result is None else _exit_code(result, arguments)


def _elastic_recipe(recipe: Recipe, options: argparse.Namespace) -> "ElasticRecipe":
    from nxd_elastic.rendezvous import parse_layouts, parse_range  # noqa: PLC0415

    from nxd_trainer.training.elastic import ElasticRecipe, options_of  # noqa: PLC0415

    limits = options_of(parse_range(options.elastic), options.elastic_grace, options.elastic_silence)
    return ElasticRecipe(recipe, parse_layouts(options.elastic_layouts), limits)


def _set_timeout(recipe: Recipe) -> None:
    if recipe.parallel.timeout is not None:
        os.environ["NXD_TIMEOUT"] = str(recipe.parallel.timeout)  # checkpoints use it too


def _exit_code(result: "TrainResult", arguments: Sequence[str]) -> int:
    if result.stopped and LAUNCHER_PID not in os.environ and os.environ.get("RANK", "0") == "0":
        # The command line of torchrun or srun is not known.
        hint = "; the same command resumes" if is_launched() else f"; {_to_resume(arguments)}"
        print(
            f"nxd train: stopped by a signal after step {result.step}, which is saved{hint}",
            file=sys.stderr,
            flush=True,
        )
    leave_mesh()
    return EXIT_STOPPED if result.stopped else 0


def _to_resume(arguments: Sequence[str]) -> str:
    return f"to resume: {shlex.join(['nxd', 'train', *arguments])}"


def _check_ranks(recipe: Recipe, nproc: int) -> None:
    """Check the number of ranks before any rank is started."""
    check_nproc(nproc)
    degrees = recipe.parallel.degrees
    model_ranks = degrees.model_ranks
    if nproc % model_ranks:
        pipeline = f" x parallel.pipeline_parallel_size={degrees.pp}" if degrees.pp > 1 else ""
        context = f" x parallel.context_parallel_size={degrees.cp}" if degrees.cp > 1 else ""
        raise ValueError(
            f"parallel.tensor_parallel_size={degrees.tp}{pipeline}{context} needs a multiple of {model_ranks} ranks, "
            f"not {nproc}; {advice_on_ranks(max(1, nproc // model_ranks) * model_ranks, os.environ)}"
        )
    expert_ranks, of_stage = degrees.ep * degrees.etp, nproc // degrees.pp
    if of_stage % expert_ranks:
        raise ValueError(
            f"parallel.expert_parallel_size={degrees.ep} needs a multiple of {expert_ranks} ranks for each pipeline "
            f"stage, not {of_stage}; {advice_on_ranks(expert_ranks * degrees.pp, os.environ)}"
        )
    check_layout(recipe, nproc // model_ranks)
