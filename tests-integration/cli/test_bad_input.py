"""What a user can get wrong on the command line: one line that says what to change, and exit code 2."""

import re

import pytest
from nxd_cli import main

MISTAKES = {
    "heads": (
        ["--nproc", "3", "parallel.tensor_parallel_size=3"],
        "tensor_parallel_size=3 does not divide model.num_attention_heads=4",
    ),
    "ranks": (
        ["--nproc", "3", "parallel.tensor_parallel_size=2"],
        "parallel.tensor_parallel_size=2 needs a multiple of 2 ranks, not 3; use --nproc 2",
    ),
    "ranks of a pipeline": (
        ["--nproc", "6", "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"],
        "tensor_parallel_size=2 x parallel.pipeline_parallel_size=2 needs a multiple of 4 ranks, not 6; use --nproc 4",
    ),
    "layers": (
        ["--nproc", "4", "parallel.pipeline_parallel_size=4"],
        "parallel.pipeline_parallel_size=4 is more than model.num_hidden_layers=2 can fill",
    ),
    "schedule": (
        ["--nproc", "2", "parallel.pipeline_parallel_size=2", "pipeline.schedule=2f2b"],
        "pipeline.schedule='2f2b' is not allowed; expected one of gpipe, 1f1b,",
    ),
    "hidden size": (
        ["--nproc", "1", "model.hidden_size=34"],
        "model.num_attention_heads=4 does not divide model.hidden_size=34",
    ),
    "vocabulary": (
        ["--nproc", "2", "parallel.tensor_parallel_size=2", "model.vocab_size=301"],
        "tensor_parallel_size=2 does not divide model.vocab_size=301",
    ),
    "sequence": (
        [
            "--nproc",
            "2",
            "parallel.tensor_parallel_size=2",
            "parallel.sequence_parallel=true",
            "data.sequence_length=31",
        ],
        "tensor_parallel_size=2 does not divide data.sequence_length=31",
    ),
    "batch": (["--nproc", "3"], "train.global_batch_size=4 is not a multiple of 3"),
    "key": (["--train.step", "5"], "unknown key train.step; did you mean train.steps?"),
    "section": (["--trian.steps", "5"], "unknown section [trian]; did you mean [train]?"),
    "flag": (["--ouput", "there"], "unknown key ouput; did you mean output?"),
    "flag without value": (["--train.steps", "--nproc", "1"], "train.steps=''"),
    "ranks not started": (["parallel.tensor_parallel_size=2"], "needs a multiple of 2 ranks, not 1; use --nproc 2"),
    "value": (["train.steps=many"], "train.steps='many'"),
    "recipe file": (["nowhere.toml"], "nowhere.toml"),
    "no path": (["data.path=nowhere"], "data.path=nowhere does not exist"),
    "switch without value": (["--data.chat", "--nproc", "1"], "data.chat=true needs data.tokenizer"),
}

FOUND_BY_RANKS = {
    "no data": ("data.suffixes=.rst", "holds no files that end in .rst"),
    "rows as text": ("data.path=rows.jsonl", "data.path=rows.jsonl holds rows, which are not text; set data.column to"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_train_mistake_is_one_line_that_says_what_to_change(capsys, monkeypatch, tmp_path, tiny, arguments, expected):
    monkeypatch.chdir(tmp_path)
    files = [argument for argument in arguments if argument.endswith(".toml")]
    rest = [argument for argument in arguments if argument not in files]

    code = main(["train", *files, *tiny, *rest])

    errors = capsys.readouterr().err
    assert code == 2
    assert expected in errors
    assert errors.startswith("nxd train: ")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(("setting", "expected"), FOUND_BY_RANKS.values(), ids=FOUND_BY_RANKS.keys())
def test_train_mistake_that_only_ranks_can_find_is_said_once(nxd, tiny, tmp_path, setting, expected):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')

    result = nxd("train", "--nproc", "2", *tiny, setting)

    assert result.returncode == 2
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_train_of_a_hubs_model_says_how_to_get_it(capsys):
    assert main(["train", "model.path=Qwen/Qwen3-0.6B"]) == 2
    assert "(from a hub: `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`)" in capsys.readouterr().err


def test_train_takes_a_folder_for_no_recipe_and_names_the_one_in_it(capsys, tmp_path):
    (tmp_path / "recipe.toml").touch()

    assert main(["train", str(tmp_path)]) == 2
    assert f"is a folder; give {tmp_path / 'recipe.toml'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["train", "--hlep"], 2, "unrecognized arguments: --hlep; did you mean --help?"),
        (["train", "recipe.toml", "--nprocs", "2"], 2, "did you mean --nproc?"),
        (["generate", "run", "--promt", "x"], 2, "unrecognized arguments: --promt x; did you mean --prompt?"),
        (["serve", "run", "--zzz"], 2, "unrecognized arguments: --zzz; `nxd serve --help` lists the flags"),
        (["--version"], 0, "nxd-cli "),
    ],
)
def test_flags_that_the_parser_ends_at(capsys, arguments, code, said):
    with pytest.raises(SystemExit) as raised:
        main(arguments)

    output = capsys.readouterr()
    assert raised.value.code == code
    assert said in (output.err if code else output.out)


def test_generate_without_checkpoint_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    code = main(["generate", "nowhere"])

    assert code == 2
    assert re.fullmatch(
        r"nxd generate: nowhere does not exist; pass .* that of a Hugging Face model, .*\n", capsys.readouterr().err
    )


def test_train_of_a_model_with_more_key_value_heads_than_heads_is_refused_before_the_first_step(
    nxd, tiny, make_chat_model
):
    folder = make_chat_model("Qwen3", num_key_value_heads=8)  # transformers accepts it, and a step fails

    result = nxd("train", f"model.path={folder}", *(it for it in tiny if not it.startswith("model.")))

    assert result.returncode == 2
    assert "num_attention_heads=4 but num_key_value_heads=8; set model.config.num_key_value_heads" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_generate_at_a_degree_that_does_not_divide_names_it(nxd, tiny):
    assert nxd("train", *tiny, "train.steps=1", "train.eval_every=0").returncode == 0

    result = nxd("generate", "run", "--nproc", "3")  # the run's checkpoints

    assert result.returncode == 2
    assert "tensor_parallel_size=3 does not divide num_attention_heads=4" in result.stderr
    assert len(result.stderr.splitlines()) == 1
