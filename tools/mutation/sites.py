"""Where a source can be mutated, and how: replacements of one expression or statement, found by its syntax tree.

Only code inside functions counts. Left alone are messages, logs, annotations, `__repr__`, assertions, and branches for
type checkers. A replacement has as many lines as what it replaces.
"""

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SUMS = re.compile(r"(^|_)(all_reduced?|reduce_scatter|all_gather|all_to_all|broadcast)(_|$)|^sum$")
RANK = re.compile(r"(^|_)rank$")
NO_RANK = re.compile(r"lora|per_rank|(^|_)(on|of|by)_")
LOGGERS = re.compile(r"^_?(log|logger|logging|warnings)$", re.IGNORECASE)
MESSAGES = ("print", "warn", "warn_once")
NOT_MUTATED = ("__repr__", "__str__")
DTYPES = {"torch.float32": "torch.bfloat16", "torch.float64": "torch.float32"}
CASTS = {"float": "bfloat16", "double": "float"}
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}


@dataclass(frozen=True)
class Mutation:
    """A replacement of what is from `line`, `column` (in bytes, from 0) to `end_line`, `end_column`."""

    id: int
    operator: str
    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str
    is_statement: bool = False

    @property
    def span(self) -> tuple[int, int, int, int]:
        """Where it is in its file."""
        return self.line, self.column, self.end_line, self.end_column


def seed(root: Path, count: int, seed: int) -> list[Mutation]:
    """`count` mutations of packages/*/src, by package in proportion to lines, two at least, and of all operators."""
    sites: dict[str, list[Mutation]] = defaultdict(list)
    lines: Counter[str] = Counter()
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        file = path.relative_to(root).as_posix()
        package, source = file.split("/")[1], path.read_text()
        lines[package] += source.count("\n")
        sites[package] += find(source, file)
    chance, used = random.Random(seed), Counter[str]()
    chosen: dict[tuple[object, ...], Mutation] = {}
    for package, number in shares({package: lines[package] for package in sorted(sites)}, count).items():
        for _ in range(number):
            left: dict[str, list[Mutation]] = defaultdict(list)
            for mutation in sites[package]:
                if (mutation.file, mutation.span) not in chosen:
                    left[mutation.operator].append(mutation)
            rarest = min(sorted(left), key=lambda name: (used[name], chance.random()))
            mutation = chance.choice(left[rarest])
            chosen[mutation.file, mutation.span] = mutation
            used[rarest] += 1
    mutations = list(chosen.values())
    chance.shuffle(mutations)
    return [replace(mutation, id=number) for number, mutation in enumerate(mutations)]


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """`count` split in proportion to the sizes, two at least each."""
    found = {name: max(2, count * size // sum(sizes.values())) for name, size in sizes.items()}
    while sum(found.values()) != count:
        step = 1 if sum(found.values()) < count else -1
        able = [name for name in found if found[name] + step >= 2]
        if not able:
            raise ValueError(f"{count} mutations are too few for {len(sizes)} packages; use {2 * len(sizes)} or more")
        found[min(able, key=lambda name: step * (found[name] / sizes[name]))] += step
    return found


def find(source: str, file: str) -> Iterator[Mutation]:
    """All mutations of a file, in order, without numbers."""
    return _Sites(source, file).of_module()


def apply(source: str, mutation: Mutation) -> str:
    """The source with the mutation."""
    data = source.encode()
    begin, end = _offsets(data, mutation)
    if data[begin:end].decode() != mutation.before:
        raise ValueError(f"{mutation.file}:{mutation.line} is not what mutation {mutation.id} replaces; seed anew")
    return (data[:begin] + mutation.after.encode() + data[end:]).decode()


def mark(source: str, mutations: list[Mutation]) -> str:
    """The source with a call of the marker at each mutation's place."""
    data = source.encode()
    inserted: list[tuple[int, int, str]] = []  # offset, order among those at the same one, text
    for mutation in mutations:
        begin, end = _offsets(data, mutation)
        call = f"__nxd_reached__({mutation.id})"
        if mutation.is_statement:
            inserted.append((begin, -1 << 60, f"{call}; "))
        else:
            inserted += [(begin, -end, f"({call} or ("), (end, -(1 << 40) - begin, "))")]
    for offset, _, text in sorted(inserted, reverse=True):
        data = data[:offset] + text.encode() + data[offset:]
    return data.decode()


def _offsets(data: bytes, mutation: Mutation) -> tuple[int, int]:
    starts = _starts_of_lines(data)
    return starts[mutation.line - 1] + mutation.column, starts[mutation.end_line - 1] + mutation.end_column


def _starts_of_lines(data: bytes) -> list[int]:
    return [0, *(match.end() for match in re.finditer(b"\n", data))]


class _Sites:
    def __init__(self, source: str, file: str) -> None:
        self._file = file
        self._data = source.encode()
        self._starts = _starts_of_lines(self._data)
        self._tree = ast.parse(source)
        parents = (node for node in ast.walk(self._tree) if isinstance(node, ast.Attribute | ast.Subscript))
        self._with_parts = {id(node.value) for node in parents}  # objects of an attribute or index
        self._function = ""  # the text of the function that is looked at
        self._counting = False  # in a slice, range or comparison, where numbers are borders

    def of_module(self) -> Iterator[Mutation]:
        for node in _functions_of(self._tree):
            yield from self._of_function(node)

    def _of_function(self, node: ast.AST) -> Iterator[Mutation]:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name in NOT_MUTATED:
            return
        outer, self._function = self._function, self._text(node)
        for statement in node.body:
            yield from self._of(statement)
        self._function = outer

    def _of(self, node: ast.AST) -> Iterator[Mutation]:
        if _is_left_alone(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._of_function(node)
            return
        for operator, after in self._mutated(node):
            yield self._mutation(node, operator, after)
        if isinstance(node, ast.If | ast.IfExp):
            if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
                yield self._mutation(node.test, "skip a check", f"(({self._text(node.test)}) and False)")
            else:
                yield self._mutation(node.test, "invert a condition", f"(not ({self._text(node.test)}))")
        counting = self._counting
        if isinstance(node, ast.Slice | ast.Compare) or (isinstance(node, ast.Call) and _name(node.func) == "range"):
            self._counting = True
        elif isinstance(node, ast.Call | ast.stmt | ast.Subscript):
            self._counting = False
        for child in _evaluated(node):
            yield from self._of(child)
        self._counting = counting

    def _mutated(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """The operators that fit, and what they put in place of the node."""
        match node:
            case ast.Expr(ast.Call() as call) if SUMS.search(_name(call.func)):
                yield "drop a sum", "pass" + "\n" * self._text(node).count("\n")
            case ast.AugAssign(op=ast.Add()):
                yield "drop a sum", "pass" + "\n" * self._text(node).count("\n")
            case ast.Assign(value=ast.Call(args=[first, *_]) as call) if SUMS.search(_name(call.func)):
                targets = self._text(node)[: -len(self._text(call))]
                lines = "\n" * (self._text(call).count("\n") - self._text(first).count("\n"))
                yield "drop a sum", f"{targets}({self._text(first)}){lines}"
            case ast.BinOp() if type(node.op) in OPERATORS and not _is_sequence(node.left, node.right):
                yield from self._with_operator("flip a sign", node, node.left, node.op, node.right)
            case ast.UnaryOp(op=ast.USub()):
                yield "flip a sign", f"({self._text(node.operand)})"
            case ast.Compare(ops=[op], comparators=[right]) if type(op) in OPERATORS:
                yield from self._with_operator("off by one", node, node.left, op, right)
            case ast.Constant(value=int(value)) if self._counting and not isinstance(value, bool):
                yield "off by one", str(value + 1)
            case ast.Attribute() if (text := self._text(node)) in DTYPES:
                yield "wrong dtype", DTYPES[text]
            case ast.Call(func=ast.Attribute(value=tensor, attr=cast), args=[], keywords=[]) if cast in CASTS:
                yield "wrong dtype", f"{self._text(tensor)}.{CASTS[cast]}()"
        if isinstance(node, ast.Name | ast.Attribute | ast.Call):
            yield from self._other_rank(node)

    def _other_rank(self, node: ast.Name | ast.Attribute | ast.Call) -> Iterator[tuple[str, str]]:
        called = isinstance(node, ast.Call)
        name, text = _name(node.func if isinstance(node, ast.Call) else node), self._text(node)
        if not RANK.search(name) or NO_RANK.search(name) or (called and not name.startswith("get_")):
            return
        if id(node) in self._with_parts:  # an object that knows its rank
            return
        if name == "rank" and "/nxd-lora/" in self._file:  # of a factor, not of a process
            return
        if isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            size = re.sub(r"rank(?=$|\()", "world_size" if called else "size", text)
            is_known = called or re.search(rf"(?<![\w.]){re.escape(size)}(?!\w)", self._function)
            yield "swap a rank", f"({size} - 1 - {text})" if is_known and size != text else "0"

    def _with_operator(
        self, name: str, node: ast.expr, left: ast.expr, operator: ast.AST, right: ast.expr
    ) -> Iterator[tuple[str, str]]:
        (begin, end), ends, begins = self._span(node), self._span(left)[1], self._span(right)[0]
        between = self._data[ends:begins].decode()
        old, new = OPERATORS[type(operator)]
        if between.count(old) == 1 and "#" not in between:
            yield name, self._data[begin:ends].decode() + between.replace(old, new) + self._data[begins:end].decode()

    def _mutation(self, node: ast.stmt | ast.expr | ast.AST, operator: str, after: str) -> Mutation:
        assert isinstance(node, ast.stmt | ast.expr)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
        return Mutation(-1, operator, self._file, *span, self._text(node), after, isinstance(node, ast.stmt))

    def _text(self, node: ast.expr | ast.stmt) -> str:
        return self._data[slice(*self._span(node))].decode()

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset


def _functions_of(node: ast.AST) -> Iterator[ast.AST]:
    """Those of a module or class and of the classes in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif not (isinstance(child, ast.If) and _name(child.test) == "TYPE_CHECKING"):
            yield from _functions_of(child)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Match() | ast.Delete():
            return True
        case ast.Expr(ast.Constant()):
            return True
        case ast.If(test=test):
            return _name(test) == "TYPE_CHECKING"
        case ast.Call(func=ast.Attribute(value=logger)) if LOGGERS.search(_name(logger)):
            return True
        case ast.Call(func=func):
            return _name(func) in MESSAGES
    return False


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """What is in it, but annotations, and the function of a call, of which only the object counts."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "decorator_list"}:
            continue
        if isinstance(node, ast.Call) and name == "func":
            if isinstance(value, ast.Attribute):
                yield value.value
        elif isinstance(node, ast.Lambda) and name == "args":
            continue
        else:
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def _name(node: ast.AST) -> str:
    """The last name in `a.b.c` or `c`, else nothing."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_sequence(*nodes: ast.expr) -> bool:
    """Whether one is written as a text, list or tuple, of which a sum has no other sign."""
    literals = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    return any(
        isinstance(node, literals) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )
