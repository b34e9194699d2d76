"""`python -m tests.hub_server`: a hub to try things against, until it is interrupted."""

from __future__ import annotations

import argparse
import threading

from tests.hub_server.server import HubServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--repository", action="append", default=[], metavar="OWNER/NAME", help="made at once; owners: bot, science"
    )
    options = parser.parse_args()
    with HubServer(options.port) as server:
        for name in options.repository:
            server.create(name)
        print(f"HF_ENDPOINT={server.url} HF_TOKEN={server.token}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("ended")


if __name__ == "__main__":
    main()
