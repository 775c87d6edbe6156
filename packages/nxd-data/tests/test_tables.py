"""Rows of every format become the same documents; what is damaged is named by its place."""

import json

import pytest
from nxd_data import ByteTokenizer, build_corpus, open_corpus, read_conversation
from nxd_data.tables import read_rows

ROWS = [
    {"text": 'one, "quoted"\r\ntwo', "source": "a"},
    {"text": "NA", "source": "b"},  # what readers that guess types take for nothing
    {"text": "", "source": "c"},
    {"text": "007 naïve 日本 🙂", "source": "d"},
]


def write_jsonl(path):
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")


def write_json(path):
    path.write_text(json.dumps(ROWS, indent=2, ensure_ascii=False))


def write_csv(path):
    fields = [[row["text"].replace('"', '""'), row["source"]] for row in ROWS]
    path.write_bytes("".join(f'"{text}",{source}\r\n' for text, source in [["text", "source"], *fields]).encode())


def write_parquet(path):
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(table(), path, row_group_size=2)


def write_arrow_stream(path):
    pa = pytest.importorskip("pyarrow")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table().schema) as writer:
        writer.write_table(table(), max_chunksize=2)


def write_arrow_file(path):
    pa = pytest.importorskip("pyarrow")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table(), max_chunksize=2)


def table():
    return pytest.importorskip("pyarrow").Table.from_pylist(ROWS)


FORMATS = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "stream.arrow": write_arrow_stream,
    "file.arrow": write_arrow_file,
}


def corpus_of(path, tmp_path, column="text"):
    return open_corpus(build_corpus(path, ByteTokenizer(), cache_folder=tmp_path / "cache", column=column))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_any_format_are_the_same_documents(tmp_path, name):
    FORMATS[name](tmp_path / name)

    corpus = corpus_of(tmp_path / name, tmp_path)

    texts = bytes(token % 256 for token in corpus.tokens.tolist()).split(b"\0")
    assert texts == [*(row["text"].encode() for row in ROWS if row["text"]), b""]
    assert (corpus.index.num_documents, corpus.index.skipped) == (3, {"rows without text": 1})


def test_other_column_is_other_data(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl")

    text, source = (corpus_of(tmp_path / "rows.jsonl", tmp_path, column) for column in ("text", "source"))

    assert source.tokens.tolist() == [97, 256, 98, 256, 99, 256, 100, 256]
    assert text.index.digest != source.index.digest


def test_csv_field_of_any_length_is_read(tmp_path):
    (tmp_path / "long.csv").write_text("text\n" + "x" * 200_000 + "\n")

    assert corpus_of(tmp_path / "long.csv", tmp_path).index.num_tokens == 200_001


def test_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "b.csv").write_text("text\nzwei\n")
    (folder / "a.jsonl").write_text('{"text": "one"}\n')

    assert corpus_of(folder, tmp_path).tokens.tolist() == [*b"one", 256, *b"zwei", 256]


DAMAGED = {
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON: .*; fix or remove it"),
    "no object": ("a.jsonl", b"[1]\n", r"line 1 holds a list; expected an object on each line"),
    "no list": ("a.json", b'{"text": "a"}', r"a\.json holds a dict; expected a list of objects, or name it \.jsonl"),
    "list of numbers": ("a.json", b"[1]", r"a\.json, row 1 holds a int; expected a list of objects"),
    "nested too deep": ("a.json", b"[" * 200_000, r"a\.json is not JSON: "),
    "no such column": ("a.jsonl", b'{"body": "a", "id": 1}\n', r"line 1 has no column 'text'; .* one of body, id"),
    "no text": ("a.jsonl", b'{"text": 1}\n', r"line 1: text is a int, not text; .* or data\.chat=true"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: text cannot be written as UTF-8"),
    "no row": ("a.jsonl", b"\n", r"holds no text: no row"),
    "no text in any row": ("a.jsonl", b'{"text": null}\n', r"holds no text: 1 rows without text"),
    "not UTF-8": ("a.csv", b"text\n\xff\xfe\n", r"a\.csv cannot be read: .*utf-8.* fix it"),
    "ragged": ("a.csv", b"text,b\nx\n", r"row 1 does not have the same number of fields as the first line"),
    "open quote": ("a.csv", b'text\n"x\n', r"a\.csv is not CSV: "),
    "no parquet": ("a.parquet", b"PAR1 nothing", r"a\.parquet is not parquet: .*; fix it"),
    "no arrow": ("a.arrow", b"ARROW1 nothing", r"a\.arrow is not arrow: .*; fix it"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_rows_are_refused_in_one_line_that_names_the_place(tmp_path, damage):
    name, content, message = DAMAGED[damage]
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ValueError, match=message) as raised:
        corpus_of(tmp_path / name, tmp_path)

    assert "\n" not in str(raised.value)
    assert list((tmp_path / "cache").glob("*")) == []


def test_missing_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")

    with pytest.raises(ValueError, match=r"pip install 'nxd-data\[text\]'"):
        corpus_of(tmp_path / "a.parquet", tmp_path)


CHATS = [
    {
        "messages": [
            {"role": "user", "content": "42"},  # a text that is JSON is saved as it is
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"city": "Paris"}}}]},
        ],
        "tools": [{"name": "a", "parameters": {"properties": {"city": {"type": "string"}}}}],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "where?"}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "b", "arguments": {"n": 3, "x": None}}}]},
        ],
        "tools": [{"name": "b", "parameters": {"properties": {"n": {"type": "integer", "default": None}}}}],
    },
]
JSON, TEXT = {"_type": "Json"}, {"dtype": "string", "_type": "Value"}
LIST = {"_type": "List"}
# As the package datasets describes them, with the fields that are saved as JSON text.
FEATURES = {
    "messages": {"feature": {"role": TEXT, "content": JSON, "tool_calls": LIST | {"feature": JSON}}, **LIST},
    "tools": {"feature": {"name": TEXT, "parameters": {"properties": JSON}}, **LIST},
}


def chat_table(stored):
    """The chats as datasets saves them: filled up with nulls, or with mixed values as JSON text."""
    pa = pytest.importorskip("pyarrow")
    if stored == "filled up":
        plain = [{"role": "user", "content": "where?"}, CHATS[1]["messages"][1]]
        return pa.Table.from_pylist([CHATS[0], {**CHATS[1], "messages": plain}])
    if stored == "of type JSON":
        columns = {name: pa.array([json.dumps(row[name]) for row in CHATS]) for name in CHATS[0]}
        return pa.table({name: pa.ExtensionArray.from_storage(pa.json_(), it) for name, it in columns.items()})
    message = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.string())})
    tool = pa.struct({"name": pa.string(), "parameters": pa.struct({"properties": pa.string()})})

    def saved(it):
        return it if isinstance(it, str) or it is None else json.dumps(it)

    rows = [
        {
            "messages": [
                {**it, "content": saved(it.get("content")), "tool_calls": [saved(c) for c in it.get("tool_calls", [])]}
                for it in row["messages"]
            ],
            "tools": [
                {**it, "parameters": {"properties": saved(it["parameters"]["properties"])}} for it in row["tools"]
            ],
        }
        for row in CHATS
    ]
    described = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    schema = pa.schema({"messages": pa.list_(message), "tools": pa.list_(tool)}, metadata=described)
    return pa.Table.from_pylist(rows, schema=schema)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("stored", ["filled up", "of type JSON", "described"])
def test_conversations_of_mixed_structures_are_those_of_jsonl(tmp_path, stored, suffix):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if stored == "of type JSON" and not hasattr(pa, "json_"):
        pytest.skip("this pyarrow has no type for JSON")
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    table, file = chat_table(stored), tmp_path / f"chat.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)

    read = [[read_conversation("here", row) for _, row in read_rows(it)] for it in (tmp_path / "chat.jsonl", file)]

    assert read[0] == read[1]


def test_column_of_type_json_that_holds_none_is_refused_with_its_row(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    described = {"huggingface": json.dumps({"info": {"features": {"tools": JSON}}})}
    table = pa.Table.from_pylist(
        [{"tools": "[]"}, {"tools": "[{"}], schema=pa.schema({"tools": pa.string()}, described)
    )
    pq.write_table(table, tmp_path / "chat.parquet")

    with pytest.raises(ValueError, match=r"chat\.parquet, row 2 holds invalid JSON"):
        list(read_rows(tmp_path / "chat.parquet"))
