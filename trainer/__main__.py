"""`python -m trainer CARD.json`: one worker of the training; start it with torchrun, or alone for one process.

CARD.json is a resolved run card, as `tr11 launch` and `tr11 train` write it. Exit status: 0 the training stopped as it
should (see the end marker), 1 it failed, 2 it refused its input.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainer.lifecycle import SignalFlag


def main(arguments: list[str]) -> None:
    start_time = time.monotonic()
    # Before the slow imports: a stop signal during them must not end the process without a word.
    flag = SignalFlag()
    flag.install()
    if len(arguments) != 1 or arguments[0] in {"-h", "--help"}:
        print(__doc__, file=sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)

    from trainer.config import CardError, load_trainer_config

    try:
        config = load_trainer_config(Path(arguments[0]))
    except CardError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(2)

    from trainer.loop import run

    run(config, Path(arguments[0]), flag, start_time)


if __name__ == "__main__":
    main(sys.argv[1:])
