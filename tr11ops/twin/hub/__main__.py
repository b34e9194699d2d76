"""`python -m tr11ops.twin.hub`: a hub to try things against, until it is interrupted.

Its token is $HF_TOKEN, or one that it makes and prints.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading

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
    # a twin ends it by SIGTERM: what was uploaded, which may be large, goes with it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with HubServer(options.port, token=token) as server:
        for name in options.repository:
            server.create(name)
        print(
            f"HF_ENDPOINT={server.url}" + ("" if token else f" HF_TOKEN={server.token}"), flush=True
        )
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("ended")


if __name__ == "__main__":
    main()
