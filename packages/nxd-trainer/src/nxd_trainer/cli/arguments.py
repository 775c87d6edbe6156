"""Arguments shared by several commands: models, checkpoints, tokenizers; and the compiled models that they name."""

from __future__ import annotations

import argparse
import os
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nxd_cli.command import reports_user_errors

from nxd_trainer.recipe import RUN_RECIPE_FILE, Recipe, recipe_keys
from nxd_trainer.recipe.rules import show_value

if TYPE_CHECKING:
    from nxd_trace.generation import Generator

    from nxd_trainer.compiled_generation import CompilableCheckpoint


def add_recipe_keys(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each key of the recipe, for `--help` and completion; `take_settings` reads them before."""
    for section, keys in groupby(recipe_keys().values(), key=lambda key: key.section):
        meaning = (type(getattr(Recipe(), section)).__doc__ or "").splitlines()[0] if section else ""
        group = parser.add_argument_group(f"[{section}]" if section else "top level", meaning)
        for key in keys:
            is_choice = "|" in key.type_name and "," not in key.type_name
            group.add_argument(
                f"--{key.name}",
                nargs="?" if key.value_type is bool else None,
                choices=key.type_name.split("|") if is_choice else None,
                metavar=None if is_choice else key.type_name,
                help=f"{key.description} (default: {show_value(key.default)})".replace("%", "%%"),
            )


def model_folder(text: str) -> Path:
    """Return the named folder, or its checkpoints folder if it is the folder of a run."""
    folder = Path(text)
    checkpoints = folder / "checkpoints"
    # Not Path's own methods, which raise for names that no file can have.
    is_run = os.path.isfile(folder / RUN_RECIPE_FILE) and os.path.isdir(checkpoints)
    return checkpoints if is_run else folder


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a checkpoint."""
    parser.add_argument("checkpoints", type=model_folder, help="folder of a run, or of its checkpoints")
    parser.add_argument("--tag", help="name of the checkpoint; the newest if unset")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model to generate text with, a draft model, and degrees for compiled models."""
    parser.add_argument(
        "model",
        type=model_folder,
        help="a Hugging Face folder (config.json, safetensors, tokenizer), or the folder of a run or its checkpoints",
    )
    parser.add_argument("--tag", help="name of the checkpoint; the newest if unset")
    parser.add_argument(
        "--adapter",
        type=model_folder,
        metavar="FOLDER",
        help="a LoRA adapter to merge: a PEFT folder or a checkpoint",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json, its folder, or 'bytes'; unset: the model's"
    )
    parser.add_argument(
        "--draft",
        type=model_folder,
        metavar="MODEL",
        help="a smaller model with the same tokenizer, for speculative decoding: faster, same text at temperature 0",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=4,
        metavar="N",
        help="draft tokens per step (default: %(default)s)",
    )

    parser.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="groups of worker processes, each with the whole model, that read a prompt together (default: 1)",
    )
    parser.add_argument(
        "--expert-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="worker processes that the experts are distributed over (default: 1)",
    )


def open_compilable(
    options: argparse.Namespace, *, images: Literal["no", "yes", "if it reads them"] = "no"
) -> tuple[CompilableCheckpoint, CompilableCheckpoint | None, int]:
    """Return the model and the draft model that `add_model` names, and the longest text that both support.

    `images` is as for `open_for_compilation`.
    """
    from nxd_trainer.compiled_generation import open_for_compilation  # noqa: PLC0415

    model = reports_user_errors(
        lambda: open_for_compilation(
            options.model, options.tag, tokenizer=options.tokenizer, adapter=options.adapter, images=images
        )
    )
    draft = None
    if options.draft is not None:
        draft = reports_user_errors(lambda: open_for_compilation(options.draft, tokenizer=options.tokenizer))
    return model, draft, min(it.max_positions for it in (model, draft) if it is not None)


def compile_model(
    options: argparse.Namespace,
    model: CompilableCheckpoint,
    draft: CompilableCheckpoint | None,
    *,
    batch_size: int,
    max_length: int,
    **settings: Any,
) -> Generator:
    """Compile what `open_compilable` returned, with the degrees and the compiler of the command line."""
    return reports_user_errors(
        lambda: model.compile(
            batch_size=batch_size,
            max_length=max_length,
            tp_degree=options.nproc or 1,
            context_parallel_size=options.context_parallel_size,
            expert_parallel_size=options.expert_parallel_size,
            compiler=options.compiler,
            draft=draft,
            num_speculative_tokens=options.num_speculative_tokens,
            **settings,
        )
    )
