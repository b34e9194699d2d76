"""A site's own checks: scripts that exit with 0 (fine), 1 (bad node) or 3 (unknown); one line of output is the why."""

from __future__ import annotations

from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System, Unanswered

_OUTCOMES = {0: CheckOutcome.FINE, 1: CheckOutcome.BAD, 3: CheckOutcome.UNKNOWN}
_LONGEST = 200


def run_script(system: System, wanted: NodeRequirements, path: str) -> Answer:
    """Run one script. Whatever it does but exit with 0 or 1 is unknown: a broken script must not empty a cluster."""
    try:
        output = system.command([path], wanted.seconds)
    except OSError as error:
        raise Unanswered(f"{path}: {error.strerror or error}") from None
    lines = [line.strip() for line in (*output.text.splitlines(), *output.error.splitlines()) if line.strip()]
    said = "".join(character if character.isprintable() else "?" for character in lines[0])[:_LONGEST] if lines else ""
    if output.status not in _OUTCOMES:
        raise Unanswered(f"exit status {output.status}, which is none of 0, 1, 3{f': {said}' if said else ''}")
    return _OUTCOMES[output.status], said or f"{path} exited with {output.status}"
