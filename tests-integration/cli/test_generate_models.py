"""`nxd generate` takes Hugging Face folders, checkpoints and adapters, and tells them apart by their files."""

import io
import json
import re
import shutil

import pytest
import torch
from nxd_cli import main

GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]
TURN = {"role": "user", "content": "the cat sat"}


@pytest.fixture(scope="module")
def folder(make_chat_model):
    return make_chat_model("Qwen3")


@pytest.fixture
def written(capsys, monkeypatch):
    """`written("generate", ...)`: what the command prints."""
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments) -> str:
        assert main(["generate", *map(str, arguments)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def of_transformers(model, tokenizer, ids) -> str:
    tokens = model.eval().generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def loaded(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_hugging_face_folder_is_continued_as_transformers_does(folder, written):
    model, tokenizer = loaded(folder)

    text = written(folder, "--prompt", "the cat", *GREEDY)

    assert text == f"the cat{of_transformers(model, tokenizer, tokenizer('the cat')['input_ids'])}\n"
    assert len(text) > 16


def test_chat_answers_by_the_models_template(folder, written):
    model, tokenizer = loaded(folder)
    messages = [{"role": "system", "content": "a dog"}, TURN]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    answer = written(folder, "--chat", "--system", "a dog", "--prompt", TURN["content"], *GREEDY)

    assert answer == of_transformers(model, tokenizer, ids) + "\n"


@pytest.mark.slow
def test_chat_without_a_prompt_answers_each_line_with_what_was_said_before(folder, written, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat sat\n\nthe dog\n"))
    answers = written(folder, "--chat", *GREEDY, "--max-new-tokens", "5")

    first = written(folder, "--chat", "--prompt", "the cat sat", *GREEDY, "--max-new-tokens", "5")
    model, tokenizer = loaded(folder)
    said = [TURN, {"role": "assistant", "content": first[:-1]}, {"role": "user", "content": "the dog"}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, len(ids) :]
    assert answers == first + tokenizer.decode(tokens, skip_special_tokens=True) + "\n"


def test_text_without_a_length_ends_with_the_models_positions(make_chat_model, written, capsys):
    short = make_chat_model("Qwen3", max_position_embeddings=24)

    assert len(written(short, "--prompt", "the cat")) > len("the cat")
    assert main(["generate", str(short), "--prompt", "the cat", "--max-new-tokens", "30"]) == 2
    told = capsys.readouterr().err
    room = int(re.search(r"more than the model's 24 positions .*\(--max-new-tokens (\d+)\)", told)[1])
    assert written(short, "--prompt", "the cat", "--max-new-tokens", room) == written(short, "--prompt", "the cat")


def test_missing_prompt_is_said(folder, written, capsys):
    assert main(["generate", str(folder), *GREEDY]) == 0

    shown = capsys.readouterr()
    assert shown.out.startswith("def ")
    assert "nxd generate: no --prompt is given; continuing 'def '" in shown.err


@pytest.mark.slow
def test_stop_text_ends_the_answer_before_it(folder, written):
    whole = written(folder, "--prompt", "the cat", *GREEDY)
    stop = whole[10:12]

    assert written(folder, "--prompt", "the cat", *GREEDY, "--stop", stop) == whole[: whole.index(stop)] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("option", [["--top-p", "1e-9"], ["--min-p", "1"], ["--top-k", "1"]])
def test_draws_cut_to_the_likeliest_token_are_greedy(folder, written, option):
    greedy = written(folder, "--prompt", "the cat", *GREEDY)

    assert written(folder, "--prompt", "the cat", *GREEDY, "--temperature", "1", *option) == greedy


@pytest.mark.slow
def test_penalties_are_those_of_transformers(folder, written):
    model, tokenizer = loaded(folder)
    ids = tokenizer("the cat")["input_ids"]
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, repetition_penalty=1.5)

    text = written(folder, "--prompt", "the cat", *GREEDY, "--repetition-penalty", "1.5")

    assert text == tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n"
    assert text != written(folder, "--prompt", "the cat", *GREEDY)


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """Of PEFT, which makes the model write another text."""
    peft = pytest.importorskip("peft")
    model, _ = loaded(folder)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    target = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(model, config).save_pretrained(target)
    return target


def test_adapter_folder_is_merged_as_peft_does(folder, adapter, written):
    import peft

    model, tokenizer = loaded(folder)
    expected = of_transformers(
        peft.PeftModel.from_pretrained(model, adapter).merge_and_unload(), tokenizer, tokenizer("the cat")["input_ids"]
    )

    text = written(folder, "--adapter", adapter, "--prompt", "the cat", *GREEDY)

    assert text == f"the cat{expected}\n"
    assert text != written(folder, "--prompt", "the cat", *GREEDY)


@pytest.mark.slow
def test_adapter_beside_a_checkpoint_writes_what_it_does_beside_the_folder(folder, adapter, written, tmp_path):
    assert main(["import", str(folder), str(tmp_path / "checkpoints")]) == 0
    written(folder, "--prompt", "x", "--max-new-tokens", "1")  # takes what the import has printed

    found = written(tmp_path / "checkpoints", "--adapter", adapter, "--prompt", "the cat", *GREEDY)

    assert found == written(folder, "--adapter", adapter, "--prompt", "the cat", *GREEDY)


@pytest.mark.slow
def test_adapter_in_a_checkpoint_of_its_own_is_merged(folder, written, tmp_path):
    from nxd_engine import save_checkpoint
    from nxd_lora import LoraConfig, LoraModel

    model, tokenizer = loaded(folder)
    adapted = LoraModel(model, LoraConfig(lora_rank=4, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(2)
    for parameter in adapted.factors().values():
        torch.nn.init.normal_(parameter)
    save_checkpoint(tmp_path, "adapter", adapted)
    adapted.merge()
    expected = of_transformers(model, tokenizer, tokenizer("the cat")["input_ids"])

    assert written(folder, "--adapter", tmp_path, "--prompt", "the cat", *GREEDY) == f"the cat{expected}\n"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{adapter}"], r"{adapter} is an adapter; give its base model \(.*\), and --adapter {adapter}"),
        (["{folder}", "--tag", "last"], r"--tag last names a checkpoint, but {folder} is a Hugging Face folder; .*"),
        (["{folder}", "--adapter", "{folder}"], r"--adapter {folder} holds neither adapter_config.json nor .*"),
        (["{empty}"], r"there is no complete checkpoint in {empty}; pass .*"),
        (
            ["{other}", "--adapter", "{adapter}"],
            r"the adapter does not fit the model: .* pass an adapter of this model",
        ),
        (
            ["{plain}", "--chat", "--prompt", "x"],
            r"--chat needs a chat template, which the model's tokenizer does not have; .*",
        ),
        (["{folder}", "--min-p", "2"], r"min_p=2\.0 must be from 0 to 1"),
        (["{folder}", "--system", "x"], r"--system is for conversations; add --chat"),
        (["{folder}", "--stop", ""], r"--stop is empty; give the text to stop before"),
        (["{damaged}"], r"{damaged}/config.json is not JSON: .*"),
        (["{bin}"], r"{bin} holds neither model.safetensors.index.json nor model.safetensors"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    folder, adapter, make_chat_model, tmp_path, capsys, arguments, message
):
    places = {name: tmp_path / name for name in ("empty", "damaged", "bin", "plain")}
    for place in places.values():
        place.mkdir()
    (places["damaged"] / "config.json").write_text("{")
    shutil.copy(folder / "config.json", places["bin"])
    shutil.copytree(folder, places["plain"], dirs_exist_ok=True, ignore=shutil.ignore_patterns("chat_template*"))
    places |= {"folder": folder, "adapter": adapter}
    if "{other}" in arguments:
        places["other"] = make_chat_model("Qwen3", hidden_size=64)
    capsys.readouterr()

    code = main(["generate", *(it.format(**places) for it in arguments)])

    found = capsys.readouterr().err
    expected = re.sub(r"\{(\w+)\}", lambda name: re.escape(str(places[name[1]])), message)
    assert code == 2
    assert re.fullmatch(rf"nxd generate: {expected}\n", found), found


def test_folder_whose_tensors_are_not_those_of_its_config_is_refused(folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))

    assert main(["generate", str(broken)]) == 2
    assert "does not match its config: it lacks ['model.layers.2" in capsys.readouterr().err


@pytest.mark.slow
def test_tensor_parallel_size_writes_the_same_text_compiled_and_not(folder, nxd):
    plain = nxd("generate", str(folder), "--chat", "--prompt", "the cat", *GREEDY)
    parallel = nxd("generate", str(folder), "--chat", "--prompt", "the cat", *GREEDY, "--tensor-parallel-size", "2")
    compiled = nxd(
        "generate", str(folder), "--chat", "--prompt", "the cat", *GREEDY, "--compiled", "--compiler", "export"
    )

    assert plain.returncode == 0, plain.stderr
    assert parallel.stdout.endswith(plain.stdout)
    assert compiled.stdout == plain.stdout


@pytest.mark.slow
def test_draft_model_writes_the_text_that_is_written_without_it(folder, make_chat_model, nxd):
    draft = make_chat_model("Llama", num_hidden_layers=1)
    plain = nxd("generate", str(folder), "--prompt", "the cat", *GREEDY)

    options = ["--compiler", "export", "--draft", str(draft)]
    guessed = nxd("generate", str(folder), "--prompt", "the cat", *GREEDY, *options)
    sampling = ["--temperature", "1", "--max-new-tokens", "12"]
    drawn = nxd("generate", str(folder), "--prompt", "the cat", *sampling, *options)

    assert guessed.stdout == plain.stdout, guessed.stderr
    assert "nxd generate: --draft only helps with --temperature 0; sampling does not use it\n" in drawn.stderr
    assert drawn.returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "tokenizer",
            r"the draft model \(Qwen3ForCausalLM\) has a different tokenizer: '!' is token 6 there, but 5 in the .*",
        ),
        ("vocabulary", r"the draft model \(Qwen3ForCausalLM\) has vocab_size=320, the model \d+; use a draft .*"),
        ("guesses", r"num_speculative_tokens=0 must be 1 or more with a draft model"),
        ("nothing", r"{draft} does not exist; pass .*"),
    ],
)
def test_draft_model_that_does_not_fit_is_refused_in_one_line(
    folder, make_chat_model, tmp_path, capsys, change, message
):
    draft = make_chat_model("Qwen3", vocab_size=320) if change == "vocabulary" else tmp_path / "draft"
    if change in ("tokenizer", "guesses"):
        shutil.copytree(folder, draft)
    if change == "tokenizer":
        content = json.loads((draft / "tokenizer.json").read_text())
        first, second = list(content["model"]["vocab"])[5:7]
        vocabulary = content["model"]["vocab"]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (draft / "tokenizer.json").write_text(json.dumps(content))
    options = ["--num-speculative-tokens", "0"] if change == "guesses" else []
    capsys.readouterr()

    code = main(["generate", str(folder), "--draft", str(draft), *GREEDY, *options])

    found = capsys.readouterr().err
    assert code == 2
    assert re.fullmatch(rf"nxd generate: {message.format(draft=re.escape(str(draft)))}\n", found), found
