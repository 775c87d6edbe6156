"""The calls that the tests here count are all that there are: strace, which sees the kernel's side, agrees."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .system_calls import calls_in

CHANGING = [
    "write",
    "pwrite64",
    "writev",
    "pwritev",
    "pwritev2",
    "fsync",
    "fdatasync",
    "sync",
    "syncfs",
    "sync_file_range",
    "rename",
    "renameat",
    "renameat2",
    "mkdir",
    "mkdirat",
    "unlink",
    "unlinkat",
    "rmdir",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "truncate",
    "ftruncate",
    "fallocate",
    "openat",
    "open",
    "creat",
    "openat2",
    "copy_file_range",
    "sendfile",
    "splice",
    "msync",
    "mknod",
    "mknodat",
    "chmod",
    "fchmod",
    "fchmodat",
    "chown",
    "fchown",
    "fchownat",
    "utimensat",
    "setxattr",
    "fsetxattr",
    "io_uring_enter",
]
KERNEL_NAME = {"open": "openat", "replace": "rename", "remove": "unlink"}


def seen_by_strace(trace: Path, root: Path) -> list[str]:
    """Names of the calls on anything below the root, except opens that change nothing."""
    lines = [line.split(maxsplit=1)[1] for line in trace.read_text().splitlines() if str(root) in line]
    names = [line.partition("(")[0] for line in lines if "O_RDONLY" not in line]
    # the kernel has these with a folder's descriptor, Python without
    return [{"unlinkat": "unlink", "rmdir": "unlink", "mkdirat": "mkdir"}.get(name, name) for name in names]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, to compare with")
def test_system_calls_that_are_counted_are_those_that_strace_sees(tmp_path, fresh_python):
    trace, root, log = tmp_path / "trace", tmp_path / "root", tmp_path / "log"
    filters = "trace=" + ",".join(f"?{name}" for name in CHANGING)
    finished = subprocess.run(
        [
            *["strace", "-f", "-y", "-qq", "-e", filters, "-e", "signal=none", "-o", str(trace)],
            *[fresh_python, str(Path(__file__).with_name("traced_program.py")), str(root), str(log)],
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if re.search("PTRACE|ptrace", finished.stderr):
        pytest.skip(f"strace may not trace here: {finished.stderr.strip()}")
    assert finished.returncode == 0, finished.stderr

    counted = [KERNEL_NAME.get(call.name, call.name) for call in calls_in(log) if str(root) in call.path + call.target]
    counted = ["unlink" if name == "rmdir" else name for name in counted]
    on_parent = [call for call in calls_in(log) if str(root) not in call.path + call.target]
    assert [call.name for call in on_parent] == ["fsync"]  # of the root's own folder
    assert counted.count("fsync") >= 10
    assert counted == seen_by_strace(trace, root)
