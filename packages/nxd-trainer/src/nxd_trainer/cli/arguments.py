"""Arguments shared by several commands: models, checkpoints, tokenizers."""

import argparse
import os
from pathlib import Path


def model_folder(text: str) -> Path:
    """Return the named folder, or its checkpoints folder if it is the folder of a run."""
    folder = Path(text)
    checkpoints = folder / "checkpoints"
    # Not Path's own methods, which raise for names that no file can have.
    is_run = os.path.isfile(folder / "recipe.toml") and os.path.isdir(checkpoints)
    return checkpoints if is_run else folder


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a checkpoint."""
    parser.add_argument("checkpoints", type=model_folder, help="folder of a run, or of its checkpoints")
    parser.add_argument("--tag", help="name of the checkpoint; the newest if unset")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model to generate text with."""
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
    add_tokenizer(parser)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a draft model."""
    parser.add_argument(
        "--draft",
        type=model_folder,
        metavar="MODEL",
        help="a smaller model with the same tokenizer that proposes tokens: the same text, faster at temperature 0",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=4,
        metavar="N",
        help="draft tokens per step (default: %(default)s)",
    )


def add_compiled_degrees(parser: argparse.ArgumentParser) -> None:
    """Add `--context-parallel-size` and `--expert-parallel-size`, for compiled models."""
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
        help="number of the worker processes that a model's experts are divided among (default: 1)",
    )


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add `--tokenizer`, for checkpoints that do not name theirs."""
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json, its folder, or 'bytes'; unset: the model's"
    )
