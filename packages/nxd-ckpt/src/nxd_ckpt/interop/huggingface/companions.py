"""The files that a model needs besides config and weights: of its tokenizer, chat template, processor and generation.

They lie beside a model in its folder, and travel inside a checkpoint as its extra files. Folders and checkpoints may
come from strangers: a file has one of the names that such files have, and is never looked for outside of either.
"""

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from nxd_ckpt.reader import Checkpoint

GENERATION_CONFIG_FILE = "generation_config.json"

# Files that `save_pretrained` of tokenizers writes: what has an effect on a tokenizer.json, and all others. Names are
# these alone: what is called "token", or "tokens.json", may be a password.
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
# And what models and processors have besides weights.
_OTHER_FILES = (GENERATION_CONFIG_FILE, "*preprocessor_config.json", "processor_config.json")
_NAME = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}")
MAX_COMPANION_BYTES = 256 * 2**20  # of all files; the largest tokenizers have some 50 MB

_EXTRA = "model-"  # before their names among a checkpoint's extra files, which have no folders
_FOLDER, _FOLDER_IN_EXTRA = "additional_chat_templates/", "additional_chat_templates-"


def is_companion(name: str) -> bool:
    """Whether a file of this name lies beside models: of a tokenizer, a processor, or the generation config."""
    return is_of_tokenizer(name) or _matches(name, _OTHER_FILES)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name is a tokenizer's, or a chat template."""
    return _matches(name, _TOKENIZER_FILES)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    in_folder = "/" in name
    allowed = _NAME.fullmatch(name) is not None
    return allowed and any(("/" in it) == in_folder and fnmatchcase(name, it) for it in patterns)


def read_companions(source: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files of tokenizer, processor and generation that lie beside a model, no matter how it is stored.

    Args:
        source: a folder; or the one file of a tokenizer, which brings along what lies beside it of the tokenizer.

    Returns:
        Their contents, by their names in the folder.

    Raises:
        ValueError: one is a link that leads out of the folder, so that a file of this machine would be carried away; or
            they are too large to be what they are called.
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
    """Raise ValueError for a symbolic link that leads out of a folder; in the hub's cache, out of the repository's."""
    root = Path(os.path.realpath(folder))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    target = Path(os.path.realpath(file))
    if not any(target.is_relative_to(it) for it in roots):
        raise ValueError(
            f"{file} is a symbolic link that points outside {folder}, to {target}; the folder's files are copied, and "
            "a link may point to any file of this machine, so put the file itself there"
        )


def write_companions(files: Mapping[str, bytes], folder: str | os.PathLike[str]) -> None:
    """Write what `read_companions` has read into an existing folder.

    Raises:
        ValueError: a name is of no such file.
    """
    for name, content in files.items():
        if not is_companion(name):
            raise ValueError(f"{name!r} is not the name of a tokenizer or processor file")
        file = Path(folder) / name
        file.parent.mkdir(exist_ok=True)  # of additional chat templates
        file.write_bytes(content)


def as_extra(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files as the extra ones of a checkpoint."""
    return {_EXTRA + name.replace(_FOLDER, _FOLDER_IN_EXTRA): content for name, content in files.items()}


def companions_in(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of the tokenizer, the chat template and generation that a checkpoint holds.

    Raises:
        ValueError: they are too large to be that.
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
            f"{MAX_COMPANION_BYTES:,}; it is damaged, or not what it seems"
        )
    return {name: checkpoint.read_extra(extra) for name, extra in stored.items()}
