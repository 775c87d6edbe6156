"""`nxd data`: samples with what is learned of them, lengths, what packing saves, and warnings."""

import io
import json

import numpy as np
import pytest
from nxd_cli import main
from nxd_data import ByteTokenizer, TokenRows, build_corpus, load_tokenizer, open_corpus
from nxd_data.sequences import SampleImage
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report.data_preview import document_lengths, show_samples, special_tokens_line
from nxd_trainer.training.run_data import open_data, prepare_data
from rich.console import Console

MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<end>' }}{% endif %}{% endfor %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
IMAGE, WORD, ANSWER = 7, 1, 2


@pytest.fixture
def save_tokenizer(tmp_path):
    """`save_tokenizer(chat_template, beginning)`: the folder of a small tokenizer; texts begin with `beginning`."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

    def save(chat_template=None, beginning=None):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<end>", "<|user|>", "<|assistant|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(["the cat sat on the mat", "the dog sat on the cat"], trainer)
        if beginning is not None:
            marks = [(beginning, tokenizer.token_to_id(beginning))]
            template = tokenizers.processors.TemplateProcessing(single=f"{beginning} $A", special_tokens=marks)
            tokenizer.post_processor = template
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
        fast.chat_template = chat_template
        fast.save_pretrained(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    return save


@pytest.fixture
def shown(capsys, tmp_path):
    """`shown(*settings)`: what the command prints."""

    def run(*settings):
        assert main(["data", *settings, f"output={tmp_path / 'run'}", "model.hidden_size=16"]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def chat(save_tokenizer, tmp_path):
    """`chat(answers, template)`: settings of conversations with these answers."""

    def write(answers, template=MARKED):
        rows = [
            {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": answer}]}
            for answer in answers
        ]
        (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
        folder = save_tokenizer(template)
        return [f"data.path={tmp_path / 'chat.jsonl'}", "data.chat=true", f"data.tokenizer={folder}"]

    return write


def test_samples_show_what_is_learned_of_them_and_where_documents_end(shown, chat):
    settings = [*chat(["yes", "no"]), "data.sequence_length=24", "data.held_out_fraction=0", "data.packing=true"]

    output = shown(*settings)

    assert "sample 1: 17 tokens, 7 learned, 7 padding\n" in output
    assert (
        "<|user|>ask<end><|assistant|>⟦yes<end>⟧\n--- document 2 ---\n<|user|>ask<end><|assistant|>⟦no<end>⟧" in output
    )
    assert "packing: 1 sequences instead of 2, 29.2% padding instead of 64.6% (data.packing=true)" in output
    assert "warning" not in output


def test_first_held_out_sample_is_shown(shown, chat):
    output = shown(*chat(["one", "two", "three", "four"]), "data.sequence_length=24", "data.held_out_fraction=0.5")

    assert "held-out sample 1 of 2: " in output
    assert "held-out sample" not in shown(*chat(["one"]), "data.sequence_length=24", "data.held_out_fraction=0")


def test_learned_tokens_have_another_colour_on_a_terminal(chat, tmp_path):
    settings = [*chat(["yes"]), "data.sequence_length=24", "data.held_out_fraction=0", f"output={tmp_path / 'run'}"]
    recipe = load_recipe(None, settings)
    data = open_data(recipe, prepare_data(recipe))
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", soft_wrap=True)

    show_samples(console, data.train, load_tokenizer(recipe.data.tokenizer), seed=0)

    output = console.file.getvalue()
    assert "\x1b[1;32myes\x1b[0m" in output
    assert "\x1b[2m<|user|>ask\x1b[0m" in output
    assert "⟦" not in output


def test_what_is_hardly_meant_so_is_warned_of(shown, chat):
    settings = [*chat(["yes", "no <end> here", "long " * 20], UNMARKED), "data.sequence_length=16"]

    warnings = [line for line in shown(*settings).splitlines() if line.startswith("warning: ")]

    assert [line.split(": ", 1)[1][:40] for line in warnings] == [
        "1 conversations spell a special token in",
        "1 conversations are longer than data.seq",
    ]
    assert "such as '<end>', which becomes that token" in warnings[0]


def test_conversation_without_an_answer_is_warned_of(shown, chat):
    settings = chat(["yes", "no"])
    path = settings[0].partition("=")[2]
    with open(path, "a") as stream:
        stream.write("\n" + json.dumps({"messages": [{"role": "user", "content": "x"}]}))

    output = shown(*settings, "data.sequence_length=16")

    assert "warning: left out: 1 conversations without a token that the loss counts" in output


def test_lengths_are_a_histogram_over_powers_of_two(shown, tmp_path):
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": "x" * n}) for n in (1, 2, 2, 40)))

    output = shown(f"data.path={tmp_path / 'texts.jsonl'}", "data.column=text", "data.sequence_length=8")

    assert "4 documents, tokens of each: mean 12.2, longest 41, longer than data.sequence_length=8: 1\n" in output
    lines = [line.split() for line in output.splitlines() if "█" in line]
    assert [(line[0], line[-1], len(line[1])) for line in lines] == [("2-3", "3", 40), ("32-63", "1", 13)]
    assert "300 steps of 16 sequences of 8 tokens: 960.00 epochs of 5 sequences; 1 to evaluate on\n" in output


def test_lengths_of_documents_without_a_mark_at_the_end(tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 256, 3, 4]))

    corpus = open_corpus(build_corpus(tmp_path / "tokens.npy", ByteTokenizer(), cache_folder=tmp_path / "cache"))

    assert document_lengths(corpus).tolist() == [3, 2]


@pytest.mark.parametrize(("text", "times"), [("plain", None), ("a <|user|> b <|user|>", 2), ("one<end>two", 1)])
def test_text_that_spells_a_special_token_is_told(save_tokenizer, tmp_path, text, times):
    tokenizer = load_tokenizer(save_tokenizer())
    (tmp_path / "a.txt").write_text(text)
    corpus = open_corpus(build_corpus(tmp_path / "a.txt", tokenizer, cache_folder=tmp_path / "cache"))

    line = special_tokens_line(corpus, tokenizer)

    assert (
        line is None if times is None else line.startswith(f"{times:,} times text spells a special token, such as '<")
    )


def test_mark_that_begins_each_document_is_not_told(save_tokenizer, tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(beginning="<|user|>"))
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "b.txt").write_text("<|user|>the cat")

    corpus = open_corpus(build_corpus(tmp_path, tokenizer, cache_folder=tmp_path / "cache", suffixes=[".txt"]))

    assert corpus.index.num_documents == 2
    assert corpus.tokens[0] == tokenizer.prefix[0]
    assert special_tokens_line(corpus, tokenizer) is None


class Pictured(TokenRows):
    """One sample of documents, each an image of three tokens, a word and an answer, which is learned."""

    def rows(self, samples):
        inputs, labels, _ = super().rows(samples)
        return inputs, np.where(labels == ANSWER, labels, -100), np.arange(inputs.size)[None] % 5

    def images(self, samples):
        starts = range(0, self.sequence_length, 5)
        return [[SampleImage(at, at + 3, f"image {at // 5 + 1}.png 4x6", None) for at in starts]]


@pytest.mark.parametrize("num_documents", [1, 2])
def test_images_are_shown_in_the_places_of_their_tokens(num_documents):
    sequences = Pictured(np.array([[IMAGE, IMAGE, IMAGE, WORD, ANSWER] * num_documents + [IMAGE]]))
    console = Console(file=io.StringIO(), width=200)

    show_samples(console, sequences, ByteTokenizer(), seed=0)

    shown = console.file.getvalue()
    documents = [f"[image {number}.png 4x6: 3 tokens]\\x01⟦\\x02⟧" for number in range(1, num_documents + 1)]
    assert "\n--- document 2 ---\n".join(documents) in shown
    assert "more tokens" not in shown


def test_text_does_not_steer_the_terminal_and_is_no_markup(shown, tmp_path):
    (tmp_path / "a.txt").write_text("\x1b]0;title\x07[bold]:smile: " * 20)

    output = shown(f"data.path={tmp_path / 'a.txt'}", "data.sequence_length=120")

    assert "\x1b" not in output
    assert "\\x1b]0;title\\x07[bold]:smile: " in output


def test_picture_is_written_on_request(shown, tmp_path):
    (tmp_path / "a.txt").write_text("plain text " * 30)

    shown(f"data.path={tmp_path / 'a.txt'}", "data.sequence_length=8", "--svg", str(tmp_path / "shown.svg"))

    assert (tmp_path / "shown.svg").read_text().startswith("<svg")


def test_data_that_cannot_be_read_are_one_line(capsys, tmp_path):
    assert main(["data", f"data.path={tmp_path / 'absent'}"]) == 2
    assert capsys.readouterr().err == (
        f"nxd data: recipe: data.path={tmp_path / 'absent'} does not exist; give a file or folder that does\n"
    )
