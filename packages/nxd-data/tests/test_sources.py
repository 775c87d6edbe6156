import sys

import pytest
from nxd_data import files_left_out, find_tables, find_text_files, hub_files


def names(path, **settings):
    return [name for name, _ in find_text_files(path, **settings)]


def test_folder_gives_its_text_files_sorted_by_name(text_folder):
    (text_folder / "Z.md").write_text("z")
    (text_folder / "c.txt").write_text("c")  # a walk comes to it before the folder b

    assert names(text_folder) == ["Z.md", "a.txt", "b/second.txt", "c.txt"]


def test_folder_leaves_out_other_suffixes_hidden_files_and_caches(text_folder):
    for name in ("picture.png", ".hidden.txt", ".git/config.txt", "__pycache__/cached.txt"):
        (text_folder / name).parent.mkdir(exist_ok=True)
        (text_folder / name).write_text("x")

    assert names(text_folder) == ["a.txt", "b/second.txt"]


def test_suffixes_choose_the_files(text_folder):
    (text_folder / "main.c").write_text("x")

    assert names(text_folder, suffixes=(".c",)) == ["main.c"]


def test_single_file_is_taken_whatever_its_suffix(tmp_path):
    (tmp_path / "corpus.dat").write_text("x")

    assert names(tmp_path / "corpus.dat") == ["corpus.dat"]


def test_standard_library_without_its_tests_and_installed_packages():
    found = names(None)

    assert {"argparse.py", "json/__init__.py"} <= set(found)
    assert all(name.endswith(".py") for name in found)
    assert not any("site-packages" in name or name.startswith("test/") for name in found)


def test_standard_library_tests_are_taken_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    for name in ("os.py", "test/test_os.py", "site-packages/other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass")

    assert names(None) == ["os.py"]
    assert names(None, include_tests=True) == ["os.py", "test/test_os.py"]


def test_missing_path_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path=.*absent does not exist; use a text file or a folder"):
        find_text_files(tmp_path / "absent")


def test_folder_without_such_files_names_the_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"holds no files that end in \.txt; set data\.suffixes"):
        find_text_files(tmp_path, suffixes=(".txt",))


@pytest.mark.parametrize("name", ["chat.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.arrow"])
def test_rows_given_as_text_are_refused_with_the_keys_that_take_them(tmp_path, name):
    (tmp_path / name).write_text('{"messages": []}\n')

    with pytest.raises(ValueError, match=rf"{name} holds rows, .* set data\.column .* or data\.chat=true"):
        find_text_files(tmp_path / name)


def test_json_objects_under_another_name_are_refused_as_text(tmp_path):
    (tmp_path / "chat.txt").write_text('{"messages": []}\n{"messages": []}\n')

    with pytest.raises(ValueError, match=r"begins with a JSON object; name it \.jsonl, and set data\.column"):
        find_text_files(tmp_path / "chat.txt")


def test_suffixes_of_rows_are_refused_for_text(text_folder):
    with pytest.raises(ValueError, match=r"data\.suffixes=\.jsonl would read rows as text; set data\.column"):
        find_text_files(text_folder, suffixes=(".txt", ".jsonl"))


def test_folder_of_rows_without_text_names_the_keys(tmp_path):
    (tmp_path / "chat.jsonl").write_text("{}\n")

    with pytest.raises(ValueError, match=r"it has rows: set data\.column .* or data\.chat=true"):
        find_text_files(tmp_path)


def test_files_left_out_of_text_are_one_line_with_their_keys(text_folder):
    for name in ("a.jsonl", "b/c.jsonl", "main.c", "LICENSE", ".hidden.c"):
        (text_folder / name).write_text("{}")

    assert files_left_out(text_folder, None, takes_rows=False) == (
        "files in data.path not read: 2 .jsonl (data.column or data.chat takes them), "
        "1 without suffix, 1 .c (data.suffixes takes them)"
    )
    assert files_left_out(text_folder, (".txt", ".c", "l", "E"), takes_rows=False) is None
    assert files_left_out(text_folder / "a.txt", None, takes_rows=False) is None


def test_files_left_out_of_rows_are_told_too(text_folder):
    for name in ("a.jsonl", "b.csv"):
        (text_folder / name).write_text("{}")

    line = files_left_out(text_folder, (".jsonl",), takes_rows=True)

    assert line == "files in data.path not read: 2 .txt, 1 .csv (data.suffixes takes them)"


def test_folder_of_rows_gives_them_sorted_by_name(text_folder):
    for name in ("b/z.csv", "c.jsonl", ".hidden.jsonl"):
        (text_folder / name).write_text("{}")

    assert [name for name, _ in find_tables(text_folder)] == ["b/z.csv", "c.jsonl"]
    assert [name for name, _ in find_tables(text_folder, suffixes=(".csv",))] == ["b/z.csv"]
    assert [name for name, _ in find_tables(text_folder / "c.jsonl")] == ["c.jsonl"]


def test_saved_dataset_gives_the_files_that_it_lists_and_no_caches(tmp_path):
    for name in ("data-00000-of-00001.arrow", "cache-1a2b.arrow", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')

    assert [name for name, _ in find_tables(tmp_path)] == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({"a.txt": "x"}, "a.txt", r"a\.txt is not a file of rows .* unset data\.column and data\.chat"),
        ({"a.txt": "x"}, "", r"holds no files that end in \.jsonl, .*; to read text, unset data\.column"),
        ({}, "absent", r"data\.path=.*absent does not exist; use a file or folder of rows"),
        ({"state.json": "{}", "dataset_info.json": "{}"}, "", r"state\.json lists no files of a dataset"),
        (
            {"dataset_dict.json": "{}", "test/state.json": "", "train/state.json": ""},
            "",
            r"holds the splits test, train; use the folder of one",
        ),
    ],
)
def test_path_without_rows_says_what_to_give(tmp_path, files, path, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)

    with pytest.raises(ValueError, match=message):
        find_tables(tmp_path / path)


def test_suffixes_that_have_no_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.suffixes=\.txt: rows are read from \.jsonl"):
        find_tables(tmp_path, suffixes=(".txt",))


def test_data_set_of_the_hub_says_which_package_reads_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(ValueError, match=r"data\.dataset=org/name needs the package datasets, .*: pip install"):
        hub_files("org/name")


@pytest.mark.parametrize("split", ["train[:10%]", "train+test"])
def test_parts_and_sums_of_splits_are_refused(split):
    with pytest.raises(ValueError, match=r"data\.dataset_split=train.* is a slice or a sum; name one split"):
        hub_files("org/name", split=split)


def test_folder_without_such_a_split_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text('{"text": "a"}')

    with pytest.raises(ValueError, match=r"\(data\.dataset_split=test\) cannot be read: ") as raised:
        hub_files(str(tmp_path / "data"), split="test")

    assert "\n" not in str(raised.value)
