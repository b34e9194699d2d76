"""`tr11 serve`: live pages over any number of runs, for a browser or a phone; and the tokens of those
who may act from them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.deadline import keep_waiting
from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.installed import missing
from tr11ops.base.stop_signals import obeying
from tr11ops.cli.common import say
from tr11ops.cli.runner import NO_RUN, SCHEDULER, Outcome, RunContext

if TYPE_CHECKING:
    from tr11ops.serve.app import ServeSettings

EXTRA = 'pip install "tr11[serve]"'
PORT = 8811
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
TOKEN = "token"  # the first word of `tr11 serve token NAME`; a folder of that name is ./token


def serve(
    context: Annotated[RunContext, NO_RUN, SCHEDULER],
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER]... | token NAME",
            help="Folders with runs or mirrored copies below them; else this one.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="[HOST:]PORT",
            help="Where it listens; HOST: 127.0.0.1 if not given.",
        ),
    ] = str(PORT),
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name", metavar="HOST", help="A host name under which it is reached; may be repeated."
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--cert", metavar="FILE", help="TLS: the certificate chain (PEM)."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="TLS: its private key (PEM).")
    ] = None,
    proxied: Annotated[
        bool,
        typer.Option("--behind-proxy", help="A reverse proxy on this machine gives it TLS."),
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Reading needs a token too.")] = False,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens", metavar="FILE", help="The tokens. [~/.config/tr11/serve-tokens.json]"
        ),
    ] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="With token NAME: take that person's token away.")
    ] = False,
) -> Outcome:
    """Live pages over the runs below some folders: what needs a person first, curves, alerts, log.

    Reads what `tr11 status --json` and the published document hold: it works on a mount and on a
    mirrored copy, without a scheduler too. Acting needs a token for each person, and shows the same
    plan and keeps the same journal as the command. Needs tr11's extra `serve`.

    NAME of a token is the person's mail address, or what stands before its @ in the card: as such
    they take the shift.

    Another HOST than this machine's own is taken only with TLS (--cert and --key), or behind a
    proxy that has it.

    Examples:
      tr11 serve /scratch/six/checkpoints
      tr11 serve token ana@example.org
      tr11 serve --listen 0.0.0.0:8811 --cert cert.pem --key key.pem --private
    """
    from tr11ops.alerts.answer_link import usual_key
    from tr11ops.serve.tokens import usual_place

    place = tokens or usual_place(os.environ)
    if words and words[0] == TOKEN:
        return _token(words[1:], place, revoke)
    if revoke:
        raise WrongUsage("--revoke goes with: tr11 serve token NAME")
    host, port = _listen(listen)
    is_tls = _is_tls(certificate, key)
    if host not in LOOPBACK and not is_tls:
        raise WrongUsage(
            f"--listen {listen}: others could read tokens on their way; give --cert and --key, or "
            "listen on 127.0.0.1 behind a proxy with TLS"
        )
    absent = missing(("starlette", "uvicorn"))
    if absent:
        raise Refusal(f"tr11 serve needs {', '.join(absent)}, not installed here; type: {EXTRA}")
    from tr11ops.serve.app import ServeSettings

    settings = ServeSettings(
        place,
        usual_key(os.environ),
        tuple(names or ()),
        is_private=private,
        is_secure=is_tls or proxied,
    )
    roots = [Path(word) for word in words or ["."]]
    return Outcome(
        screen=partial(_serve, roots, context.scheduler, settings, (host, port), (certificate, key))
    )


def _token(words: Sequence[str], place: Path, revoke: bool) -> Outcome:
    """Make a person's token, or take it away."""
    from tr11ops.serve.tokens import make_token, revoke_token

    if len(words) != 1:
        raise WrongUsage("token: give one NAME: tr11 serve token ana@example.org")
    [name] = words
    if revoke:
        revoke_token(place, name)
        return Outcome(remarks=(f"the token of {name} opens nothing any more",))
    text = make_token(place, name)
    note = f"{name} signs in with it; it is shown this once, and only its digest is kept in {place}"
    return Outcome(lines=(text,), notes=(note,))


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 <= int(port) < 65536):
        raise WrongUsage(f"--listen {text}: give PORT or HOST:PORT, a port between 1 and 65535")
    return host.strip("[]") or "127.0.0.1", int(port)


def _is_tls(certificate: Path | None, key: Path | None) -> bool:
    """Raises WrongUsage where one of the two is missing, or is not there."""
    if (certificate is None) != (key is None):
        raise WrongUsage("--cert and --key go together")
    for option, place in (("--cert", certificate), ("--key", key)):
        if place is not None and not place.is_file():
            raise WrongUsage(f"{option} {place}: is not a file")
    return certificate is not None


def _serve(
    roots: Sequence[Path],
    scheduler: str,
    settings: ServeSettings,
    address: tuple[str, int],
    tls: tuple[Path | None, Path | None],
) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    import uvicorn

    from tr11ops.serve.app import application
    from tr11ops.serve.poller import RunPoller

    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise Refusal(f"--listen {host}:{port}: {error.strerror or error}") from None
    keep_waiting()
    watcher = RunPoller(roots, scheduler)
    config = uvicorn.Config(
        application(watcher, settings),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=1200,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=2,
        proxy_headers=settings.is_secure and tls[0] is None,
        ssl_certfile=tls[0],
        ssl_keyfile=tls[1],
        lifespan="off",
        ws="none",
    )
    scheme = "https" if tls[0] is not None else "http"
    shown = f"[{host}]" if ":" in host else host
    server = uvicorn.Server(config)

    def stop(_number: int) -> None:
        """Before the server has its own handlers, and after it has given them back."""
        server.should_exit = True

    with obeying(stop):
        say(f"serving on {scheme}://{shown}:{listener.getsockname()[1]}/; Ctrl-C ends")
        watcher.start()
        try:
            server.run(sockets=[listener])
        finally:
            watcher.stop()
            listener.close()
