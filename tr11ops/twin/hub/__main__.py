"""`python -m tr11ops.twin.hub`: a hub to try things against, until it is interrupted.

Its token is $HF_TOKEN, or one that it makes and prints.
"""

from __future__ import annotations

import argparse
import os

from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.twin.hub.server import HubServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--repository",
        action="append",
        default=[],
        metavar="OWNER/NAME",
        help="made at once; owners: bot, science",
    )
    options = parser.parse_args()
    token = os.environ.get("HF_TOKEN")
    over = StopEvent()
    # a twin ends it by SIGTERM: what was uploaded, which may be large, goes with it
    with obeying(over.obey), HubServer(options.port, token=token) as server:
        for name in options.repository:
            server.create(name)
        made = "" if token else f" HF_TOKEN={server.token}"
        print(f"HF_ENDPOINT={server.url}{made}", flush=True)
        over.wait()
    print("ended")


if __name__ == "__main__":
    main()
