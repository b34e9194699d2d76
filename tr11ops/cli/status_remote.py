"""`tr11 status --remote`: the run seen from a laptop, with nothing but its hub repository."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import say
from tr11ops.cli.context import emit
from tr11ops.cli.status_watch import look_again
from tr11ops.cli.terminal import drawing_console, status_screen
from trainer.contract.errors import UNOBSERVED
from trainer.contract.record import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tr11ops.status.remote import Outside, RemoteView

WATCH_SECONDS = 300.0
LONGEST_WAIT_SECONDS = 60.0  # of one look: longer than that no one sits before a terminal
LONGEST_WATCH_WAIT_SECONDS = 900.0  # between two looks, whatever the hub asks for
SHORTEST_WATCH_SECONDS = 30.0  # the hub is everyone's, and the run's news are hourly


class RemoteLook(Record):
    """One look from outside."""

    view: RemoteView

    @property
    def exit_code(self) -> int:
        from tr11ops.status.remote_verdict import judge_outside

        return judge_outside(self.view).exit_code

    def document(self) -> dict[str, object]:
        from tr11ops.status.remote_verdict import outside_document

        return outside_document(self.view)

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        from tr11ops.status.remote_screen import render_outside

        return render_outside(self.view, status_screen(width, height))


@dataclass
class RemoteReader:
    """Looks at one repository; `look` may be called again and again."""

    repository: str
    outside: Outside
    is_watching: bool = False

    def look(self) -> RemoteLook:
        """Raises Refusal: what is asked for is not there or not for us; HubUnavailable: nothing may
        be concluded.
        """
        from tr11ops.base.errors import HubPermanentError, HubUnavailable
        from tr11ops.status.remote import NoSuchVariant

        where = f"--remote {self.repository}"
        try:
            return RemoteLook(self.outside.look(time.time()))
        except HubPermanentError as error:
            raise Refusal(f"{where}: {error}") from None
        except HubUnavailable as error:
            if self.is_watching:
                words = str(error)
            else:
                words = f"{where}: {error}: nothing may be concluded"
            raise HubUnavailable(words, min(error.wait, LONGEST_WATCH_WAIT_SECONDS)) from None
        except NoSuchVariant as error:
            shown = ", ".join(error.variants[:20]) or "none"
            raise Refusal(
                f"{where}: choose a variant with --variant; there are logs of: {shown}", 2
            ) from None


def status_remote(
    repository: str,
    endpoint: str | None,
    variant: str | None,
    seconds: float | None,
    watch: bool,
    as_json: bool,
) -> int:
    """Show the run's status from outside, once or again and again; returns the exit code. Raises
    Refusal.
    """
    every = WATCH_SECONDS if seconds is None else seconds
    if watch and every < SHORTEST_WATCH_SECONDS:
        raise Refusal(
            f"--watch {every:g}: a hub is asked every {SHORTEST_WATCH_SECONDS:g} seconds at most", 2
        )
    reader = remote_reader(repository, endpoint, variant, watch)
    look = reader.look()
    if watch:
        ready, reader.is_watching = [look], True  # the first is there already
        return look_again(lambda: ready.pop() if ready else reader.look(), every, as_json)
    if as_json:
        emit(look.document())
    else:
        console = drawing_console()
        console.print(look.screen(console.width))
    return look.exit_code


def remote_reader(
    repository: str, endpoint: str | None, variant: str | None, watch: bool
) -> RemoteReader:
    """What looks at the repository that a person typed. Raises Refusal."""
    from huggingface_hub import constants

    from tr11ops.hub.address import repo_of
    from tr11ops.hub.asking import remote_retries
    from tr11ops.hub.credentials import find_credentials
    from tr11ops.status.remote import Outside

    try:
        repo = repo_of(repository, endpoint)
        token = find_credentials(None, os.environ).token
    except ValueError as error:
        raise Refusal(f"--remote: {error}", exit_code=2) from None
    if repo.path:
        raise Refusal(
            f"--remote {repository}: give OWNER/NAME; --variant names one of several trainings",
            exit_code=2,
        )
    if constants.HF_HUB_OFFLINE:
        raise Refusal("--remote: HF_HUB_OFFLINE is set, so nothing is asked", exit_code=UNOBSERVED)
    # while watching the next look is the next try
    retries = remote_retries(
        time.sleep, say, 1 if watch else 3, longest=20.0, spread=0.2, most=LONGEST_WAIT_SECONDS
    )
    return RemoteReader(
        repo.name, Outside(repo, None if token is None else token.reveal(), retries, variant)
    )
