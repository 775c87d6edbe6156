"""`nxd init`: writes a recipe to edit, from the answers to four questions."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nxd_cli.command import UserError, make_parser, parse, reports_user_errors
from nxd_cli.installation import num_accelerators
from nxd_state.degrees import SIZES, ParallelDegrees
from nxd_state.mesh import divisors

from nxd_trainer.recipe import RecipeError, check_layout, check_paths, recipe_from_dict, render_draft
from nxd_trainer.recipe.rules import listed
from nxd_trainer.recipe.sections import DataSection

T = TypeVar("T")
Keys = dict[str, Any]  # values by the names of recipe keys

TINY: Keys = {
    "model.hidden_size": 64,
    "model.intermediate_size": 192,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "data.sequence_length": 128,
}
SMALL: Keys = {
    "model.hidden_size": 256,
    "model.intermediate_size": 768,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "data.sequence_length": 256,
}
MODELS = {"tiny": TINY, "small": SMALL}
_DENSE_MODELS = ("llama", "mistral", "qwen2", "qwen3")  # every layer has an MLP of this size, which is sharded
STANDARD_LIBRARY = "stdlib"
_OF_PYTHON = "the sources of Python's standard library"
# Keys that the recipe shows behind a "#", with a value to try.
SUGGESTED: Keys = {
    "parallel.zero_stage": 1,
    "parallel.activation_checkpointing": "full",
    "data.evaluation_path": "held_out",
    "train.gradient_accumulation_steps": 2,
    "train.autocast": "bfloat16",
    "train.compile": True,
    "optimizer.schedule": "cosine",
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "checkpoint.keep": 3,
    "checkpoint.keep_best": 1,
    "checkpoint.background": True,
}

_HEAD = """\
# Keys behind a `#` are not set; their values are suggestions. `nxd train --help` lists all keys.
"""


class Length(NamedTuple):
    """How long a run takes: optimizer steps, or else epochs."""

    steps: int
    epochs: float | None


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "init",
        "Write a recipe of nxd train that can run as it is, with a comment for each key. Questions are asked in a "
        "terminal only, and only about flags that are not given.",
        examples=[
            "nxd init",
            "nxd init chats.toml --model Qwen3-0.6B --data chats.jsonl --layout tp=2 --length '3 epochs'",
            "nxd init --model tiny --data books --layout 1 --length 100",
        ],
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=Path("recipe.toml"), metavar="FILE", help="(default: recipe.toml)"
    )
    parser.add_argument(
        "--model", help=f"folder of a Hugging Face model, or {' or '.join(MODELS)}: a Llama with random weights"
    )
    parser.add_argument("--data", help=f"file or folder to train on, or {STANDARD_LIBRARY}: {_OF_PYTHON}")
    parser.add_argument(
        "--layout", help="number of ranks, each with a copy of the model, or degrees such as tp=2,pp=2,dp=2"
    )
    parser.add_argument("--length", help="number of steps, or of epochs: '3 epochs'")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Ask, write the recipe, and print the next commands."""
    options = parse(_parser(), arguments)
    if options.file.suffix != ".toml":
        raise UserError(f"{options.file} must end in .toml")
    if options.file.exists():
        raise UserError(f"{options.file} exists; give another name, or remove it")
    ranks = str(max(1, num_accelerators()))
    model = _answer(options.model, f"Model: a Hugging Face folder, {' or '.join(MODELS)}", "tiny", model_keys)
    base = model.get("model.path")
    data = _answer(options.data, "Data: a file or a folder", STANDARD_LIBRARY, lambda text: data_keys(text, base))
    degrees, dp = _answer(
        options.layout,
        "Layout: number of ranks, or degrees such as tp=2,dp=2",
        ranks,
        lambda text: fitting_layout(text, {**model, **data}),
    )
    length = _answer(options.length, "Length: steps, or epochs such as '3 epochs'", "100", parse_length)

    given = {**_training_keys(length, dp), **model, **data, **_parallel_keys(degrees)}
    given["output"] = f"runs/{options.file.stem}"
    num_ranks = degrees.model_ranks * dp
    reports_user_errors(lambda: _check(given, dp))
    name = shlex.quote(str(options.file))
    train = f"nxd train {name}" + (f" --nproc {num_ranks}" if num_ranks > 1 else "")
    further: Keys = {"data.packing": True} if "data.chat" in given else {"data.path": "texts"}
    draft = render_draft(given, SUGGESTED | further)
    reports_user_errors(lambda: _write_new(options.file, f"# {train}\n{_HEAD}\n{draft}"))
    sizes = [f"{axis}={size}" for axis in SIZES if (size := getattr(degrees, axis)) > 1]
    print(
        f"wrote {options.file}",
        f"  model   {_model_name(model)}",
        f"  data    {data.get('data.path', _OF_PYTHON)}",
        f"  ranks   {num_ranks}" + (f" ({', '.join([*sizes, f'dp={dp}'])})" if sizes else ""),
        f"  length  {length.steps} steps" if length.epochs is None else f"  length  {length.epochs:g} epochs",
        f"next:\n  nxd data {name}  # shows what it trains on\n  {train}",
        *(_hint() if options.model is None and options.data is None and not _is_asked() else []),
        sep="\n",
    )
    return 0


def _hint() -> list[str]:
    """Name the flags if this folder holds a model and conversations that nobody was asked about."""
    model = next((it.parent for it in sorted(Path().glob("*/config.json"))), None)
    data = next(iter(sorted(Path().glob("*.jsonl"))), None)
    if model is None or data is None:
        return []
    command = shlex.join(["nxd", "init", f"{data.stem}.toml", "--model", str(model), "--data", str(data)])
    return [f"this folder holds {model} and {data}; for a recipe that trains the one on the other:\n  {command}"]


def _is_asked() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _model_name(model: Keys) -> str:
    named = [f"{name}, a Llama with random weights" for name, keys in MODELS.items() if keys == model]
    return named[0] if named else str(model["model.path"])


def _answer(flag: str | None, question: str, default: str, read: Callable[[str], T]) -> T:
    """Return the value of a flag, or of an answer in the terminal, which is asked for until it is valid."""
    if flag is not None or not _is_asked():
        return reports_user_errors(lambda: read(default if flag is None else flag))
    while True:
        try:
            return read(input(f"{question} [{default}]: ").strip() or default)
        except EOFError:
            raise UserError("no answer; give --model, --data, --layout and --length instead") from None
        except ValueError as error:
            print(error)


def model_keys(text: str) -> Keys:
    """Return the keys that choose a model.

    Raises:
        ValueError: there is no such model.
    """
    if text in MODELS and not Path(text).exists():
        return MODELS[text]
    _check_path("model.path", text)
    config = Path(text) / "config.json"
    if not config.is_file():
        raise ValueError(f"{text} has no config.json; give the folder of a model, or {' or '.join(MODELS)}")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not JSON: {error}") from error
    content = content if isinstance(content, dict) else {}
    text_config = content.get("text_config")  # of a multimodal model
    positions = (text_config if isinstance(text_config, dict) else content).get("max_position_embeddings")
    longest = positions if isinstance(positions, int) else 512
    return {"model.path": text, "data.sequence_length": min(512, longest), "optimizer.lr": 1e-5}


def _check_path(key: str, text: str) -> None:
    """Raise ValueError, without the name of the recipe's key, if there is no such file or folder."""
    try:
        check_paths(recipe_from_dict({}, [f"{key}={text}"]))
    except RecipeError as error:
        raise ValueError("; ".join(it.removeprefix(f"{key}=") for it in error.mistakes)) from error


def data_keys(text: str, model: str | None) -> Keys:
    """Return the keys that read a file or folder, as its first row tells.

    Args:
        text: the file or folder, or `STANDARD_LIBRARY`.
        model: the folder of the model, whose chat template conversations need.

    Raises:
        ValueError: it does not exist, or its rows have no column that nxd train could read.
    """
    if text == STANDARD_LIBRARY and not Path(text).exists():
        return {}
    _check_path("data.path", text)
    row = _first_row(Path(text))
    if row is None:
        return {"data.path": text}
    if row.keys() & {"messages", "conversations", "prompt", "chosen"}:
        if model is None:
            raise ValueError(f"{text} holds conversations, which need a model with a chat template; pass its folder")
        return {"data.path": text} | ({"dpo.beta": 0.1} if "chosen" in row else {"data.chat": True})
    columns = [name for name, value in row.items() if isinstance(value, str)]
    if not columns:
        raise ValueError(f"{text} has no column of text or conversations, but {', '.join(row)}")
    return {"data.path": text, "data.column": "text" if "text" in columns else columns[0]}


def _first_row(path: Path) -> Keys | None:
    """The first row of a file, or of the first file of a folder, that holds rows; None for plain text."""
    from nxd_data.sources import TABLE_SUFFIXES, find_tables  # noqa: PLC0415 - it loads numpy
    from nxd_data.tables import read_rows  # noqa: PLC0415

    tables = [path] if path.is_file() and path.suffix in TABLE_SUFFIXES else []
    if path.is_dir():
        inside = {it.suffix for it in islice(path.rglob("*"), 10_000)}
        tables = [file for _, file in find_tables(path)] if inside & set(TABLE_SUFFIXES) else []
    return next((dict(row) for file in tables for _, row in read_rows(file)), None)


def parse_layout(text: str) -> tuple[ParallelDegrees, int]:
    """Return the degrees of one replica, and the number of replicas, of "4" or "tp=2,dp=2".

    Raises:
        ValueError: the text has another form.
    """
    form = "write a number of ranks, or degrees of tp, pp, cp, ep and dp (copies of the model), such as tp=2,dp=2"
    parts = [part.strip() for part in (f"dp={text.strip()}" if text.strip().isdecimal() else text).split(",")]
    replicas = [part.removeprefix("dp=") for part in parts if part.startswith("dp=")]
    if not all(it.isdecimal() and int(it) > 0 for it in replicas):
        raise ValueError(f"{text!r} is not a layout; {form}")
    model = ",".join(part for part in parts if not part.startswith("dp="))
    try:
        degrees = ParallelDegrees.parse(model) if model else ParallelDegrees()
    except ValueError as error:
        raise ValueError(f"{text!r} is not a layout; {form}") from error
    return degrees, prod(map(int, replicas))


def fitting_layout(text: str, chosen: Keys) -> tuple[ParallelDegrees, int]:
    """Return what `parse_layout` does, once it fits the keys of the model and the data.

    Raises:
        ValueError: it does not; the message names the degrees that would work.
    """
    degrees, dp = parse_layout(text)
    try:
        _check({**_training_keys(Length(1, None), dp), **chosen, **_parallel_keys(degrees)}, dp)
    except RecipeError as error:
        raise ValueError(f"the layout {text} does not fit: {'; '.join(error.mistakes)}") from error
    size = _intermediate_size(Path(chosen["model.path"])) if "model.path" in chosen else 0
    if size % degrees.tp:
        near = listed(str(it) for it in divisors(size) if it <= 2 * degrees.tp)
        raise ValueError(
            f"the layout {text} does not fit: tp={degrees.tp} does not divide intermediate_size={size} of "
            f"{chosen['model.path']}; use {near}"
        )
    return degrees, dp


def _intermediate_size(folder: Path) -> int:
    """The size in a model's config that tensor-parallel ranks must divide; 0 if it is not known to be one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return 0  # the run reports it
    size = config.get("intermediate_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) and config.get("model_type") in _DENSE_MODELS else 0


def parse_length(text: str) -> Length:
    """Return the length of "100" or "3 epochs".

    Raises:
        ValueError: the text has another form.
    """
    number, _, unit = text.strip().partition(" ")
    if unit.strip() in ("epoch", "epochs"):
        try:
            return Length(0, float(number))
        except ValueError:
            pass
    elif unit.strip() in ("", "steps", "step") and number.isdecimal() and int(number):
        return Length(int(number), None)
    raise ValueError(f"{text!r} is not a length; write a number of steps, or epochs such as '3 epochs'")


def _training_keys(length: Length, dp: int) -> Keys:
    """The keys of the training loop: a batch that the replicas divide, and a warm-up that fits the length."""
    duration = {"train.steps": length.steps} if length.epochs is None else {"train.epochs": length.epochs}
    short = 0 < length.steps < 100
    return {
        **duration,
        "train.global_batch_size": -(-16 // dp) * dp,
        "train.log_every": 1 if short else 10,
        "train.eval_every": max(1, length.steps // 2) if short else 50,
        "optimizer.lr": 1e-3,
        "optimizer.warmup_steps": length.steps // 10 if short else 10,
        "checkpoint.save_every": 100,
        "data.held_out_fraction": DataSection.held_out_fraction,
    }


def _parallel_keys(degrees: ParallelDegrees) -> Keys:
    """The keys of the degrees: tensor and pipeline parallelism, to be edited, and others that are switched on."""
    sizes = {axis: getattr(degrees, axis) for axis in SIZES}
    return {f"parallel.{SIZES[axis]}": size for axis, size in sizes.items() if axis in ("tp", "pp") or size > 1}


def _check(given: Keys, dp: int) -> None:
    recipe = recipe_from_dict(given)
    check_paths(recipe)
    check_layout(recipe, dp)


def _write_new(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as stream:
        stream.write(text)
