"""Parses HLO text into `HloModule`: the format of XLA dumps, from torch-xla or JAX, before or after compilation.

Both printed forms are read: with types and `%` before operands, and the short one without. Sharding annotations,
layouts beyond the order of dims and backend configurations are kept as text or left out.
"""

import re
from collections.abc import Iterable, Iterator

from nxd_doctor.graphs.hlo import BITS, Array, Computation, HloModule, Instruction, Shape

_COMMENT = re.compile(r"/\*index=\d+\*/")
_NAME = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([\d,]*)[^}]*\})?")
_METADATA = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|([^\s}]+))')
_BRACKETS_AND_QUOTES = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_LITERALS = ("parameter", "constant")


def parse_hlo(text: str) -> HloModule:
    """Parse a module.

    Args:
        text: text of one module; lines before its "HloModule" line are skipped.

    Raises:
        ValueError: there is no module, or it has a line that is not HLO, which the message shows.
    """
    lines = _COMMENT.sub("", text).splitlines()
    begins = next((number for number, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if begins is None:
        raise ValueError(f'no line begins with "HloModule" in this text, which begins {text[:60]!r}; pass an HLO dump')
    name, *attributes = _split(lines[begins].removeprefix("HloModule "))
    computations: dict[str, Computation] = {}
    entry, current = "", ""
    body: list[Instruction] = []
    for line in _whole(lines[begins + 1 :]):
        if current and line.startswith("}"):
            computations[current] = Computation(current, tuple(body))
            current = ""
        elif current:
            body.append(_instruction(line))
        elif line.startswith("##"):  # the end marker of torch-xla's dumps
            break
        elif line.rstrip().endswith("{"):
            is_entry, current = _heading(line)
            body, entry = [], current if is_entry else entry
    if not entry or current:
        raise ValueError(f"module {name} has no complete ENTRY computation; is the dump cut off?")
    return HloModule(name, _pairs(attributes), computations, entry)


def integers(text: str) -> tuple[int, ...]:
    """The integers of an attribute such as "{0,1}"."""
    return tuple(int(digits) for digits in re.findall(r"-?\d+", text))


def integer_lists(text: str) -> tuple[tuple[int, ...], ...]:
    """The lists of integers of an attribute such as "{{0,1},{2,3}}"."""
    return tuple(integers(inner) for inner in re.findall(r"\{([^{}]*)\}", text))


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """The nonempty lines; a constant that spans several lines becomes one."""
    waiting = ""
    for line in lines:
        waiting = f"{waiting} {line.strip()}" if waiting else line
        if " constant(" in waiting and _NAME.match(waiting) and not _is_closed(waiting):
            continue
        if waiting.strip():
            yield waiting
        waiting = ""


def _heading(line: str) -> tuple[bool, str]:
    words = re.split(r"[({]", line, maxsplit=1)[0].split()
    return words[0] == "ENTRY", words[1 if words[0] == "ENTRY" else 0].lstrip("%")


def _instruction(line: str) -> Instruction:
    name = _NAME.match(line)
    after = 0
    if name is not None:
        after = _matching(line, name.end()) if line[name.end()] == "(" else line.find(" ", name.end())
    opcode = _OPCODE.match(line, after)
    if name is None or opcode is None:
        raise ValueError(f"not an HLO instruction: {line.strip()[:200]!r}")
    end = _matching(line, opcode.end() - 1)
    inside = line[opcode.end() : end - 1].strip()
    attributes = _pairs(_split(line[end:].lstrip(", ")))
    metadata = attributes.pop("metadata", "")
    is_literal = opcode[1] in _LITERALS
    return Instruction(
        name=name[2],
        shape=_shape(line[name.end() : after]),
        opcode=opcode[1],
        operands=() if is_literal else tuple(part.split()[-1].lstrip("%") for part in _split(inside)),
        literal=inside if is_literal else "",
        attributes=attributes,
        metadata={key: quoted or bare for key, quoted, bare in _METADATA.findall(metadata)},
        is_root=name[1] is not None,
    )


def _shape(text: str) -> Shape:
    text = text.strip()
    if text.startswith("("):
        return Shape(None, tuple(_shape(part) for part in _split(text[1:-1])))
    array = _ARRAY.match(text)
    if array is None:
        raise ValueError(f"not a shape: {text[:200]!r}")
    dtype, dims = array[1], integers(array[2])
    if dtype not in BITS and not dtype.startswith("f8"):
        raise ValueError(f"unknown element type {dtype!r} of shape {text[:80]!r}; known are {', '.join(BITS)}")
    return Shape(Array(dtype, dims, integers(array[3] or "") or tuple(reversed(range(len(dims))))))


def _matching(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`; the end of the text if it is not closed."""
    depth = 0
    for match in _BRACKETS_AND_QUOTES.finditer(text, start):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if depth == 0:
                return match.end()
    return len(text)


def _is_closed(text: str) -> bool:
    brackets = [match[0] for match in _BRACKETS_AND_QUOTES.finditer(text) if match[0] in "()[]{}"]
    return sum(1 if bracket in "([{" else -1 for bracket in brackets) == 0


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes."""
    parts, depth, begins = [], 0, 0
    for match in _BRACKETS_AND_QUOTES.finditer(text):
        if match[0] == "," and depth == 0:
            parts.append(text[begins : match.start()].strip())
            begins = match.end()
        elif match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
    return [part for part in (*parts, text[begins:].strip()) if part]


def _pairs(parts: Iterable[str]) -> dict[str, str]:
    return {key.strip(): value for key, _, value in (part.partition("=") for part in parts)}
