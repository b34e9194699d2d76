"""`python -m trainer.data REQUEST`: the work of `tr11 data`, which says in one JSON object what to do.
Progress on stderr, one line of result on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from trainer.contract.attempt import hear_signals, read_command_request
from trainer.contract.errors import DataError, UsageError

EXIT_FINE = 0
EXIT_NEEDS_PERSON = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 fine, 1 needs a person, 2 wrong usage; refusal or interrupt are a
    line on stderr.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        hear_signals()
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return _refuse("stopped; no output is half-written", EXIT_NEEDS_PERSON)


def _run(words: Sequence[str]) -> int:
    try:
        options = read_command_request(words)
        # seconds, in which an interrupt is heard already
        from trainer.data import commands_look, commands_make

        run, sentence = {**commands_make.COMMANDS, **commands_look.COMMANDS}[options.command]
        result = run(options)
        if options.as_json:
            shown = json.dumps(result, ensure_ascii=False)
        else:
            shown = sentence(result)
        sys.stdout.write(shown + "\n")
        sys.stdout.flush()
        if not result.get("clean", True):  # as `check` found it
            return EXIT_NEEDS_PERSON
    except (UsageError, DataError) as error:
        return _refuse(f"tr11 data: {error}", error.exit_code)
    except BrokenPipeError:
        # the reader is gone: say nothing more to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NEEDS_PERSON
    return EXIT_FINE


def _refuse(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    """End as an interrupt from the keyboard does: workers are ended, and nothing is left
    half-written.
    """
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
