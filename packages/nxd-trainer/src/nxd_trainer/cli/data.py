"""`nxd data`: shows the data that a run will train on."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import UserError, make_parser, parse, reports_user_errors, take_settings
from nxd_cli.launch import is_launched
from nxd_cli.output import printable

from nxd_trainer.cli.arguments import add_recipe_keys
from nxd_trainer.recipe import check_paths, load_recipe, recipe_switches

FLAGS = ("svg", "help")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "data",
        "Tokenize a recipe's data as nxd train does, and show the first samples with the tokens that the "
        "loss counts, the document lengths, the savings from packing, and probable mistakes. Takes the same keys as "
        "nxd train.",
        usage="nxd data [RECIPE] [--svg FILE] [--KEY VALUE | KEY=VALUE ...]",
        examples=[
            "nxd data recipe.toml",
            "nxd data --data.path books --data.sequence_length 512",
            "nxd data --model.path Qwen3-0.6B --data.path chats.jsonl --data.chat --svg data.svg",
        ],
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a .toml, .yaml or .json file; defaults if unset")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the output as a picture")
    add_recipe_keys(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prepare the data and show them; the tokens stay in the run's cache."""
    remaining, settings = take_settings(arguments, FLAGS, recipe_switches())
    options = parse(_parser(), remaining)
    recipe = reports_user_errors(lambda: load_recipe(options.recipe, settings))
    reports_user_errors(lambda: check_paths(recipe))
    if recipe.data.streaming:
        raise UserError("nxd data reads all data in advance, which data.streaming=true does not allow; leave it out")
    if is_launched():
        raise UserError("nxd data runs in one process; start it without torchrun")

    from nxd_data import Conversations, Corpus, PairSequences  # noqa: PLC0415
    from nxd_data.sources import holds_tokens  # noqa: PLC0415
    from nxd_engine.hugging_face import text_config  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from nxd_trainer.from_recipe import can_be_packed, recipe_model, tokenizer_of  # noqa: PLC0415
    from nxd_trainer.report.data_preview import (  # noqa: PLC0415
        WARNING,
        packing_line,
        show_held_out_sample,
        show_lengths,
        show_samples,
        special_tokens_line,
    )
    from nxd_trainer.training.run_data import open_data, prepare_data, with_counted_steps  # noqa: PLC0415
    from nxd_trainer.vision_inputs import check_images_are_read  # noqa: PLC0415

    model = reports_user_errors(lambda: recipe_model(recipe))
    vocab_size = text_config(model.description.config).get("vocab_size")
    data = reports_user_errors(lambda: open_data(recipe, prepare_data(recipe, vocab_size=vocab_size)))
    reports_user_errors(lambda: check_images_are_read(model.vision, data.with_images))
    recipe = reports_user_errors(lambda: with_counted_steps(recipe, data.train))
    tokenizer, length = tokenizer_of(recipe)[0], recipe.data.sequence_length
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, record=options.svg is not None)
    warnings = list(data.warnings)
    for name, source in data.sources.items():
        console.rule(Text(printable(name), "bold"), align="left")
        show_lengths(console, source, sequence_length=length)
        if isinstance(source, Conversations) and not recipe.dpo.beta:
            if can_be_packed(recipe, model):
                console.print(packing_line(source, sequence_length=length))
        elif isinstance(source, Corpus) and not holds_tokens(name, recipe.data.suffixes):
            told = special_tokens_line(source, tokenizer)
            warnings += [f"{name}: {told}"] if told else []
    console.rule(Text("the first samples", "bold"), align="left")
    training, held_out = (it.answers if isinstance(it, PairSequences) else it for it in (data.train, data.held_out))
    show_samples(console, training, tokenizer, seed=recipe.train.seed)
    if len(held_out):
        console.rule(Text("to evaluate on", "bold"), align="left")
        show_held_out_sample(console, held_out, tokenizer)
    console.rule(Text("the run", "bold"), align="left")
    epochs = recipe.train.steps * recipe.train.global_batch_size / len(data.train)
    console.print(
        f"{recipe.train.steps:,} steps of {recipe.train.global_batch_size} sequences of {length} tokens: "
        f"{epochs:.2f} epochs of {len(data.train):,} sequences; {len(data.held_out):,} to evaluate on"
    )
    for note in data.notes:
        console.print(printable(note))
    for warning in warnings:
        console.print(Text("warning: ", WARNING) + Text(printable(warning)))
    if options.svg is not None:
        reports_user_errors(lambda: console.save_svg(str(options.svg), title="nxd data"))
    return 0
