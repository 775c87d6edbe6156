"""Recipes, texts and tokenizers from a stranger: none runs code or hangs, and each is one line of error."""

import base64
import io
import json
import os
import pickle
import re
import struct
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from nxd_data.sources import find_text_files, scan_text_files
from nxd_data.tokenizer import load_tokenizer
from nxd_engine.hugging_face import model_on_meta, read_config
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import RecipeError, load_recipe
from nxd_trainer.training.output_folder import open_output
from nxd_trainer.training.run_data import open_data, prepare_data


class RunsCode:
    """As a pickle, code that leaves a file."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for files; code that they could run would write into the working directory beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "folder").mkdir()
    yield tmp_path / "folder"
    assert os.listdir(tmp_path / "here") == []
    assert sorted(os.listdir(tmp_path)) == ["folder", "here"]


DIGITS = "9" * 10_000
LAUGHS = "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijk"))

RECIPES = [
    (".toml", '[model]\nfactory = "os:system"\n[model.config]\ncommand = "touch ran"'),
    (".json", '{"model": {"factory": "os:system", "config": {"command": "touch ran"}}}'),
    (".yaml", "model: {factory: 'os:system', config: {command: touch ran}}"),
    (".json", '{"model.factory": "os:system"}'),
    (".toml", '"model.factory" = "os:system"'),
    (".toml", '[pipeline]\nlayer_class = "os:system"'),
    (".toml", '[optimizer]\nfactory = "os:system"'),
    (".json", '{"pipeline": {"layer_class": "os:system"}, "model": {"factory": "os:system"}}'),
    (".yaml", "!!python/object/apply:os.system ['touch ran']"),
    (".yaml", "train: !!python/object/new:os.system ['touch ran']"),
    (".yaml", "train: {steps: !!python/name:os.system }"),
    (".yaml", "output: !!python/module:os"),
    (".yaml", "!!python/object:os.system {}"),
    (".yml", LAUGHS),
    (".yaml", "model: {config: &a {b: *a}}"),
    (".yaml", "train: &a {steps: 1}\noptimizer: *a"),
    (".yaml", "train: {steps: !!int ''}"),
    (".yaml", "train: {steps: !!float x}"),
    (".yaml", "train: {steps: !!timestamp x}"),
    (".yaml", "train: {steps: !!bool x}"),
    (".yaml", "train: {steps: !!binary é}"),
    (".yaml", "output: 2001-99-99"),
    (".yaml", "[" * 5_000),
    (".yaml", "? " * 5_000),
    (".yaml", "--- {}\n--- {}"),
    (".yaml", "{[1]: 2}"),
    (".yaml", "train: {steps: " + DIGITS + "}"),
    (".json", "[" * 200_000),
    (".json", '{"a":' * 200_000),
    (".json", '{"train": {"steps": ' + DIGITS + "}}"),
    (".json", '{"train": {"steps": 1e999}}'),
    (".json", '{"train": {"steps": NaN}}'),
    (".json", '"train"'),
    (".toml", "a = " + "[" * 200_000),
    (".toml", "train.steps = " + DIGITS),
    (".toml", "train = 1\n[train]\nsteps = 1"),
    (".toml", "[train]\nsteps = nan"),
    (".py", "__import__('os').system('touch ran')"),
    (".pkl", ""),
]


@pytest.mark.parametrize(("suffix", "text"), RECIPES)
def test_recipe_that_names_code_or_is_no_recipe_is_refused_in_one_line(folder, suffix, text):
    file = folder / f"recipe{suffix}"
    file.write_text(text)

    with pytest.raises(RecipeError) as raised:
        load_recipe(file)

    assert all("\n" not in mistake and len(mistake) < 1000 for mistake in raised.value.mistakes)


def test_recipe_that_is_a_pickle_is_refused(folder):
    for suffix in (".toml", ".yaml", ".json"):
        (folder / f"recipe{suffix}").write_bytes(pickle.dumps(RunsCode()))
        with pytest.raises(RecipeError):
            load_recipe(folder / f"recipe{suffix}")


def test_factory_of_a_recipe_file_is_taken_where_the_command_line_repeats_it(folder):
    (folder / "recipe.toml").write_text('[model]\nfactory = "my_models:make"\nconfig = { width = 16 }')

    with pytest.raises(RecipeError, match=r"if you trust it, repeat model\.factory on the command line"):
        load_recipe(folder / "recipe.toml", ["train.steps=1"])
    recipe = load_recipe(folder / "recipe.toml", ["model.factory=my_models:make"])

    assert (recipe.model.factory, recipe.model.config) == ("my_models:make", {"width": 16})


def test_folder_of_texts_gives_its_files_and_nothing_that_would_be_waited_for(folder):
    (folder / "good.txt").write_text("good")
    (folder / "binary.txt").write_bytes(pickle.dumps(RunsCode()))
    (folder / "half.txt").write_bytes("é".encode()[:1])
    (folder / "empty.txt").touch()
    (folder / "folder.txt").mkdir()
    (folder / "circle").symlink_to(folder)
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "endless.txt").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.txt")

    readable, skipped = scan_text_files(find_text_files(folder))

    assert [file.name for file in readable] == ["good.txt"]
    assert skipped == {"binary or not UTF-8": 2, "empty": 1, "unreadable": 3}


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def npy_header(text):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def index(lengths=(1,), offsets=(0,), bounds=(0, 1), *, magic=b"MMIDIDX\x00\x00", version=1, code=8, counts=None):
    counts = counts or (len(lengths), len(bounds))
    numbers = (np.array(it, dtype=kind).tobytes() for it, kind in ((lengths, "i4"), (offsets, "i8"), (bounds, "i8")))
    return magic + struct.pack("<QBQQ", version, code, *counts) + b"".join(numbers)


def arrow_with_a_pickle():
    """A column whose type is code, as pyarrow before version 14 would have run it."""
    pyarrow = pytest.importorskip("pyarrow")
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(RunsCode())}
    schema = pyarrow.schema([pyarrow.field("other", pyarrow.int64(), metadata=metadata)])
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, schema) as writer:
        writer.write_batch(pyarrow.record_batch([pyarrow.array([1])], schema=schema))
    return stream.getvalue()


def arrow_of(column):
    """A column `text` of few bytes that claims any number of values."""
    pyarrow = pytest.importorskip("pyarrow")
    stream = io.BytesIO()
    batch = pyarrow.record_batch([column(pyarrow)], names=["text"])
    with pyarrow.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    return {"a.arrow": stream.getvalue()}


def parquet_of_nulls():
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(3_000_000)}), stream, row_group_size=3_000_000)
    return {"a.parquet": stream.getvalue()}


MANY = 2_000_000_000

CLAIMS = {
    "empty structs": lambda arrow: arrow.Array.from_buffers(arrow.struct([]), MANY, [None]),
    "texts of no bytes": lambda arrow: arrow.Array.from_buffers(arrow.binary(0), MANY, [None, arrow.py_buffer(b"")]),
    "run-ends": lambda arrow: arrow.RunEndEncodedArray.from_arrays(
        arrow.array([MANY], arrow.int32()), arrow.array(["x"])
    ),
    "run-ends of few rows": lambda arrow: arrow.RunEndEncodedArray.from_arrays(
        arrow.array([9], arrow.int32()), arrow.array(["x"])
    ),
    "a list of nulls": lambda arrow: arrow.ListArray.from_arrays(
        arrow.array([0, MANY], arrow.int32()), arrow.Array.from_buffers(arrow.struct([]), MANY, [None])
    ),
    "a dictionary": lambda arrow: arrow.DictionaryArray.from_arrays(
        arrow.array(bytearray(300_000), arrow.int8()), arrow.array(["x" * 400_000])
    ),
    "views of lists": lambda arrow: arrow.ListViewArray.from_arrays(
        arrow.array([0] * 9, arrow.int32()), arrow.array([9] * 9, arrow.int32()), arrow.array(range(9))
    ),
}


def saved_dataset(*names):
    return {
        "state.json": json.dumps({"_data_files": [{"filename": name} for name in names]}),
        "dataset_info.json": "{}",
    }


COLUMN, TOKENS, FLAT = "data.column=text", "data.suffixes=.npy,.bin,.idx", "data.token_dtype=uint16"

DATA = {
    "npy of objects": ({"a.npy": npy(np.array([RunsCode()], dtype=object))}, TOKENS),
    "npy that is a pickle": ({"a.npy": pickle.dumps(RunsCode())}, TOKENS),
    "npy that is an archive": ({"a.npy": b"PK\x03\x04" + bytes(30)}, TOKENS),
    "npy of numbers with a point": ({"a.npy": npy(np.ones(3))}, TOKENS),
    "npy of two dimensions": ({"a.npy": npy(np.ones((2, 3), dtype=int))}, TOKENS),
    "npy that is empty": ({"a.npy": b""}, TOKENS),
    "npy cut off": ({"a.npy": npy(np.arange(100))[:-9]}, TOKENS),
    "npy with code in its header": ({"a.npy": npy_header("__import__('os').system('touch ran')")}, TOKENS),
    "npy with a deep header": ({"a.npy": npy_header("(" * 9_000)}, TOKENS),
    "npy with more than memory": (
        {"a.npy": npy_header("{'descr': '<u2', 'fortran_order': False, 'shape': (9223372036854775807,)}")},
        TOKENS,
    ),
    "npy with a negative shape": (
        {"a.npy": npy_header("{'descr': '<u2', 'fortran_order': False, 'shape': (-4,)}")},
        TOKENS,
    ),
    "npy with negative tokens": ({"a.npy": npy(np.array([1, -1]))}, TOKENS),
    "npy with unknown tokens": ({"a.npy": npy(np.array([1, 1 << 40]))}, TOKENS),
    "npy with one token": ({"a.npy": npy(np.array([1]))}, TOKENS),
    "flat without a type": ({"a.bin": bytes(64)}, TOKENS),
    "flat of another width": ({"a.bin": bytes(63)}, TOKENS, FLAT),
    "flat that is empty": ({"a.bin": b""}, TOKENS, FLAT),
    "flat that is a pickle": ({"a.bin": pickle.dumps(RunsCode()) + b"\xff" * 64}, TOKENS, "data.token_dtype=int64"),
    "index alone": ({"a.idx": index()}, TOKENS),
    "index that is a pickle": ({"a.bin": bytes(2), "a.idx": pickle.dumps(RunsCode())}, TOKENS),
    "index of another format": ({"a.bin": bytes(2), "a.idx": index(magic=b"TNTIDX\x00\x00\x00")}, TOKENS),
    "index of another version": ({"a.bin": bytes(2), "a.idx": index(version=2)}, TOKENS),
    "index of float64": ({"a.bin": bytes(8), "a.idx": index(code=6)}, TOKENS),
    "index of no type": ({"a.bin": bytes(8), "a.idx": index(code=255)}, TOKENS),
    "index with more than it holds": ({"a.bin": bytes(2), "a.idx": index(counts=(2**63, 2**63))}, TOKENS),
    "index past the end": ({"a.bin": bytes(2), "a.idx": index(lengths=[2])}, TOKENS),
    "index far past the end": ({"a.bin": bytes(2), "a.idx": index(offsets=[2**62])}, TOKENS),
    "index before the beginning": ({"a.bin": bytes(2), "a.idx": index(offsets=[-2])}, TOKENS),
    "index with a negative length": ({"a.bin": bytes(2), "a.idx": index(lengths=[-1])}, TOKENS),
    "index with documents out of order": ({"a.bin": bytes(2), "a.idx": index(bounds=[1, 0])}, TOKENS),
    "index without documents": ({"a.bin": bytes(2), "a.idx": index(bounds=[])}, TOKENS),
    "index of documents without tokens": ({"a.bin": b"", "a.idx": index([0], [0])}, TOKENS),
    "index of the same tokens again and again": (
        {"a.bin": bytes(64), "a.idx": index([32] * 9, [0] * 9, range(10))},
        TOKENS,
    ),
    "index whose tokens lie elsewhere": ({"a.bin": "/etc/passwd", "a.idx": index()}, TOKENS),
    "text that lies elsewhere": ({"a.txt": "/etc/passwd"},),
    "rows that lie elsewhere": ({"a.jsonl": "/etc/passwd"}, COLUMN),
    "rows in a device": ({"a.jsonl": "/dev/zero"}, COLUMN),
    "data set elsewhere": (saved_dataset("../../../etc/passwd"), COLUMN),
    "data set without names": ({"state.json": "{}", "dataset_info.json": "{}"}, COLUMN),
    "data set of a folder": (saved_dataset(".."), COLUMN),
    "data set of links": ({**saved_dataset("a.arrow"), "a.arrow": "/etc/passwd"}, COLUMN),
    "data set that is too deep": ({"state.json": b"[" * 200_000, "dataset_info.json": "{}"}, COLUMN),
    "splits": ({"dataset_dict.json": "[" * 200_000}, COLUMN),
    "parquet that is a pickle": ({"a.parquet": pickle.dumps(RunsCode())}, COLUMN),
    "parquet cut off": ({"a.parquet": b"PAR1" + bytes(20)}, COLUMN),
    "arrow that is a pickle": ({"a.arrow": pickle.dumps(RunsCode())}, COLUMN),
    "arrow with a type that is code": (lambda: {"a.arrow": arrow_with_a_pickle()}, COLUMN),
    **{name: (partial(arrow_of, column), COLUMN) for name, column in CLAIMS.items()},
    "parquet of nulls": (parquet_of_nulls, COLUMN),
    "JSON too deep": ({"a.jsonl": b"[" * 200_000}, COLUMN),
    "JSON with digits": ({"a.json": ('[{"text": ' + DIGITS + "}]").encode()}, COLUMN),
    "JSON of no object": ({"a.jsonl": b"1"}, COLUMN),
    "half a character": ({"a.jsonl": b'{"text": "\\ud800"}'}, COLUMN),
    "bytes that are no text": ({"a.csv": b"text\n\xff\xfe"}, COLUMN),
    "a quote that never ends": ({"a.csv": b'text\n"a'}, COLUMN),
    "a column more": ({"a.csv": b"text\na,b"}, COLUMN),
    "a script of the package datasets": ({"data.py": b"open('ran', 'w')"}, COLUMN),
    "text of a script as rows": ({"data.py": b"open('ran', 'w')"}, "data.suffixes=.py", COLUMN),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", DATA)
def test_data_of_a_stranger_are_refused_in_one_line(folder, case):
    files, *settings = DATA[case]
    (folder / "data").mkdir()
    for name, content in (files() if callable(files) else files).items():
        if isinstance(content, bytes):
            (folder / "data" / name).write_bytes(content)
        elif content.startswith("/"):
            (folder / "data" / name).symlink_to(content)
        else:
            (folder / "data" / name).write_text(content)
    recipe = load_recipe(None, [f"data.path={folder / 'data'}", f"output={folder / 'run'}", *settings])

    with pytest.raises(ValueError, match=r"data|file") as raised:
        open_data(recipe, prepare_data(recipe))

    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000
    assert all(file.stat().st_size for file in (folder / "run").rglob("tokens.bin"))  # what is kept can be opened
    assert list((folder / "run").glob("tokens/.*")) == []


def test_links_that_leave_a_folder_are_left_out_and_told(folder):
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("good" * 100)
    (folder / "text/b.txt").symlink_to("a.txt")
    (folder / "text/c.txt").symlink_to("/etc/passwd")
    recipe = load_recipe(None, [f"data.path={folder / 'text'}", f"output={folder / 'run'}"])

    data = open_data(recipe, prepare_data(recipe))

    [corpus] = data.sources.values()
    assert bytes(corpus.tokens[corpus.tokens < 256].tolist()) == b"good" * 200
    assert data.notes == ["files in data.path not read: 1 links out of the folder (data.sources takes their targets)"]


@pytest.mark.parametrize("cache", ["x", "datasets--a--b"])
def test_links_of_a_snapshot_lead_to_the_blobs_of_its_own_repository_alone(folder, cache):
    snapshot, blobs = folder / cache / "snapshots" / "1", folder / cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "secret").mkdir()
    for name in ("secret/key.txt", f"{cache}/key.txt", f"{cache}/blobs/key.txt"):
        (folder / name).write_text("text")
    (snapshot / "a.txt").symlink_to("../../key.txt")
    (snapshot / "b.txt").symlink_to("../../../secret/key.txt")
    (snapshot / "c.txt").symlink_to("../../blobs/key.txt")

    (snapshot / "own.txt").write_text("text")

    def taken():
        return [name for name, _ in find_text_files(snapshot, suffixes=(".txt",))]

    assert taken() == (["c.txt", "own.txt"] if cache.startswith("datasets--") else ["own.txt"])
    (blobs / "key.txt").unlink()
    blobs.rmdir()
    blobs.symlink_to(folder / "secret")
    assert taken() == ["own.txt"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_lock_of_an_output_folder_that_is_a_link_or_a_pipe_empties_nothing_and_does_not_hang(folder, kind, run_ranks):
    (folder / "mine").write_text("mine")
    (folder / "run").mkdir()
    lock = folder / "run" / ".lock"
    lock.symlink_to(folder / "mine") if kind == "link" else os.mkfifo(lock)

    def lock_it(output):
        initialize_model_parallel()
        try:
            open_output(output)
        except ValueError as error:
            return str(error)

    [problem] = run_ranks(lock_it, 1, folder / "run")
    assert re.search(r"output=.* cannot be written: .*(is a link to|is not a regular file)", problem)
    assert (folder / "mine").read_text() == "mine"


VOCABULARY = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "</s>"}}

TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
REGEX = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aaa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a"}
TWICE = {"id": "A", "type_id": 0}
CHARSMAP = base64.b64encode(bytes(4) + b"a" * 1000 + b"\0").decode()

GROWING = [
    {"normalizer": {"type": "Sequence", "normalizers": [TENFOLD] * 12}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [TENFOLD] * 3}] * 3}},
    {"normalizer": {**TENFOLD, "content": "b" * 1000}},
    {"normalizer": {"type": "Sequence", "normalizers": [REGEX] * 9}},
    {"normalizer": {"type": "Sequence", "normalizers": [BETWEEN] * 9}},
    {"normalizer": {"type": "Sequence", "normalizers": [{**TENFOLD, "content": "A" * 10}, {"type": "Lowercase"}] * 3}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    {"decoder": {"type": "Sequence", "decoders": [TENFOLD] * 12}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 20}},
    {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": TWICE}] * 100, "pair": []}},
]


@pytest.mark.parametrize("part", GROWING, ids=lambda part: str(part)[:80])
def test_tokenizer_that_makes_ever_more_of_a_text_is_refused(folder, part):
    pytest.importorskip("tokenizers")
    (folder / "tokenizer.json").write_text(json.dumps({**VOCABULARY, **part}))

    with pytest.raises(ValueError, match=r"data\.tokenizer: the \w+ of .* has \d+ steps?, which expand a text up to"):
        load_tokenizer(folder)


def test_tokenizer_with_many_replacements_that_do_not_meet_is_read(folder):
    pytest.importorskip("tokenizers")
    pairs = [("…", "..."), ("½", "1/2"), ("æ", "ae"), (" ", "▁"), ("™", "(tm)"), ("ß", "ss")]
    steps = [{"type": "Replace", "pattern": {"String": one}, "content": other} for one, other in pairs]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, *steps, spaces]}
    (folder / "tokenizer.json").write_text(json.dumps({**VOCABULARY, "normalizer": normalizer}))

    assert load_tokenizer(folder).encode("½").tolist() == [0]


TOKENIZERS = [
    {"tokenizer.json": ""},
    {"tokenizer.json": "[" * 200_000},
    {"tokenizer.json": "{}"},
    {"tokenizer.json": '{"model": ' + DIGITS + "}"},
    {"tokenizer.json": json.dumps({**VOCABULARY, "model": {"type": "os.system"}})},
    {"tokenizer.json": json.dumps({**VOCABULARY, "model": {**VOCABULARY["model"], "vocab": {}}})},
    {"tokenizer.json": json.dumps({**VOCABULARY, "model": {**VOCABULARY["model"], "vocab": {"a": -1}}})},
    {"tokenizer.json": json.dumps({**VOCABULARY, "model": {**VOCABULARY["model"], "vocab": {"a": 0}}})},
    {"tokenizer.json": json.dumps({**VOCABULARY, "pre_tokenizer": {"type": "Custom", "code": "1"}})},
    *(
        {"tokenizer.json": json.dumps(VOCABULARY), "tokenizer_config.json": config}
        for config in (
            "",
            "[" * 200_000,
            "[]",
            '"</s>"\n\n',
            DIGITS,
            '{"eos_token": 1}',
            '{"eos_token": ["</s>"]}',
            '{"eos_token": {"content": {"a": 1}}}',
            '{"eos_token": "other"}',
        )
    ),
]


@pytest.mark.parametrize("files", TOKENIZERS)
def test_tokenizer_that_is_none_is_refused_in_one_line(folder, files):
    pytest.importorskip("tokenizers")
    for name, text in files.items():
        (folder / name).write_text(text)

    with pytest.raises(ValueError, match=r"data\.tokenizer") as raised:
        load_tokenizer(folder)

    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "config",
    [
        '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}',
        '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}, "tokenizer_class": "Tokenizer"}',
        '{"auto_map": {"AutoTokenizer": [null, "code.Tokenizer"]}, "model_type": "other"}',
        '{"auto_map": {"AutoTokenizer": "stranger/code--code.Tokenizer"}}',
        '{"auto_map": 1}',
        '{"tokenizer_class": 1}',
        '{"tokenizer_class": "os.system"}',
        "[]",
        "[" * 200_000,
        "",
    ],
)
def test_tokenizer_with_code_of_its_own_is_refused_without_a_question(folder, config):
    pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text(config)
    (folder / "config.json").write_text('{"model_type": "other"}')
    (folder / "code.py").write_text("open('ran', 'w')\nclass Tokenizer: pass")

    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer") as raised:
        load_tokenizer(folder)

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", '"a"', "[" * 200_000, '{"a":' * 200_000, '{"a": ' + DIGITS + "}", "\0"])
def test_config_that_is_no_object_is_refused_in_one_line(folder, text):
    (folder / "config.json").write_text(text)

    with pytest.raises(ValueError, match=r"config\.json") as raised:
        read_config(folder)

    assert "\n" not in str(raised.value)


def test_config_that_is_no_file_is_not_waited_for(folder):
    os.mkfifo(folder / "config.json")

    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_config(folder)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}

CONFIGS = [
    {"model_type": "stranger", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
    {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
    {"auto_map": {"AutoModelForCausalLM": "stranger/code--code.Model"}},
    {"attn_implementation": "stranger/kernel"},
    {"_attn_implementation": "stranger/kernel:run"},
    {"attn_implementation": {"": "stranger/kernel"}},
    {"experts_implementation": "stranger/kernel"},
    {"_attn_implementation_internal": "stranger/kernel"},
    {"attribute_map": {"renamed": "_attn_implementation"}, "renamed": "stranger/kernel"},
    {"layers": [{"attn_implementation": "stranger/kernel"}]},
    {"text_config": {"model_type": "llama", "attn_implementation": "stranger/kernel"}},
    {"architectures": ["os.system"]},
    {"architectures": ["pipeline"]},
    {"architectures": ["TrainingArguments"]},
    {"architectures": ["LlamaConfig"]},
    {"architectures": [1]},
    {"architectures": 1},
    {"architectures": "LlamaForCausalLM"},
    {"architectures": {"LlamaForCausalLM": 1}},
    {"model_type": 1},
    {"model_type": ["llama"]},
    {"hidden_size": "16"},
    {"hidden_size": -1},
    {"hidden_size": [1]},
    {"num_attention_heads": 0},
    {"num_hidden_layers": 2**63},
    {"num_labels": 2**40},
    {"vocab_size": 10**30},
    {"vocab_size": float("nan")},
    {"hidden_act": "os.system"},
    {"hidden_act": ["silu"]},
    {"rope_scaling": {"rope_type": "__import__('os')"}},
    {"rope_parameters": "default"},
    {"quantization_config": {"quant_method": "stranger"}},
    {"quantization_config": 1},
    {"torch_dtype": "os"},
    {"dtype": "load"},
    {"dtype": 1},
    {"id2label": 1},
    {"_name_or_path": "/etc"},
    {"transformers_version": 1},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=map(str, CONFIGS))
def test_config_of_a_stranger_gives_a_model_of_transformers_or_one_line(folder, changes):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    (folder / "code.py").write_text("open('ran', 'w')")

    model, refusal = None, ""
    try:
        model = model_on_meta(read_config(folder))
    except ValueError as error:
        refusal = str(error)

    assert "\n" not in refusal
    assert model is None or type(model).__module__.startswith("transformers.models.")


@pytest.mark.parametrize("changes", CONFIGS[3:11], ids=map(str, CONFIGS[3:11]))
def test_config_that_names_a_kernel_of_a_hub_is_refused(changes):
    pytest.importorskip("transformers")

    with pytest.raises(
        ValueError, match=r"code from a hub, which is not run|has attribute_map, which gives other keys"
    ):
        model_on_meta({**LLAMA, **changes})


MUSIC = {"architectures": ["MusicgenForCausalLM"], "model_type": "musicgen_decoder", "hidden_size": 16}


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "attribute_map": {"renamed": "num_hidden_layers"}, "renamed": 900_000},
        {**LLAMA, "towers": [{"num_layers": 900_000}, [{"depths": [[900_000]]}]]},
        {**MUSIC, "num_codebooks": 900_000, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ],
)
def test_config_with_counts_under_other_names_is_refused(monkeypatch, config):
    pytest.importorskip("transformers")
    monkeypatch.setattr("nxd_engine.hugging_face.conversion._MOST_PARTS", 1000)  # for a fast test

    with pytest.raises(ValueError, match=r"has attribute_map|more than the allowed|more than the 1,000 modules"):
        model_on_meta(config)
