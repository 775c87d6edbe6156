"""What `nxd train` leaves with `[lora]` is taken by every command, in each mode of saving, wherever it lies by then."""

import json
import re
import shutil

import pytest
import torch
from nxd_cli import main

CHAT_ML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GREEDY = ["--temperature", "0", "--max-new-tokens", "12", "--chat", "--prompt", "the cat sat"]


@pytest.fixture(scope="module")
def base(make_chat_model):
    """A base model that ends texts by <end>, whose template ends turns by another token."""
    return make_chat_model("Qwen3", CHAT_ML)


@pytest.fixture
def train(nxd):
    """`train(*settings)`: runs `nxd train`, and gives its exit code and what it wrote to standard error."""

    def run(*settings: str) -> tuple[int, str]:
        result = nxd("train", *settings)
        return result.returncode, result.stderr

    return run


@pytest.fixture(scope="module")
def run_of(base, nxd_in, tmp_path_factory):
    """`run_of(save)`: the settings and the folder of a finished run."""
    made = {}
    rows = tmp_path_factory.mktemp("rows") / "chats.jsonl"
    said = [{"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": "on the mat"}]
    rows.write_text(f"{json.dumps({'messages': said})}\n" * 8)

    def run(save: str):
        if save not in made:
            output = tmp_path_factory.mktemp(save)
            settings = [
                f"model.path={base}",
                f"data.path={rows}",
                "data.chat=true",
                "data.sequence_length=32",
                "data.held_out_fraction=0",
                "train.global_batch_size=4",
                "train.steps=12",
                "train.report_to=",
                "optimizer.lr=3e-2",
                "lora.rank=4",
                f"lora.save={save}",
                f"output={output}",
            ]
            result = nxd_in(output, "train", *settings)
            assert result.returncode == 0, result.stderr
            assert re.search(r" \d[\d,]+ parameters on this rank \(\d[\d,]+ of them trained\); ", result.stderr)
            made[save] = settings, output
        return made[save]

    return run


@pytest.fixture
def written(capsys, monkeypatch):
    """`written(*arguments)`: what `nxd generate` prints."""
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments) -> str:
        capsys.readouterr()
        assert main(["generate", *map(str, arguments), *GREEDY]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def exported(run, target, *options) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    assert main(["export", str(run / "checkpoints"), str(target), *map(str, options)]) == 0
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize(
    "save", ["adapter", pytest.param("both", marks=pytest.mark.slow), pytest.param("merged", marks=pytest.mark.slow)]
)
def test_lora_run_is_generated_from_and_exported_whatever_it_saves(run_of, written, base, tmp_path, save):
    transformers = pytest.importorskip("transformers")
    _, output = run_of(save)

    text = written(output / "checkpoints")
    exported(output, tmp_path / "exported")

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    said = [{"role": "user", "content": "the cat sat"}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert text == tokenizer.decode(tokens, skip_special_tokens=True) + "\n" == "on the mat\n"  # and ends there
    assert len(tokens) < 12
    assert text != written(base)


def test_adapter_is_exported_for_peft(run_of, written, base, tmp_path, capsys):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    _, output = run_of("adapter")
    folder = tmp_path / "adapter"

    assert main(["export", str(output), str(folder), "--adapter"]) == 0

    assert sorted(it.name for it in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    merged = exported(output, tmp_path / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    of_peft = peft.PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(of_peft[name], tensor, msg=name)
    assert written(base, "--adapter", folder).startswith("on the mat")  # the end token is in the run's tokenizer

    capsys.readouterr()
    assert main(["export", str(output), str(folder), "--adapter"]) == 2
    assert "already holds an adapter" in capsys.readouterr().err
    assert main(["export", str(output), str(folder), "--adapter", "--ema"]) == 2
    assert "leave out --like, --dtype and --ema" in capsys.readouterr().err


@pytest.mark.slow
def test_adapter_alone_is_merged_into_the_base_model_that_is_named(run_of, written, base, tmp_path):
    _, output = run_of("adapter")

    text = written(base, "--adapter", output / "checkpoints")

    assert text == written(output / "checkpoints") == "on the mat\n"
    found, expected = exported(output, tmp_path / "a", "--like", base), exported(output, tmp_path / "b")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_base_that_is_gone_or_another_is_refused_with_what_to_give(run_of, base, train, tmp_path, capsys):
    settings, _ = run_of("adapter")
    moving = tmp_path / "base"
    shutil.copytree(base, moving)
    settings = [*settings, f"model.path={moving}", f"output={tmp_path / 'run'}", "train.steps=1"]
    assert train(*settings)[0] == 0
    generate = ["generate", str(tmp_path / "run/checkpoints"), *GREEDY]

    weights = (moving / "model.safetensors").read_bytes()
    (moving / "model.safetensors").write_bytes(weights[:-8] + b"\0" * 8)
    assert main(generate) == 2
    assert (
        f"{moving} cannot be used: the weights in {moving} have changed since the run started"
        in capsys.readouterr().err
    )
    code, told = train(*settings, "train.steps=2")
    assert (code, "the initial weights are" in told) == (2, True)

    (moving / "model.safetensors").write_bytes(weights)
    moving.rename(tmp_path / "moved")
    assert main(generate) == 2
    assert "If it has moved, give it instead, and this folder as --adapter" in capsys.readouterr().err
    assert train(*settings, f"model.path={tmp_path / 'moved'}", "train.steps=2")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("adapter", "both"), ("both", "adapter"), ("adapter", "merged")])
def test_lora_run_resumes_with_another_mode_of_saving(run_of, train, written, tmp_path, first, then):
    settings, _ = run_of(first)
    output = f"output={tmp_path}"

    assert train(*settings, output, "train.stop_after=6")[0] == 0
    assert train(*settings, output, f"lora.save={then}")[0] == 0

    assert written(tmp_path / "checkpoints") == "on the mat\n"


@pytest.mark.slow
def test_adapter_alone_begins_another_run_on_its_base(run_of, train, written, tmp_path):
    settings, output = run_of("adapter")
    settings = [*settings, f"checkpoint.initial_weights={output / 'checkpoints'}", f"output={tmp_path}"]

    assert train(*settings, "optimizer.lr=1e-9", "train.steps=1")[0] == 0

    assert written(tmp_path / "checkpoints") == "on the mat\n"


@pytest.mark.slow
def test_adapter_on_random_weights_is_saved_with_them(tmp_path, train):
    settings = ["lora.rank=2", "data.sequence_length=16", "model.hidden_size=16", "model.num_hidden_layers=1"]
    settings += ["train.global_batch_size=2", "train.report_to=", "train.eval_every=0", f"output={tmp_path}"]
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 99)
    settings += [f"data.path={tmp_path / 'text.txt'}"]

    code, told = train(*settings, "train.steps=1")

    assert code == 0
    assert "checkpoints also hold the base model (lora.save=both)" in told
    assert main(["generate", str(tmp_path / "checkpoints"), "--max-new-tokens", "2"]) == 0
    assert train(*settings, "train.steps=2")[0] == 0


@pytest.mark.parametrize("save", ["adapter", "merged"])
def test_adapter_that_could_never_be_merged_is_refused_before_the_first_step(
    make_chat_model, run_of, train, tmp_path, save
):
    settings, _ = run_of("adapter")
    tied = make_chat_model("Qwen3", tie_word_embeddings=True)
    settings = [*settings, f"model.path={tied}", f"output={tmp_path}", f"lora.save={save}"]

    code, told = train(*settings, "lora.target_modules=q_proj,lm_head")

    assert code == 2
    assert "weight is tied to another weight" in told
    assert not (tmp_path / "checkpoints").exists()
