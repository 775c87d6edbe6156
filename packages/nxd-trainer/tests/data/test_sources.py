import pytest
from nxd_trainer.data import find_text_files


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
    with pytest.raises(ValueError, match=r"data\.path=.*absent does not exist; give a text file or a folder"):
        find_text_files(tmp_path / "absent")


def test_folder_without_such_files_names_the_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"holds no file that ends in \.txt; set data\.suffixes"):
        find_text_files(tmp_path, suffixes=(".txt",))
