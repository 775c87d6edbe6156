"""The console script `nxd`: train, generate, export.

Only reads the command line and prints; the work is done by `training`, `generate` and `export`, which are imported
when they are needed, so that `nxd --help` answers at once.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from nxd_trainer.launch import EXIT_STOPPED, is_launched, launch_ranks
from nxd_trainer.recipe import Recipe, check_layout, load_recipe, render_recipe_help
from nxd_trainer.slurm import slurm_environment

EXIT_MISTAKE = 2

T = TypeVar("T")


class _Mistake(Exception):
    """Something the user can mend: shown as one line, without a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code: 0, 2 for a user's mistake, 143 after a signal."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    remaining, settings = _take_settings(arguments) if arguments[:1] == ["train"] else (arguments, [])
    options = _make_parser().parse_args(remaining, argparse.Namespace(arguments=arguments, settings=settings))
    try:
        os.environ.update(_mendable(lambda: slurm_environment(os.environ)))
        code: int = options.run(options)
    except _Mistake as mistake:
        # Every rank makes the same mistake; one rank of each host says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"nxd {options.command}: {mistake}", file=sys.stderr)
        _leave_mesh()
        return EXIT_MISTAKE
    except Exception:
        _fail_at_once()
    return code


def _train(options: argparse.Namespace) -> int:
    recipe = _mendable(lambda: load_recipe(options.recipe, options.settings))
    if not is_launched():
        _mendable(lambda: _check_ranks(recipe, 1 if options.nproc is None else options.nproc))
    if options.nproc is not None and not is_launched():
        return launch_ranks(options.nproc, "nxd_trainer", options.arguments)

    from nxd_ckpt import CheckpointError  # noqa: PLC0415
    from nxd_state import initialize_model_parallel  # noqa: PLC0415

    from nxd_trainer.training import StopRequest, TrainingDiverged, prepare_run, run_training  # noqa: PLC0415

    with StopRequest() as stop:
        parallel = recipe.parallel
        _mendable(lambda: initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size))
        prepared = _mendable(lambda: prepare_run(recipe))
        try:
            result = run_training(*prepared, stop)
        except (CheckpointError, TrainingDiverged) as error:  # every rank raises the same
            raise _Mistake(str(error)) from error
    _leave_mesh()
    return EXIT_STOPPED if result.stopped else 0


def _generate(options: argparse.Namespace) -> int:
    if options.nproc is not None and not is_launched():
        _mendable(lambda: _check_nproc(options.nproc))
        return launch_ranks(options.nproc, "nxd_trainer", options.arguments)

    import torch  # noqa: PLC0415
    from nxd_state import get_world_group, initialize_model_parallel  # noqa: PLC0415

    from nxd_trainer.generate import generate, load_for_generation  # noqa: PLC0415

    initialize_model_parallel(int(os.environ.get("WORLD_SIZE", "1")))
    model, tokenizer = _mendable(lambda: load_for_generation(options.checkpoints, options.tag))
    prompt = torch.from_numpy(tokenizer.encode(options.prompt))
    tokens = generate(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        end_token=tokenizer.end_of_document,
        seed=options.seed,
    )
    new_tokens = _mendable(lambda: [token for token in tokens if token != tokenizer.end_of_document])
    if get_world_group().rank == 0:
        print(options.prompt + tokenizer.decode(new_tokens))
    _leave_mesh()
    return 0


def _export(options: argparse.Namespace) -> int:
    from nxd_trainer.export import export_hugging_face  # noqa: PLC0415
    from nxd_trainer.training.run_state import DTYPES  # noqa: PLC0415

    dtype = None if options.dtype is None else DTYPES[options.dtype]
    target = _mendable(lambda: export_hugging_face(options.checkpoints, options.target, options.tag, dtype=dtype))
    print(f"wrote {target / 'config.json'} and {target / 'model.safetensors'}")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nxd", description="Train and serve large models with tensor, pipeline and data parallelism."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser(
        "train",
        help="train a Llama from a recipe",
        usage="nxd train [RECIPE] [--nproc N] [--KEY VALUE | KEY=VALUE ...]",
        description="Train a Llama on text. Every key of the recipe is a flag, as in --train.steps 100.",
        epilog=render_recipe_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help="a .toml, .yaml or .json file; defaults if unset")
    _add_nproc(train)
    train.set_defaults(run=_train)

    generate = commands.add_parser("generate", help="write text with a trained model")
    _add_checkpoint(generate)
    generate.add_argument("--prompt", default="def ", help="text to go on from (default: %(default)r)")
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: likeliest token (default: 0.8)"
    )
    generate.add_argument("--top-k", type=int, default=40, metavar="K", help="0: all tokens (default: %(default)s)")
    generate.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    _add_nproc(generate)
    generate.set_defaults(run=_generate)

    export = commands.add_parser("export", help="write a Hugging Face folder from a checkpoint")
    _add_checkpoint(export)
    export.add_argument("target", type=Path, help="folder to write")
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float64"], help="of the weights; as stored if unset"
    )
    export.set_defaults(run=_export)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", type=Path, help="folder of a run's checkpoints")
    parser.add_argument("--tag", help="which checkpoint; the newest if unset")


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="start N ranks on this machine; unset: this process, or torchrun's ranks"
    )


def _take_settings(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without the recipe's keys, and those keys as `key=value`.

    A key may come as `--train.steps 100`, `--train.steps=100` or `train.steps=100`. What is no key is taken along:
    the recipe knows best which one was meant.
    """
    remaining: list[str] = []
    settings: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name not in ("nproc", "help"):
            if not equals and waiting and not waiting[-1].startswith("--"):
                value = waiting.pop()
            settings.append(f"{name}={value}")
        elif equals and not argument.startswith("-") and not Path(argument).exists():
            settings.append(argument)
        else:
            remaining.append(argument)
    return remaining, settings


def _check_ranks(recipe: Recipe, nproc: int) -> None:
    """What can be known before any rank is started."""
    _check_nproc(nproc)
    tp, pp = recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size
    model_ranks = tp * pp
    if nproc % model_ranks:
        pipeline = f" x parallel.pipeline_parallel_size={pp}" if pp > 1 else ""
        raise ValueError(
            f"parallel.tensor_parallel_size={tp}{pipeline} needs a multiple of {model_ranks} ranks, not {nproc}; "
            f"use --nproc {max(1, nproc // model_ranks) * model_ranks}"
        )
    check_layout(recipe, nproc // model_ranks)


def _check_nproc(nproc: int) -> None:
    if nproc < 1:
        raise ValueError(f"--nproc {nproc} must be 1 or more")


def _mendable(call: Callable[[], T]) -> T:
    """Call something whose errors are the user's to mend, and the same on every rank."""
    from nxd_ckpt import CheckpointError  # noqa: PLC0415

    try:
        return call()
    except (ValueError, OSError, CheckpointError) as error:
        raise _Mistake(str(error)) from error


def _leave_mesh() -> None:
    """End the process groups, if there are any: their threads must not be alive when the interpreter ends."""
    from nxd_state import destroy_model_parallel  # noqa: PLC0415

    destroy_model_parallel()


def _fail_at_once() -> NoReturn:
    """Show the traceback, then end without tearing anything down.

    Peers learn of the failure only when this process is gone, so the cause is printed before what follows from it.
    """
    rank = os.environ.get("RANK")
    heading = "" if rank is None else f"rank {rank} failed:\n"
    print(heading + traceback.format_exc(), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
