"""The process that renders chat templates, started by `rendering.py`. It imports only jinja2.

Templates are untrusted code. jinja2's sandbox isolates them from this machine, and the limits here bound their time and
memory. The text is the same as transformers renders. The answer also tells which part of it comes from which message:
a mark is written at the start of each pass of a loop over messages, and removed again.
"""

import json
import re
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

NUM_TEMPLATES = 8  # that are kept compiled
_LABEL = secrets.token_hex(8)
_MARK = re.compile(rf"\x00{_LABEL} (start|end|open|close) (\d+) (\d+)\x00")


class _Rendered(NamedTuple):
    """A text without marks, and the origins of its parts; see `rendering.Rendered`."""

    text: str
    passes: list[tuple[int, int, int]]
    generated: list[tuple[int, int]]
    end: int


class _Generation(Extension):
    """`{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    environment: Any  # with `marks`: whether to write them

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        environment.extend(marks=False)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return _mark("open") + caller() + _mark("close") if self.environment.marks else caller()


class _Namespace(Namespace):
    """A namespace without access to the attributes of Python objects."""

    def __init__(*arguments: Any, **attributes: Any) -> None:
        self, *positional = arguments
        attributes = dict(*positional, **attributes)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


class _Dict:
    """Makes dictionaries without giving templates access to the class."""

    def __call__(self, *arguments: Any, **items: Any) -> dict[Any, Any]:
        return dict(*arguments, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"a namespace cannot have the attribute {name!r}")


def _mark(kind: str, message: int = 0, loop: int = 0) -> str:
    return f"\0{_LABEL} {kind} {message} {loop}\0"


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Any:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


class _Renderer:
    """Compiles templates when they are first used, and renders them."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._compiled: dict[tuple[str, bool], Template] = {}

    def render(self, request: Mapping[str, Any], job: Mapping[str, Any]) -> _Rendered:
        messages = request["messages"][: job["count"]] if job["messages"] is None else job["messages"]
        numbers = {id(message): number for number, message in enumerate(messages)}

        def start(value: object, loop: int) -> str:
            return _mark("start", numbers[id(value)], loop) if id(value) in numbers else ""

        self._environment.marks = job["marked"]
        template = self._template(request["template"], marked=job["marked"])
        pieces, length = [], 0
        for piece in template.generate(
            **request["variables"],
            messages=messages,
            tools=request["tools"],
            documents=None,
            add_generation_prompt=job["asks"],
            _nxd_start=start,
            _nxd_end=lambda loop: _mark("end", 0, loop),
        ):
            pieces.append(piece)
            length += len(piece)
            if length > request["max_characters"]:
                raise TemplateError(f"it renders more than {request['max_characters']} characters")
        return _parts("".join(pieces))

    def _template(self, source: str, *, marked: bool) -> Template:
        if (source, marked) not in self._compiled:
            tree = self._environment.parse(source)
            if marked:
                _mark_loops(tree)
            code = self._environment.compile(tree)
            template = Template.from_code(self._environment, code, self._environment.make_globals(None))
            self._compiled = dict(list(self._compiled.items())[1 - NUM_TEMPLATES :])
            self._compiled[source, marked] = template
        return self._compiled[source, marked]


def _mark_loops(tree: nodes.Template) -> None:
    """Make each loop with one variable write a mark at the start of a pass over a message, and after the last."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for _, children in parent.iter_fields():
            for child in list(children) if isinstance(children, list) else ():
                if isinstance(child, nodes.For) and isinstance(child.target, nodes.Name):
                    number = nodes.Const(id(child))
                    child.body.insert(0, _call("_nxd_start", [nodes.Name(child.target.name, "load"), number]))
                    children.insert(children.index(child) + 1, _call("_nxd_end", [number]))


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Node:
    return nodes.Output([nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)])


def _parts(marked: str) -> _Rendered:
    """Remove the marks from a text, and return the parts that they delimit."""
    pieces, passes, generated = [], [], []
    running: list[tuple[int, int, int]] = []  # loop, message and start of each open pass
    opened: list[int] = []
    length = last = end = 0

    def close(loop: int) -> None:
        while any(number == loop for number, _, _ in running):
            _, message, start = running.pop()
            passes.append((message, start, length))

    for found in _MARK.finditer(marked):
        pieces.append(marked[last : found.start()])
        length += len(pieces[-1])
        last = found.end()
        kind, message, loop = found[1], int(found[2]), int(found[3])
        if kind == "start":
            close(loop)  # the previous pass, which may have ended with `{% continue %}`
            running.append((loop, message, length))
        elif kind == "end":
            if any(number == loop for number, _, _ in running):
                close(loop)
                end = length
        elif kind == "open":
            opened.append(length)
        elif opened:
            generated.append((opened.pop(), length))
    pieces.append(marked[last:])
    length += len(pieces[-1])
    while running:
        close(running[-1][0])
    return _Rendered("".join(pieces), sorted(passes, key=lambda it: it[1:]), sorted(generated), end)


def _limit_memory(num_bytes: int) -> None:
    """Limit memory to this much beyond the current use, if the system supports such a limit."""
    with suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + num_bytes if hard == resource.RLIM_INFINITY else min(used + num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main(max_seconds: float, max_bytes: int) -> None:
    """Answer requests until the input ends.

    Args:
        max_seconds: processor time per request; a request that exceeds it ends the process.
        max_bytes: memory per request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    requests, answers = Connection(0, writable=False), Connection(1, readable=False)
    renderer = _Renderer()
    _limit_memory(max_bytes)
    while True:
        try:
            request = requests.recv_bytes()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        answer = json.dumps(_answers(renderer, json.loads(request), max_bytes)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.send_bytes(answer)


def _answers(renderer: _Renderer, request: Mapping[str, Any], max_bytes: int) -> Sequence[Mapping[str, Any]]:
    answers: list[Mapping[str, Any]] = []
    for job in request["jobs"]:
        try:
            answers.append(renderer.render(request, job)._asdict())
        except MemoryError:
            answers.append({"error": f"it takes more than {max_bytes >> 20} MiB of memory"})
        except Exception as error:  # templates may raise anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            answers.append({"error": reason[:500]})
    return answers


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
