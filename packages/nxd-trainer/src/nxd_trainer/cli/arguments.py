"""Arguments that several commands have: models, checkpoints, tokenizers."""

import argparse
import os
from pathlib import Path


def model_folder(text: str) -> Path:
    """The folder that was named; of a run's, the one with its checkpoints."""
    folder = Path(text)
    checkpoints = folder / "checkpoints"
    # Not Path's own methods, which raise for what no file can be called.
    is_run = os.path.isfile(folder / "recipe.toml") and os.path.isdir(checkpoints)
    return checkpoints if is_run else folder


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a checkpoint."""
    parser.add_argument("checkpoints", type=model_folder, help="folder of a run, or of its checkpoints")
    parser.add_argument("--tag", help="which checkpoint; the newest if unset")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model to write text with."""
    parser.add_argument(
        "model",
        type=model_folder,
        help="a Hugging Face folder (config.json, safetensors, tokenizer), or that of a run or of its checkpoints",
    )
    parser.add_argument("--tag", help="which checkpoint; the newest if unset")
    parser.add_argument(
        "--adapter",
        type=model_folder,
        metavar="FOLDER",
        help="a LoRA adapter of PEFT's files or in a checkpoint, to merge",
    )
    add_tokenizer(parser)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a draft model."""
    parser.add_argument(
        "--draft",
        type=model_folder,
        metavar="MODEL",
        help="a smaller model of the same tokenizer, which guesses tokens: the same texts, sooner at temperature 0",
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="N", help="guesses at a time (default: %(default)s)"
    )


def add_compiled_degrees(parser: argparse.ArgumentParser) -> None:
    """Add `--context-parallel-size` and `--expert-parallel-size`, of compiled models."""
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
        help="worker processes, of those that there are, that a model's experts are divided among (default: 1)",
    )


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add `--tokenizer`, for checkpoints that do not say theirs."""
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json, its folder, or 'bytes'; unset: what the model says"
    )
