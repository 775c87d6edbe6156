"""`nxd init`: the recipe that it writes is complete, says what its keys mean, and trains as it is."""

import io
import json
import sys

import pytest
from nxd_cli import main
from nxd_trainer.cli.init import SUGGESTED
from nxd_trainer.recipe import load_recipe, recipe_keys


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(file, **row) -> None:
    file.write_text(json.dumps(row) + "\n")


@pytest.fixture
def chat_model(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    (folder / "model" / "tokenizer.json").touch()
    return folder / "model"


def test_init_without_terminal_writes_a_recipe_and_the_next_command(folder, capsys):
    assert main(["init"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "wrote recipe.toml",
        "  model   tiny, a Llama with random weights",
        "  data    the sources of Python's standard library",
        "  ranks   1",
        "  length  100 steps",
        "next:",
        "  nxd data recipe.toml  # shows what it trains on",
        "  nxd train recipe.toml",
    ]
    recipe = load_recipe(folder / "recipe.toml")
    assert (recipe.model.hidden_size, recipe.train.steps, recipe.data.path) == (64, 100, None)
    assert '[data]\n# path = "texts"  # file or folder; unset: ' in (folder / "recipe.toml").read_text()


def test_model_and_rows_that_nobody_was_asked_about_are_hinted_at(folder, chat_model, capsys):
    write_rows(folder / "my chats.jsonl", messages=[])

    assert main(["init"]) == 0
    assert main(["init", "other.toml", "--model", "tiny"]) == 0

    told = capsys.readouterr().out
    assert told.count("this folder holds model and my chats.jsonl; ") == 1
    assert "\n  nxd init 'my chats.toml' --model model --data 'my chats.jsonl'\n" in told


def test_recipe_of_init_trains(folder, capfd):
    (folder / "text.txt").write_text("to be or not to be\n" * 200)

    assert main(["init", "--model", "tiny", "--data", "text.txt", "--length", "2"]) == 0
    assert main(["train", "recipe.toml"]) == 0

    assert (folder / "runs" / "recipe" / "checkpoints" / "step-00000002").is_dir()


def test_every_line_of_a_recipe_says_what_its_key_means_and_can_be_set(folder):
    (folder / "held_out").mkdir()
    main(["init", "--length", "3 epochs"])
    text = (folder / "recipe.toml").read_text()

    for name, value in SUGGESTED.items():
        key = recipe_keys()[name]
        assert any(line.startswith(f"# {key.field} = ") and key.description in line for line in text.splitlines())
        load_recipe(folder / "recipe.toml", [f"{name}={str(value).lower()}"])
    assert load_recipe(folder / "recipe.toml").train.epochs == 3


def test_layout_gives_degrees_ranks_and_a_batch_that_the_replicas_divide(folder, capsys):
    main(["init", "--layout", "tp=2,pp=2,dp=3"])

    recipe = load_recipe(folder / "recipe.toml")
    told = capsys.readouterr().out
    assert "\n  ranks   12 (tp=2, pp=2, dp=3)\n" in told
    assert "nxd train recipe.toml --nproc 12" in told
    assert (recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size) == (2, 2)
    assert recipe.train.global_batch_size == 18


def test_rows_are_read_by_their_columns(folder, chat_model):
    write_rows(folder / "chats.jsonl", messages=[])
    write_rows(folder / "pairs.jsonl", chosen=[], rejected=[])
    write_rows(folder / "texts.jsonl", id=1, text="a")

    for name in ("chats", "pairs", "texts"):
        assert main(["init", f"{name}.toml", "--model", "model", "--data", f"{name}.jsonl"]) == 0

    chats, pairs, texts = (load_recipe(folder / f"{name}.toml") for name in ("chats", "pairs", "texts"))
    assert (chats.data.chat, chats.data.sequence_length, chats.dpo.beta) == (True, 64, 0)
    assert pairs.dpo.beta > 0
    assert (texts.data.chat, texts.data.column) == (False, "text")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "Qwen/Qwen3-0.6B"], "nxd init: Qwen/Qwen3-0.6B does not exist; give the folder of a model"),
        (["--model", "."], ". has no config.json; give the folder of a model, or tiny or small"),
        (["--data", "nowhere"], "nxd init: nowhere does not exist; give a file or folder that does"),
        (["--data", "chats.jsonl"], "chats.jsonl holds conversations, which need a model with a chat template"),
        (["--data", "numbers.jsonl"], "numbers.jsonl has no column of text or conversations, but a"),
        (["--layout", "tp:2"], "'tp:2' is not a layout; write a number of ranks, or degrees of tp, pp, cp, ep and dp"),
        (["--layout", "dp=0"], "'dp=0' is not a layout; write a number of ranks"),
        (["--layout", "tp=3"], "the layout tp=3 does not fit: parallel.tensor_parallel_size=3 does not divide"),
        (["--length", "long"], "'long' is not a length; write a number of steps, or epochs"),
        (["--length", "0"], "'0' is not a length"),
        (["--length", "-1 epochs"], "train.epochs=-1.0 is not allowed"),
        (["there.toml"], "there.toml exists; give another name, or remove it"),
        (["recipe.yaml"], "recipe.yaml must end in .toml"),
    ],
)
def test_mistake_is_one_line_and_nothing_is_written(folder, capsys, arguments, expected):
    (folder / "there.toml").touch()
    write_rows(folder / "chats.jsonl", messages=[])
    write_rows(folder / "numbers.jsonl", a=1)

    assert main(["init", *arguments]) == 2

    told = capsys.readouterr().err
    assert expected in told
    assert len(told.splitlines()) == 1
    assert not (folder / "recipe.toml").exists()


def test_degree_that_does_not_divide_a_size_of_the_folder_is_refused(folder, capsys):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "intermediate_size": 128}')

    assert main(["init", "--model", "model", "--layout", "tp=3"]) == 2
    told = capsys.readouterr().err
    assert "the layout tp=3 does not fit: tp=3 does not divide intermediate_size=128 of model; use 1, 2 or 4" in told
    assert main(["init", "--model", "model", "--layout", "tp=4"]) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_is_asked_until_an_answer_is_valid(folder, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal("huge\ntiny\n\ntp=3\n2\n\n"))
    monkeypatch.setattr(sys, "stdout", shown)

    assert main(["init"]) == 0

    assert "[tiny]: huge does not exist; give the folder of a model" in shown.getvalue()
    assert "the layout tp=3 does not fit: parallel.tensor_parallel_size=3 does not divide" in shown.getvalue()
    assert "use 1, 2 or 4, or change those sizes" in shown.getvalue()
    assert "nxd train recipe.toml --nproc 2" in shown.getvalue()


def test_terminal_that_ends_before_the_answers_is_a_mistake(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    monkeypatch.setattr(sys, "stdout", Terminal())

    assert main(["init"]) == 2
    assert "no answer; give --model, --data, --layout and --length instead" in capsys.readouterr().err
