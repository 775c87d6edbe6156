import json
import sys

import pytest
from nxd_data import ByteTokenizer, HuggingFaceTokenizer, build_corpus, load_tokenizer, open_corpus
from nxd_data.tokenizer import encode_prompt


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<stop>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "the dog sat on the cat"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<stop> $A </s>", special_tokens=[("<stop>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", ["", "def f():\n\treturn 1\r\n", "naïve 日本 🙂\x00"])
def test_byte_tokenizer_round_trip(text):
    tokenizer = load_tokenizer(None)

    tokens = tokenizer.encode(text)

    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens.tolist()) == text


def test_byte_tokenizer_end_of_document_is_the_last_id_and_decodes_to_nothing():
    tokenizer = ByteTokenizer()

    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.decode([104, 256, 105, 300]) == "hi"


def test_byte_tokenizer_decodes_cut_characters_to_the_replacement_mark():
    assert ByteTokenizer().decode([104, 0xE6, 0x97]) == "h\ufffd"


def test_hugging_face_round_trip_without_special_tokens(tokenizer_folder):
    tokenizer = HuggingFaceTokenizer(tokenizer_folder)

    tokens = tokenizer.encode("the cat sat")

    assert tokenizer.decode(tokens.tolist()) == "the cat sat"
    assert len(tokens) < len("the cat sat")
    assert tokens.max() < tokenizer.vocab_size
    assert tokens.min() > 2


def test_text_begins_as_the_tokenizer_begins_it_in_prompts_and_documents(tokenizer_folder, tmp_path):
    tokenizer = HuggingFaceTokenizer(tokenizer_folder)
    ids = tokenizer.encode("the cat").tolist()
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "b.txt").write_text("<stop>the cat")

    corpus = open_corpus(build_corpus(tmp_path, tokenizer, cache_folder=tmp_path / "cache"))

    assert tokenizer.prefix == (1,)
    assert encode_prompt(tokenizer, "the cat") == [1, *ids]
    assert encode_prompt(tokenizer, "<stop>the cat") == [1, *ids]  # a chat template's text has it already
    assert corpus.tokens.tolist() == [1, *ids, 2] * 2


def test_tokenizer_of_older_files_begins_texts_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "h": 1, "i": 2, "hi": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    found = encode_prompt(HuggingFaceTokenizer(tmp_path), "hi")

    assert found == transformers.AutoTokenizer.from_pretrained(tmp_path)("hi")["input_ids"] == [0, 3]


def test_bytes_of_tokens_are_those_of_the_text_also_within_characters(tokenizer_folder):
    text = "the cat 日本 🙂"
    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(tokenizer_folder)):
        pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text).tolist()]

        assert b"".join(pieces) == text.encode()
        assert len(pieces) > len(text) - 8


def test_bytes_of_tokens_of_a_vocabulary_that_falls_back_to_bytes(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"</s>": 0, "▁ein": 1, "s": 2, "<0xE6>": 3}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True)).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = HuggingFaceTokenizer(tmp_path)

    assert [tokenizer.token_bytes(token) for token in (1, 2, 3)] == [b" ein", b"s", b"\xe6"]


def test_hugging_face_file_and_folder_are_the_same(tokenizer_folder):
    from_file = HuggingFaceTokenizer(tokenizer_folder / "tokenizer.json")
    from_folder = HuggingFaceTokenizer(tokenizer_folder)

    assert from_file.fingerprint == from_folder.fingerprint
    assert from_file.vocab_size == from_folder.vocab_size


def test_hugging_face_fingerprint_is_another_for_another_vocabulary(tokenizer_folder):
    before = HuggingFaceTokenizer(tokenizer_folder).fingerprint
    file = tokenizer_folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<unk>", "<any>"))

    assert HuggingFaceTokenizer(tokenizer_folder).fingerprint != before


def test_hugging_face_end_of_document_is_a_well_known_one_without_a_declared_one(tokenizer_folder):
    assert HuggingFaceTokenizer(tokenizer_folder).end_of_document == 2


@pytest.mark.parametrize("declared", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_hugging_face_end_of_document_is_the_declared_one(tokenizer_folder, declared):
    before = HuggingFaceTokenizer(tokenizer_folder).fingerprint
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))

    tokenizer = HuggingFaceTokenizer(tokenizer_folder)

    assert tokenizer.end_of_document == 1
    assert tokenizer.fingerprint != before


def test_hugging_face_without_end_of_document_says_where_to_name_one(tokenizer_folder):
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<absent>"}))

    with pytest.raises(ValueError, match=r"none of '<absent>' .*eos_token. in tokenizer_config\.json"):
        HuggingFaceTokenizer(tokenizer_folder)


def test_hugging_face_ids_of_a_padded_vocabulary_decode_to_nothing(tokenizer_folder):
    tokenizer = HuggingFaceTokenizer(tokenizer_folder)

    assert tokenizer.decode([*tokenizer.encode("the").tolist(), tokenizer.vocab_size + 5]) == "the"


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{}", ""), ("version https://git-lfs.github.com/spec/v1\noid", "it is a Git LFS pointer")],
)
def test_damaged_tokenizer_file_is_named(tmp_path, content, reason):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(ValueError, match=rf"tokenizer\.json is not a Hugging Face tokenizer: {reason}"):
        HuggingFaceTokenizer(tmp_path)


def test_folder_of_older_files_is_read_with_transformers(tmp_path):
    pytest.importorskip("transformers")
    vocabulary = {"<|endoftext|>": 0, "h": 1, "i": 2, "hi": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))

    tokenizer = HuggingFaceTokenizer(tmp_path)

    assert tokenizer.encode("hi").tolist() == [3]
    assert tokenizer.decode([3, 0]) == "hi"
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (0, 4)


def test_folder_without_a_tokenizer_is_named(tmp_path):
    pytest.importorskip("transformers")

    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer"):
        HuggingFaceTokenizer(tmp_path)


def test_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*absent does not exist"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(("name", "package"), [("tokenizer.json", "tokenizers"), ("vocab.json", "transformers")])
def test_missing_package_says_what_to_install(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ValueError, match=f"pip install {package}, or leave data.tokenizer unset"):
        load_tokenizer(tmp_path)


def test_text_with_half_a_character_is_an_error_of_the_tokenizer(tokenizer_folder):
    with pytest.raises(ValueError, match="the tokenizer cannot encode a text"):
        HuggingFaceTokenizer(tokenizer_folder).encode("\udcff")


def test_regular_expression_that_takes_too_long_is_an_error_of_its_tokenizer(tokenizer_folder):
    file = tokenizer_folder / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": split}))

    with pytest.raises(ValueError, match=r"the tokenizer cannot encode a text: .*retry-limit"):
        HuggingFaceTokenizer(file).encode("a" * 28)


def test_truncation_and_padding_of_a_tokenizer_that_was_saved_after_use_are_switched_off(tokenizer_folder):
    text = "the cat sat on the mat" * 5
    whole = load_tokenizer(tokenizer_folder).encode(text).tolist()
    tokenizers = pytest.importorskip("tokenizers")
    used = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    used.enable_truncation(8)
    used.enable_padding(length=512)
    used.save(str(tokenizer_folder / "tokenizer.json"))

    assert load_tokenizer(tokenizer_folder).encode(text).tolist() == whole
