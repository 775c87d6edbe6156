"""Seeded random damage to checkpoints of each format: no reader crashes, hangs, or takes memory for what is not there.

Readers run in a child process, which a crash ends alone and whose largest size in memory is its own.
"""

import os
import random
import resource
import shutil
import sys
import traceback

import pytest
import torch

from .formats_to_break import KINDS, convert, make, mistakes_in

ROOM = 64 * 2**20  # in bytes, for modules that are loaded late; the files have less than 100 KiB


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Flips bits, overwrites, cuts out, repeats or cuts off."""
    data = bytearray(content)
    for _ in range(generator.randint(1, 3)):
        at, size = generator.randrange(len(data) + 1), generator.choice([1, 1, 2, 4, 8, 64])
        how = generator.randrange(6)
        if how == 0 and at < len(data):
            data[at] ^= 1 << generator.randrange(8)
        elif how == 1:
            data[at : at + size] = generator.randbytes(size)
        elif how == 2:
            data[at : at + size] = generator.choice([b"\0", b"\xff", b"9", b"[", b"\x7f"]) * size
        elif how == 3:
            del data[at : at + size]
        elif how == 4:
            data[at:at] = data[at : at + size]
        elif generator.random() < 0.3:
            del data[at:]
    return bytes(data)


def run_cases(kind, original, folder, seeds, seconds):
    """In the child: reads each damaged copy, and returns what was wrong, by seed."""
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file() and path.name != "lock")
    wrong = []
    for seed in seeds:
        generator = random.Random(f"{kind} {seed}")
        copy, target = folder / f"{seed}", folder / f"{seed}-target"
        shutil.copytree(original, copy)
        file = copy / generator.choice([path for path in files if (original / path).stat().st_size])
        file.write_bytes(damaged(file.read_bytes(), generator))
        before = resident()
        code, stderr = convert(kind, copy, target, seconds)
        wrong += [f"seed {seed}, {file.relative_to(copy)}: {it}" for it in mistakes_in(kind, code, stderr, target)]
        if resident() - before > ROOM:
            wrong.append(f"seed {seed}, {file.relative_to(copy)}: took {resident() - before} bytes")
        shutil.rmtree(copy)
        shutil.rmtree(target, ignore_errors=True)
    return wrong


def resident() -> int:
    """The most memory that this process has held so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_child(function) -> tuple[int, str]:
    """Wait status of a forked process that calls it, and the lines that it returns."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(sender, "\n".join(function())[:60_000].encode())
            status = 0
        except BaseException:
            os.write(sender, traceback.format_exc()[-60_000:].encode())
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitpid(pid, 0)[1], said


@pytest.mark.parametrize(
    ("first", "count"), [(0, 5), pytest.param(1000, 300, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_randomly_damaged_checkpoint_is_one_line_of_error_or_unharmed(tmp_path, deadline, kind, first, count):
    original = make(kind, tmp_path)
    seeds = range(first, first + count)

    status, said = in_child(lambda: run_cases(kind, original, tmp_path, seeds, deadline(30)))

    assert said == ""
    assert status == 0
