"""Object stores: the put of the manifest decides, and nobody removes what may belong to a save at work."""

import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from nxd_ckpt import CheckpointError, delete, gc, list_checkpoints, load, open_checkpoint, save
from nxd_ckpt.manifest import data_file_name
from nxd_ckpt.stores import GROUP, ReadRange, open_store

STATE = {"w": torch.arange(1000.0)}
A, B = "a" * 32, "b" * 32


def begun(root, save_id, *, overwrite=False):
    """A transaction that has written one file and is about to commit."""
    transaction = open_store(root).begin_save("t", save_id, overwrite=overwrite)
    transaction.begin()
    transaction.write_file(data_file_name(save_id, 0), [b"0" * 10], 10)
    return transaction


def manifest_of(root, tag):
    return open_store(root).read_manifest(tag)


def files(root, tag="t"):
    return list(open_store(root).files(tag))


@pytest.mark.parametrize("overwrite", [False, True])
def test_commit_of_two_saves_of_one_tag_first_wins_and_the_other_raises(object_root, overwrite):
    if overwrite:
        save(object_root, "t", STATE)
    first, second = begun(object_root, A, overwrite=overwrite), begun(object_root, B, overwrite=overwrite)

    second.commit(b"of the second")
    with pytest.raises(
        CheckpointError, match="t was saved or deleted by another process while this save was in progress"
    ):
        first.commit(b"of the first")
    first.end()
    second.end()

    assert manifest_of(object_root, "t") == b"of the second"
    assert files(object_root) == [data_file_name(B, 0)]


def test_commit_at_the_very_same_moment_exactly_one_wins(object_root):
    saves = [begun(object_root, f"{number:032x}") for number in range(8)]
    together = threading.Barrier(len(saves))
    winners, errors = [], []

    def commit(number):
        together.wait()
        try:
            saves[number].commit(f"of {number}".encode())
            winners.append(number)
        except CheckpointError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(len(saves))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(winners) == 1
    assert len(errors) == len(saves) - 1
    assert manifest_of(object_root, "t") == f"of {winners[0]}".encode()


def test_commit_whose_answer_got_lost_is_recognised_as_its_own(object_root, monkeypatch):
    transaction = begun(object_root, A)
    fs = open_store(object_root).fs  # fsspec gives out the same one each time
    pipe_file = fs.pipe_file
    lost = []

    def pipe_and_lose_the_answer(path, content, **options):
        pipe_file(path, content, **options)
        if path.endswith("manifest.json"):
            lost.append(path)
            raise ConnectionResetError("the answer got lost")

    monkeypatch.setattr(fs, "pipe_file", pipe_and_lose_the_answer)

    transaction.commit(b"mine")
    transaction.end()

    assert lost
    assert manifest_of(object_root, "t") == b"mine"
    assert files(object_root) == [data_file_name(A, 0)]


def test_commit_that_may_or_may_not_have_happened_leaves_the_files(object_root, monkeypatch):
    transaction = begun(object_root, A)

    def lost(path, content, **options):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(open_store(object_root).fs, "pipe_file", lost)

    with pytest.raises(OSError, match="RuntimeError: no route to host"):
        transaction.commit(b"mine")
    transaction.end()

    assert files(object_root) == [data_file_name(A, 0)]


def test_save_leaves_the_files_of_other_saves_of_its_tag_alone(object_root):
    at_work = begun(object_root, A)

    save(object_root, "t", STATE)
    save(object_root, "t", STATE, overwrite=True)

    assert data_file_name(A, 0) in files(object_root)
    assert len(files(object_root)) == 2
    at_work.end()
    assert len(files(object_root)) == 1
    assert torch.equal(open_checkpoint(object_root, "t").read("w"), STATE["w"])


def test_gc_takes_what_a_dead_save_left_once_it_is_old_enough(object_root):
    begun(object_root, A)  # and it never ends
    save(object_root, "u", STATE)

    assert gc(object_root) == []
    found = gc(object_root, dead_after=0, dry_run=True)
    assert [(garbage.path, garbage.num_bytes) for garbage in found] == [(f"{object_root}/t/{data_file_name(A, 0)}", 10)]
    assert files(object_root) == [data_file_name(A, 0)]

    assert gc(object_root, dead_after=0) == found
    assert files(object_root) == []
    assert torch.equal(open_checkpoint(object_root, "u").read("w"), STATE["w"])


def test_gc_leaves_the_files_under_a_damaged_manifest_and_delete_removes_them(object_root):
    save(object_root, "t", STATE)
    store = open_store(object_root)
    store.fs.pipe_file(store.key("t"), b"damaged")

    assert gc(object_root, dead_after=0) == []
    assert len(files(object_root)) == 1

    delete(object_root, "t")
    assert files(object_root) == []


def test_gc_of_negative_seconds_is_refused(object_root):
    with pytest.raises(ValueError, match="dead_after=-1 is not a number of seconds; use 0 or more"):
        gc(object_root, dead_after=-1)


def test_upload_that_fails_halfway_leaves_no_checkpoint_and_no_file(object_root):
    def parts():
        yield b"0" * 100
        raise OSError("the source has gone")

    transaction = open_store(object_root).begin_save("t", A, overwrite=False)
    transaction.begin()
    with pytest.raises(OSError, match="the source has gone"):
        transaction.write_file(data_file_name(A, 0), parts(), 10)
    transaction.end()

    assert files(object_root) == []


def test_upload_of_more_than_one_part_and_reads_of_ranges_are_exact(object_root):
    content = bytes(range(256)) * 2**17  # 32 MiB, two parts
    transaction = open_store(object_root).begin_save("t", A, overwrite=False)
    transaction.begin()
    transaction.write_file(data_file_name(A, 0), [b"head", memoryview(content), b"tail"], 8 + len(content))

    assert transaction.file_size(data_file_name(A, 0)) == len(content) + 8
    ranges = [(0, 10), (5000, 17 * 2**20), (17 * 2**20 + 5001, 3), (len(content), 8)]
    pieces = [ReadRange(offset, memoryview(bytearray(size))) for offset, size in ranges]
    open_store(object_root).read_into("t", data_file_name(A, 0), pieces)
    whole = b"head" + content + b"tail"
    assert [bytes(piece.destination) for piece in pieces] == [whole[offset : offset + size] for offset, size in ranges]


def test_read_beyond_the_end_of_a_file_is_refused(object_root):
    begun(object_root, A)
    piece = ReadRange(5, memoryview(bytearray(10)))

    with pytest.raises(CheckpointError, match="the file ends at byte 10, 5 bytes early"):
        open_store(object_root).read_into("t", data_file_name(A, 0), [piece])


def test_damaged_byte_is_noticed_when_loading(object_root):
    save(object_root, "t", STATE)
    store = open_store(object_root)
    (file,) = store.files("t")
    content = bytearray(store.fs.cat_file(store.key("t", file)))
    content[-3] ^= 4
    store.fs.pipe_file(store.key("t", file), bytes(content))

    with pytest.raises(CheckpointError, match=r"safetensors.*(checksum|damaged|hash)"):
        load(object_root, "t", into={"w": torch.zeros(1000)})


@pytest.mark.parametrize("tag", ["a*", "a?versionId=1", "a[0]", "a::b", "a#b", "a%2e"])
def test_save_under_a_tag_that_object_stores_do_not_take_is_refused(object_root, tag):
    with pytest.raises(ValueError, match="is not allowed in an object store: leave out"):
        save(object_root, tag, STATE)

    assert list_checkpoints(object_root) == []


def test_transaction_can_go_to_another_process(s3_bucket):
    root = f"s3://{s3_bucket}/runs"
    here = open_store(root).begin_save("t", A, overwrite=False)
    there = pickle.loads(pickle.dumps(here))
    here.begin()
    there.write_file(data_file_name(A, 1), [b"by another"], 10)

    assert here.file_size(data_file_name(A, 1)) == 10


@pytest.mark.parametrize(
    ("url", "expected"), [("folder", (True, False)), ("memory://x", (False, True)), ("s3://x", (True, True))]
)
def test_capabilities_say_who_sees_what_is_stored_and_whether_reads_are_requests(url, expected, request):
    if url.startswith("s3"):
        request.getfixturevalue("s3_bucket")
    capabilities = open_store(url).capabilities

    assert (capabilities.other_processes, capabilities.remote) == expected
    assert capabilities.other_files


def test_file_url_is_the_folder(tmp_path):
    save(f"file://{tmp_path}", "t", STATE)

    assert torch.equal(open_checkpoint(tmp_path, "t").read("w"), STATE["w"])


def test_url_of_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        save("nowhere://x", "t", STATE)


def test_url_whose_package_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)

    with pytest.raises(ImportError, match=r"path='gs://x' cannot be opened: .*pip install 'nxd-ckpt\[gs\]'"):
        open_store("gs://x")


def test_scheme_that_another_package_brings_is_opened_by_it(tmp_path, monkeypatch):
    (tmp_path / "twin.py").write_text("def opened(url): return 'opened ' + url\n")
    (tmp_path / "twin-1.0.dist-info").mkdir()
    (tmp_path / "twin-1.0.dist-info/entry_points.txt").write_text(f"[{GROUP}]\ntwin = twin:opened\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert open_store("twin://here") == "opened twin://here"


def test_import_of_the_package_leaves_fsspec_alone(fresh_python):
    program = "import sys, nxd_ckpt; print([name for name in ('fsspec', 's3fs') if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run([fresh_python, "-c", program], env=environment, capture_output=True, check=True)

    assert finished.stdout == b"[]\n"
