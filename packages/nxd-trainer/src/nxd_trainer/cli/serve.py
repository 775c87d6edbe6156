"""`nxd serve`: answer completion requests with a trained model."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path

from nxd_cli.command import UserError, check_own_process, make_parser, parse, reports_user_errors

from nxd_trainer.cli.arguments import add_model, compile_model, open_compilable

_BODY_BYTES, _BODY_BYTES_WITH_IMAGES = 1 << 20, 1 << 24
_HEADER_BYTES = 1 << 12  # more than a tensor takes in the header of a safetensors file
_LONGEST = 4096  # default length in tokens: the cache has room for this many of each prompt in the batch
EXIT_WORKERS_FAILED = 4  # uvicorn uses 3 for an address that it cannot listen on


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "serve",
        "Serve a model over the OpenAI completions API.",
        examples=[
            "nxd serve run",
            "nxd serve Qwen3-0.6B --nproc 2 --port 8080 --max-length 2048",
            "nxd serve Qwen3-0.6B --adapter run --batch-size 16",
        ],
        exit_codes="0 ended by a signal, 2 user error, 3 the address cannot be listened on, "
        f"{EXIT_WORKERS_FAILED} its workers died too often",
    )
    add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="0: any free port (default: %(default)s)")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name of this server, besides IP addresses, localhost and this machine's name; may be "
        "repeated",
    )
    parser.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="site whose pages may call this server (CORS), such as https://chat.example, or *; may be repeated",
    )
    parser.add_argument(
        "--shared-prefixes",
        action="store_true",
        help="share the cache of common prompt prefixes between clients: faster, but a client can find out whether "
        "another one has sent a text",
    )
    parser.add_argument(
        "--accept-weights",
        type=Path,
        metavar="TOKEN_FILE",
        help="accept new weights for the model from whoever sends the token in this file, such as a trainer with "
        "nxd_engine.send_weights",
    )
    parser.add_argument("--name", default="nxd", help="name of the model in requests (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="concurrent prompts (default: 8)")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"tokens of prompt and completion; unset: the model's, at most {_LONGEST}",
    )
    parser.add_argument(
        "--max-waiting", type=int, default=64, metavar="N", help="queued prompts per client (default: 64)"
    )
    parser.add_argument("--compiler", help="inductor or export; unset: the one available here")
    parser.add_argument(
        "--nproc",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel worker processes (default: 1)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=int,
        metavar="N",
        help=f"size of a request (default: {_BODY_BYTES}, or {_BODY_BYTES_WITH_IMAGES} for a model that reads images)",
    )
    parser.add_argument(
        "--image-host",
        action="append",
        default=[],
        metavar="HOST",
        help="host that images of requests may be fetched from, by http or https; may be repeated. Otherwise only data "
        "URIs are read",
    )
    parser.add_argument(
        "--max-connections", type=int, default=1024, metavar="N", help="open connections (default: %(default)s)"
    )
    parser.add_argument(
        "--client-timeout",
        type=float,
        default=30,
        metavar="S",
        help="seconds for a client to start a request, send its body, and read the answer (default: %(default)s)",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30,
        metavar="S",
        help="seconds for running requests after SIGTERM; a second signal exits at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=5,
        metavar="N",
        help="restarts of dead workers within ten minutes; after one more death the server exits with code "
        f"{EXIT_WORKERS_FAILED} (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Compile the model, and serve it until a signal arrives."""
    options = parse(_parser(), arguments)
    reports_user_errors(lambda: check_own_process(options.nproc, "nxd serve"))

    begun = time.monotonic()
    from nxd_trace import start_fork_server  # noqa: PLC0415
    from nxd_trace.errors import WorkerError  # noqa: PLC0415
    from nxd_trace.serving import (  # noqa: PLC0415
        AllowedSites,
        CompletionService,
        RestartPolicy,
        ServerLimits,
        UpdateSettings,
        check_installed,
        serve,
    )

    start_fork_server()  # loads its libraries while this process loads its own
    from nxd_trainer.opened_model import open_weights_like  # noqa: PLC0415
    from nxd_trainer.served_images import ServedImages  # noqa: PLC0415

    reports_user_errors(check_installed)  # before the minutes that compiling may take
    checkpoint, draft, longest = open_compilable(options, images="if it reads them")
    images = checkpoint.images
    if images is not None and options.accept_weights is not None:
        raise UserError(
            "--accept-weights is not supported for a model that reads images, since its encoders would keep their "
            "weights; leave it out"
        )
    limits = reports_user_errors(
        lambda: ServerLimits(
            max_waiting=options.max_waiting,
            max_body_bytes=options.max_body_bytes or (_BODY_BYTES_WITH_IMAGES if images else _BODY_BYTES),
            max_connections=options.max_connections,
            client_timeout=options.client_timeout,
            shutdown_timeout=options.shutdown_timeout,
        )
    )
    allowed = reports_user_errors(lambda: AllowedSites(tuple(options.allowed_host), tuple(options.allowed_origin)))
    updates = None
    if options.accept_weights is not None:
        widest = sum(8 * prod(it.global_shape) + _HEADER_BYTES for it in checkpoint.weights.tensors.values())
        updates = reports_user_errors(
            lambda: UpdateSettings(
                options.accept_weights.read_text().strip(), widest, partial(open_weights_like, checkpoint.description)
            )
        )
    restarts = reports_user_errors(lambda: RestartPolicy(max_restarts=options.max_restarts))
    length = options.max_length or min(_LONGEST, longest)
    _say(
        f"{options.model}: {checkpoint.description.architecture}, {str(checkpoint.dtype).removeprefix('torch.')}; "
        f"batches of up to {options.batch_size}, texts of up to {length} tokens"
        f"{'' if checkpoint.codec.chat else '; no chat template'}"
        f"{'; reads images' if images else ''}"
        f"{'' if draft is None else f'; {options.draft} drafts {options.num_speculative_tokens} tokens at a time'}"
    )
    # Without updates the weights may belong to the programs, so those of servers without the option are used again.
    settings = {} if updates is None else {"inline_weights_to_neff": False}
    generator = compile_model(options, checkpoint, draft, batch_size=options.batch_size, max_length=length, **settings)
    _say(f"the model is ready after {time.monotonic() - begun:.1f} s")
    with generator:
        service = CompletionService(
            generator.engine,
            checkpoint.codec.tokenizer,
            model=options.name,
            chat=checkpoint.codec.chat,
            images=None if images is None else ServedImages(images, options.image_host),
            end_tokens=checkpoint.codec.end_tokens,
            limits=limits,
            restarts=restarts,
            shared_prefixes=options.shared_prefixes,
            updates=updates,
        )
        try:
            reports_user_errors(lambda: serve(service, host=options.host, port=options.port, allowed=allowed))
        except WorkerError as error:
            print(f"nxd serve: {error}", file=sys.stderr)
            return EXIT_WORKERS_FAILED
    return 0


def _say(what: str) -> None:
    print(f"nxd serve: {what}", file=sys.stderr, flush=True)
