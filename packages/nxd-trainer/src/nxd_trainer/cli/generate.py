"""`nxd generate`: generate text with a model, or answer in a conversation."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

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
from nxd_trainer.cli.prompts import Conversation, Prompt, PromptReader, read_images

if TYPE_CHECKING:
    from nxd_trace.generation import PromptInputs

    from nxd_trainer.image_prompts import ImagePrompts
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

_IMAGE = "/image "  # a line of a conversation with the file of an image for the next turn

OnToken = Callable[[int], None]
Write = Callable[[Prompt, OnToken], object]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "generate",
        "Generate text with a model, or chat with it.",
        examples=[
            "nxd generate run --prompt 'import '",
            "nxd generate Qwen3-0.6B --chat --prompt 'What is a mesh?'",
            "nxd generate run --nproc 2 --temperature 0.8 --max-new-tokens 50",
            "nxd generate gemma-3-4b-it --chat --image cat.png --prompt 'What is this?'",
        ],
    )
    add_model(parser)
    parser.add_argument("--prompt", help=f"text to continue (default: {_PROMPT!r}); with --chat, to answer")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer with the model's chat template; without --prompt each line of standard input is a turn, and "
        f"'{_IMAGE}FILE' adds an image to the next one",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image before the prompt, or in the first turn with --chat; may be repeated",
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

    from nxd_trainer.generate import generate, load_opened, max_positions  # noqa: PLC0415
    from nxd_trainer.image_prompts import ImagePrompts  # noqa: PLC0415
    from nxd_trainer.opened_model import open_codec, open_image_processor, open_model_together  # noqa: PLC0415

    sampling = _sampling(options)
    initialize_model_parallel(int(os.environ.get("WORLD_SIZE", "1")))
    opened = reports_user_errors(lambda: open_model_together(options.model, options.tag, adapter=options.adapter))
    codec = reports_user_errors(lambda: open_codec(opened, options.tokenizer)).ending_at(options.stop)

    def open_images() -> ImagePrompts[dict[str, torch.Tensor]]:
        processor = open_image_processor(opened, options.tokenizer)
        return ImagePrompts(processor, codec.chat, _without_ids)

    reader = PromptReader(codec, open_images)
    if options.image:
        _ = reader.images  # says so before the model is loaded if it reads text alone
    model = reports_user_errors(lambda: load_opened(opened))
    longest = max_positions(model)

    def write(prompt: Prompt, on_token: OnToken) -> None:
        num_new = _num_new_tokens(options, prompt, longest)
        tokens = torch.tensor(prompt.tokens)
        for token in generate(
            model, tokens, max_new_tokens=num_new, stop_tokens=codec.end_tokens, images=prompt.images, **sampling
        ):
            on_token(token)

    with own_threads():
        _write_texts(options, codec, reader, write, is_shown=get_world_group().rank == 0)
    leave_mesh()
    return 0


def _run_compiled(options: argparse.Namespace) -> int:
    reports_user_errors(lambda: check_own_process(options.nproc, "--compiled"))

    from nxd_trace import start_fork_server  # noqa: PLC0415

    start_fork_server()  # loads its libraries while this process loads its own
    from nxd_trainer.generate import check_length  # noqa: PLC0415

    sampling = _sampling(options)  # before the minutes that compiling may take
    is_talk = options.chat and options.prompt is None
    wanted: Literal["no", "yes", "if it reads them"] = (
        "yes" if options.image else "if it reads them" if is_talk else "no"
    )
    checkpoint, draft, longest = open_compilable(options, images=wanted)
    if draft is not None and options.temperature > 0:
        print("nxd generate: --draft only helps with --temperature 0; sampling does not use it", file=sys.stderr)
    codec = checkpoint.codec.ending_at(options.stop)

    def images() -> "ImagePrompts[PromptInputs]":
        if checkpoint.images is None:
            raise ValueError(f"{options.model} reads text alone, not images")
        return checkpoint.images

    reader = PromptReader(codec, images)
    if is_talk:
        length = min(_LONGEST_TALK, longest)
    else:
        prompt = _first_prompt(options, reader)
        num_new = _num_new_tokens(options, prompt, longest)
        reports_user_errors(lambda: check_length(len(prompt.tokens), num_new, longest))
        needed = len(prompt.tokens) + num_new
        length = max(needed, min(-(-needed // _LENGTHS) * _LENGTHS, longest))
    generator = compile_model(options, checkpoint, draft, batch_size=1, max_length=length)

    def write(prompt: Prompt, on_token: OnToken) -> None:
        generator.generate(
            [prompt.tokens],
            inputs=[prompt.images],
            max_new_tokens=_num_new_tokens(options, prompt, length),
            stop_tokens=codec.end_tokens,
            on_token=lambda _, token: on_token(token),
            **sampling,
        )

    with generator:
        _write_texts(options, codec, reader, write, is_shown=True)
    return 0


def _without_ids(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "input_ids"}


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    from nxd_trace.generation import SamplingSettings  # noqa: PLC0415

    sampling = {name: getattr(options, name) for name in _SAMPLING}
    given = {} if options.max_new_tokens is None else {"max_new_tokens": options.max_new_tokens}
    reports_user_errors(lambda: SamplingSettings(**sampling, **given))
    return sampling


def _num_new_tokens(options: argparse.Namespace, prompt: Prompt, longest: int | None) -> int:
    """Return `--max-new-tokens`; without it the usual number, or as many as a text of `longest` tokens has room for."""
    if options.max_new_tokens is not None:
        return int(options.max_new_tokens)
    return _NEW_TOKENS if longest is None else max(1, min(_NEW_TOKENS, longest - len(prompt.tokens)))


def _write_texts(
    options: argparse.Namespace, codec: "TextCodec", reader: PromptReader, write: Write, *, is_shown: bool
) -> None:
    """Generate the requested texts, and show them as they are generated."""
    show = _show if is_shown else _show_nothing
    if not options.chat:
        if options.prompt is None and is_shown:
            print(f"nxd generate: no --prompt is given; continuing {_PROMPT!r}", file=sys.stderr, flush=True)
        prompt = _first_prompt(options, reader)  # whose error would follow half a line
        show(_text_of(options))
        _write_text(prompt, options, codec, write, show)
        return
    talk, images = Conversation(_system_message(options)), read_images(options.image)
    turns: Iterable[str] = sys.stdin if options.prompt is None else [options.prompt]
    for turn in turns:
        if not turn.strip():
            continue
        if options.prompt is None and turn.startswith(_IMAGE):
            images += _read_next_image(turn.removeprefix(_IMAGE).strip(), reader)
            continue
        talk.ask(turn.rstrip("\n"), images)
        images = []
        text = _write_text(reader.conversation(talk), options, codec, write, show)
        talk.messages.append({"role": "assistant", "content": text})


def _read_next_image(name: str, reader: PromptReader) -> list[tuple[str, bytes]]:
    """Return the image of a line of a conversation, which goes on if it cannot be read."""
    try:
        from nxd_data.images import decode_image  # noqa: PLC0415

        _ = reader.images  # not of a model that reads text alone
        images = read_images([name])
        for place, content in images:
            decode_image(place, content)
        return images
    except (UserError, ValueError) as error:
        print(f"nxd generate: {error}", file=sys.stderr, flush=True)
        return []


def _write_text(
    prompt: Prompt, options: argparse.Namespace, codec: "TextCodec", write: Write, show: Callable[[str], None]
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


def _first_prompt(options: argparse.Namespace, reader: PromptReader) -> Prompt:
    images = read_images(options.image)
    if not options.chat:
        return reader.text(_text_of(options), images)
    talk = Conversation(_system_message(options))
    talk.ask(options.prompt, images)
    return reader.conversation(talk)


def _text_of(options: argparse.Namespace) -> str:
    return _PROMPT if options.prompt is None else str(options.prompt)


def _system_message(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_nothing(text: str) -> None:
    del text
