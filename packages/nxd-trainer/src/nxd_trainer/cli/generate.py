"""`nxd generate`: generate text with a model, or answer in a conversation."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nxd_cli.command import (
    UserError,
    add_nproc,
    check_own_process,
    leave_mesh,
    make_parser,
    parse,
    reports_user_errors,
    started_ranks,
)
from nxd_cli.launch import own_threads

from nxd_trainer.cli.arguments import add_model, compile_model, open_compilable

if TYPE_CHECKING:
    from nxd_trainer.opened_model import TextCodec

_LENGTHS = 128  # compiled lengths are multiples of this, so that other prompts hit the program cache
_LONGEST_TALK = 4096  # tokens of a compiled conversation, whose prompts are not known in advance
_PROMPT = "def "
_NEW_TOKENS = 200
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)

OnToken = Callable[[int], None]
Write = Callable[[list[int], OnToken], object]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "generate",
        "Generate text with a model, or chat with it.",
        examples=[
            "nxd generate run --prompt 'import '",
            "nxd generate Qwen3-0.6B --chat --prompt 'What is a mesh?'",
            "nxd generate run --nproc 2 --temperature 0.8 --max-new-tokens 50",
        ],
    )
    add_model(parser)
    parser.add_argument("--prompt", help=f"text to continue (default: {_PROMPT!r}); with --chat, to answer")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer with the model's chat template; without --prompt each line of standard input is a turn",
    )
    parser.add_argument("--system", help="with --chat: the system prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"default: {_NEW_TOKENS}, or fewer if the model has no room"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: most likely token (default)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="0: all tokens (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="most likely tokens up to this total")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="minimum, relative to the likeliest")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="F", help="1: none (default)")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="F", help="-2 to 2; 0: none (default)")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="F", help="-2 to 2; 0: none (default)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="random seed for sampling (default: %(default)s)")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile the model first, for longer texts; implied by --draft; with --nproc, tensor-parallel workers",
    )
    parser.add_argument("--compiler", help="with --compiled: inductor or export; unset: the one available here")
    add_nproc(parser, "--tensor-parallel-size")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the prompt and the model's continuation, or the answers in a conversation."""
    options = parse(_parser(), arguments)
    if "" in options.stop:
        raise UserError("--stop is empty; give the text to stop before")
    if not options.chat and options.system is not None:
        raise UserError("--system is for conversations; add --chat")
    if options.compiled or options.draft is not None:
        return _run_compiled(options)
    if options.chat and options.prompt is None and options.nproc not in (None, 1):
        raise UserError("several ranks cannot read a conversation from standard input; give --prompt or --compiled")
    for name in ("context_parallel_size", "expert_parallel_size"):
        if getattr(options, name) != 1:
            raise UserError(f"--{name.replace('_', '-')} is for compiled models; add --compiled")
    code = started_ranks(options.nproc, "generate", arguments)
    if code is not None:
        return code

    import torch  # noqa: PLC0415
    from nxd_state import get_world_group, initialize_model_parallel  # noqa: PLC0415

    from nxd_trainer.generate import generate, load_with_codec, max_positions  # noqa: PLC0415

    sampling = _sampling(options)
    initialize_model_parallel(int(os.environ.get("WORLD_SIZE", "1")))
    model, codec = reports_user_errors(
        lambda: load_with_codec(options.model, options.tag, tokenizer=options.tokenizer, adapter=options.adapter)
    )
    codec, longest = codec.ending_at(options.stop), max_positions(model)

    def write(prompt: list[int], on_token: OnToken) -> None:
        num_new = _num_new_tokens(options, prompt, longest)
        tokens = torch.tensor(prompt)
        for token in generate(model, tokens, max_new_tokens=num_new, stop_tokens=codec.end_tokens, **sampling):
            on_token(token)

    with own_threads():
        _write_texts(options, codec, write, is_shown=get_world_group().rank == 0)
    leave_mesh()
    return 0


def _run_compiled(options: argparse.Namespace) -> int:
    reports_user_errors(lambda: check_own_process(options.nproc, "--compiled"))

    from nxd_trace import start_fork_server  # noqa: PLC0415

    start_fork_server()  # loads its libraries while this process loads its own
    from nxd_trainer.generate import check_length  # noqa: PLC0415

    sampling = _sampling(options)  # before the minutes that compiling may take
    checkpoint, draft, longest = open_compilable(options)
    if draft is not None and options.temperature > 0:
        print("nxd generate: --draft only helps with --temperature 0; sampling does not use it", file=sys.stderr)
    codec = checkpoint.codec.ending_at(options.stop)
    if options.chat and options.prompt is None:
        length = min(_LONGEST_TALK, longest)
    else:
        prompt = _first_prompt(options, codec)
        num_new = _num_new_tokens(options, prompt, longest)
        reports_user_errors(lambda: check_length(len(prompt), num_new, longest))
        needed = len(prompt) + num_new
        length = max(needed, min(-(-needed // _LENGTHS) * _LENGTHS, longest))
    generator = compile_model(options, checkpoint, draft, batch_size=1, max_length=length)

    def write(prompt: list[int], on_token: OnToken) -> None:
        generator.generate(
            [prompt],
            max_new_tokens=_num_new_tokens(options, prompt, length),
            stop_tokens=codec.end_tokens,
            on_token=lambda _, token: on_token(token),
            **sampling,
        )

    with generator:
        _write_texts(options, codec, write, is_shown=True)
    return 0


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    from nxd_trace.generation import SamplingSettings  # noqa: PLC0415

    sampling = {name: getattr(options, name) for name in _SAMPLING}
    given = {} if options.max_new_tokens is None else {"max_new_tokens": options.max_new_tokens}
    reports_user_errors(lambda: SamplingSettings(**sampling, **given))
    return sampling


def _num_new_tokens(options: argparse.Namespace, prompt: list[int], longest: int | None) -> int:
    """Return `--max-new-tokens`; without it the usual number, or as many as a text of `longest` tokens has room for."""
    if options.max_new_tokens is not None:
        return int(options.max_new_tokens)
    return _NEW_TOKENS if longest is None else max(1, min(_NEW_TOKENS, longest - len(prompt)))


def _write_texts(options: argparse.Namespace, codec: "TextCodec", write: Write, *, is_shown: bool) -> None:
    """Generate the requested texts, and show them as they are generated."""
    show = _show if is_shown else _show_nothing
    if not options.chat:
        if options.prompt is None and is_shown:
            print(f"nxd generate: no --prompt is given; continuing {_PROMPT!r}", file=sys.stderr, flush=True)
        show(_text_of(options))
        _write_text(_first_prompt(options, codec), options, codec, write, show)
        return
    messages = _system_message(options)
    turns: Iterable[str] = sys.stdin if options.prompt is None else [options.prompt]
    for turn in turns:
        if not turn.strip():
            continue
        messages.append({"role": "user", "content": turn.rstrip("\n")})
        prompt = _chat_prompt(messages, codec)
        messages.append({"role": "assistant", "content": _write_text(prompt, options, codec, write, show)})


def _write_text(
    prompt: list[int], options: argparse.Namespace, codec: "TextCodec", write: Write, show: Callable[[str], None]
) -> str:
    """Generate one text, show it with a newline, and return it."""
    from nxd_trace.serving.detokenizer import IncrementalDetokenizer, StopString  # noqa: PLC0415

    detokenizer = IncrementalDetokenizer(codec.tokenizer.decode, [StopString(text) for text in options.stop])
    pieces: list[str] = []

    def give(text: str) -> None:
        pieces.append(text)
        show(text)

    def on_token(token: int) -> None:
        if token not in codec.end_tokens:
            give(detokenizer.push(token))
        if detokenizer.stopped:
            raise _StopTextFound

    try:
        reports_user_errors(lambda: write(prompt, on_token))
    except _StopTextFound:
        pass
    else:
        give(detokenizer.flush())
    show("\n")
    return "".join(pieces)


class _StopTextFound(Exception):
    """Ends a text."""


def _first_prompt(options: argparse.Namespace, codec: "TextCodec") -> list[int]:
    if options.chat:
        return _chat_prompt([*_system_message(options), {"role": "user", "content": options.prompt}], codec)
    from nxd_trainer.data.tokenizer import encode_prompt  # noqa: PLC0415

    return reports_user_errors(lambda: encode_prompt(codec.tokenizer, _text_of(options)))


def _text_of(options: argparse.Namespace) -> str:
    return _PROMPT if options.prompt is None else str(options.prompt)


def _system_message(options: argparse.Namespace) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _chat_prompt(messages: list[dict[str, str]], codec: "TextCodec") -> list[int]:
    chat = codec.chat
    if chat is None:
        raise UserError(
            "--chat needs a chat template, which the model's tokenizer does not have; give the --tokenizer folder of a "
            "chat model, or leave out --chat"
        )
    return reports_user_errors(lambda: chat.encode_prompt(messages))


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_nothing(text: str) -> None:
    del text
