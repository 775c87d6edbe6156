"""The files that a model needs besides config and weights: tokenizer, chat template, processor, generation config.

They are stored next to a model in its folder, and in a checkpoint as extra files. Folders and checkpoints may be
untrusted: only files with known names are read, and never from outside the folder or checkpoint.
"""

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from nxd_ckpt.reader import Checkpoint

GENERATION_CONFIG_FILE = "generation_config.json"

# Files that a tokenizer's `save_pretrained` writes: first those that affect a tokenizer.json, then all others. No other
# names are allowed: a file called "token" or "tokens.json" may hold a password.
_BESIDE_TOKENIZER_JSON = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_TOKENIZER_FILES = (
    *_BESIDE_TOKENIZER_JSON,
    "tokenizer*.json",
    "*.tiktoken",
    "*.model",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
)
# Other files of models and processors besides weights.
_OTHER_FILES = (GENERATION_CONFIG_FILE, "*preprocessor_config.json", "processor_config.json")
_NAME = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}")
MAX_COMPANION_BYTES = 256 * 2**20  # for all files together; the largest tokenizers have about 50 MB

_EXTRA = "model-"  # prefix of their names among a checkpoint's extra files, which have no folders
_FOLDER, _FOLDER_IN_EXTRA = "additional_chat_templates/", "additional_chat_templates-"


def is_companion(name: str) -> bool:
    """Whether a file name belongs to a tokenizer, a processor, or the generation config."""
    return is_of_tokenizer(name) or _matches(name, _OTHER_FILES)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file name belongs to a tokenizer or a chat template."""
    return _matches(name, _TOKENIZER_FILES)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    in_folder = "/" in name
    allowed = _NAME.fullmatch(name) is not None
    return allowed and any(("/" in it) == in_folder and fnmatchcase(name, it) for it in patterns)


def read_companions(source: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read the tokenizer, processor and generation config files next to a model, no matter how it is stored.

    Args:
        source: a folder; or a single tokenizer file, in which case the tokenizer files next to it are included.

    Returns:
        The contents, by file name in the folder.

    Raises:
        ValueError: a file is a link that points outside the folder, which could copy any file of this machine; or the
            files are larger than tokenizer files can be.
    """
    path = Path(source)
    folder = path.parent if path.is_file() else path
    files = {
        file.relative_to(folder).as_posix(): file
        for file in [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
        if file.is_file()
    }
    if path.is_file():
        beside = {name: file for name, file in files.items() if _matches(name, _BESIDE_TOKENIZER_JSON)}
        files = beside | {"tokenizer.json": path}
    found: dict[str, bytes] = {}
    room = MAX_COMPANION_BYTES
    for name in filter(is_companion, sorted(files)):
        check_lies_in(files[name], folder)
        with files[name].open("rb") as stream:
            found[name] = stream.read(room + 1)
        room -= len(found[name])
        if room < 0:
            raise ValueError(f"{files[name]}: the files of a tokenizer are more than {MAX_COMPANION_BYTES:,} bytes")
    return found


def check_lies_in(file: Path, folder: Path) -> None:
    """Raise ValueError for a symbolic link that points outside a folder or, in the hub's cache, its repository."""
    root = Path(os.path.realpath(folder))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    target = Path(os.path.realpath(file))
    if not any(target.is_relative_to(it) for it in roots):
        raise ValueError(
            f"{file} is a symbolic link that points outside {folder}, to {target}; the folder's files are copied, and "
            "a link may point to any file of this machine, so put the file itself there"
        )


def write_companions(files: Mapping[str, bytes], folder: str | os.PathLike[str]) -> None:
    """Write the files returned by `read_companions` to an existing folder.

    Raises:
        ValueError: a name is not that of such a file.
    """
    for name, content in files.items():
        if not is_companion(name):
            raise ValueError(f"{name!r} is not the name of a tokenizer or processor file")
        file = Path(folder) / name
        file.parent.mkdir(exist_ok=True)  # for additional chat templates
        file.write_bytes(content)


def as_extra(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files as extra files of a checkpoint."""
    return {_EXTRA + name.replace(_FOLDER, _FOLDER_IN_EXTRA): content for name, content in files.items()}


def companions_in(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the tokenizer, chat template and generation config files in a checkpoint.

    Raises:
        ValueError: they are larger than such files can be.
        CheckpointError: they are damaged.
    """
    stored = {name.removeprefix(_EXTRA): name for name in checkpoint.extra if name.startswith(_EXTRA)}
    stored = {name.replace(_FOLDER_IN_EXTRA, _FOLDER): extra for name, extra in stored.items()}
    stored = {name: extra for name, extra in stored.items() if is_companion(name)}
    manifest = checkpoint.manifest
    num_bytes = sum(manifest.files[manifest.extra[name].file] for name in stored.values())
    if num_bytes > MAX_COMPANION_BYTES:
        raise ValueError(
            f"checkpoint {checkpoint.tag!r} holds {num_bytes:,} bytes of tokenizer files, more than the limit of "
            f"{MAX_COMPANION_BYTES:,}; it is damaged, or another program wrote it"
        )
    return {name: checkpoint.read_extra(extra) for name, extra in stored.items()}
