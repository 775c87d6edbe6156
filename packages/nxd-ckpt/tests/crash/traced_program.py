"""Saves a new and an overwriting checkpoint and deletes it, with the calls counted; run under strace as a program.

python traced_program.py <root> <log>
"""

import sys
from pathlib import Path

import torch
from nxd_ckpt import delete, save
from system_calls import SystemCalls

root, log = map(Path, sys.argv[1:])
SystemCalls(0, log, None)
save(root, "t", {"w": torch.ones(3)}, extra={"a.txt": b"a"})
save(root, "t", {"w": torch.zeros(3)}, extra={"a.txt": b"b"}, overwrite=True)
delete(root, "t")
