"""Sizes, signals and sentences as people read them, the same in both packages."""

from __future__ import annotations

import re
import signal

GAP = " ... "
LEAST_ROOM = 16  # characters: in less there is no beginning and end
# its end says enough where room is short
_LONG_PATH = re.compile(r"(?<![\w/.:])/\S{24,}?(/[^/\s]+/[^/\s]+)(?=[\s,:;)]|$)")
_ASIDE = re.compile(r" \([^()]*\)")
_CLOSED_BY = {"(": ")", "`": "`", "[": "]", "{": "}"}
# after these a sentence does not break off
_DANGLING = re.compile(
    r"(?i)a|an|and|after|as|at|because|before|between|but|by|for|from|in|into|is|it|its|named|no|not|of"
    r"|on|or|than|that|the|their|this|to|up|was|were|which|while|with|within|without"
)


def size(count: float) -> str:
    """Bytes in binary units: `512 B`, `327.8 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            if unit == "B":
                return f"{count:.0f} {unit}"
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def signal_name(number: int) -> str:
    """A signal as `kill -l` has it: `SIGKILL`, `SIGRTMIN+3`; `signal 99` for a number that is none."""
    # those between the first and the last real-time signal have no name of their own
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_number(name: str) -> int | None:
    """The number that `signal_name` made this of; None for another word."""
    return next((number for number in range(1, signal.NSIG) if signal_name(number) == name), None)


def signal_of_status(status: int) -> str:
    """The signal of which a shell's exit status tells; "" where it tells of none.

    Above 128 a program may leave with a status of its own, which is likelier than a real-time signal.
    """
    number = status - 128
    if 0 < number < signal.SIGRTMIN:
        name = signal_name(number)
        if name.startswith("SIG"):
            return name
    return ""


def end_of_process(code: int) -> str:
    """How a process ended, by its exit code as `Popen.returncode` or as a shell has it: `was ended by
    SIGSEGV (exit code -11)`, `ended with exit code 1`.
    """
    name = signal_of_status(code)
    if code < 0:
        name = signal_name(-code)
    if name:
        return f"was ended by {name} (exit code {code})"
    return f"ended with exit code {code}"


def printable(text: str, instead: str = "?") -> str:
    """The text on one line that a terminal shows: names and other people's words may hold anything,
    and it must not obey them.
    """
    return "".join(character if character.isprintable() else instead for character in text)


def shortened(text: str, most: int) -> str:
    """A sentence of one line in at most `most` characters: it keeps its beginning, which says what
    it is about, and its end, which says the cause. Whole where it fits.

    Left out are the beginnings of paths first, then what is in round brackets, then clauses in its
    middle, and words only where a clause alone is too long.
    """
    if len(text) <= most:
        return text
    if most < LEAST_ROOM:
        return text[:most]
    text = _LONG_PATH.sub(r"...\1", text)
    if len(text) > most:
        text = _ASIDE.sub("", text)
    if len(text) <= most:
        return text
    room = most - len(GAP)
    clauses = _clauses(text)
    first, last = _kept_first(clauses, room), len(clauses)  # clauses[first:last] are left out
    head = _bare(" ".join(clauses[:first]))
    if len(head) > room - LEAST_ROOM:
        head = _bare(_leading(text, room // 2))
        return f"{head}{GAP}{_trailing(text, room - len(head))}"
    tail = ""
    is_growing = True
    while is_growing and first < last:
        is_growing = False
        with_one_more = " ".join(clauses[last - 1 :])
        if len(head) + len(with_one_more) <= room:
            last, tail, is_growing = last - 1, with_one_more, True
        longer = _bare(" ".join(clauses[: first + 1]))
        if tail and first < last and len(longer) + len(tail) <= room:
            first, head, is_growing = first + 1, longer, True
    return f"{head}{GAP}{tail or _trailing(clauses[-1], room - len(head))}"


def _kept_first(clauses: list[str], room: int) -> int:
    """How many of its first clauses are kept in any case: up to the second colon, before which is
    what it is about and whose fault it is, where that leaves room for its end.
    """
    behind_colons = [count for count, clause in enumerate(clauses, 1) if clause.endswith(":")]
    for count in behind_colons[1:2]:
        if len(_bare(" ".join(clauses[:count]))) <= room - LEAST_ROOM:
            return count
    return 1


def _clauses(text: str) -> list[str]:
    """The parts of a sentence behind whose commas, colons and semicolons a space follows; what is in
    brackets or backquotes is not taken apart.
    """
    found, begin = [], 0
    closing = ""
    for place, letter in enumerate(text):
        if closing:
            if letter == closing:
                closing = ""
        elif _CLOSED_BY.get(letter, "") in text[place + 1 :]:
            closing = _CLOSED_BY.get(letter, "")
        if not closing and letter in ",:;" and text[place + 1 : place + 2] == " ":
            found.append(text[begin : place + 1])
            begin = place + 2
    return [*found, text[begin:]]


def _leading(text: str, room: int) -> str:
    """As many words of its beginning as fit; a part of the first one where that alone does not."""
    if text[room : room + 1].isspace():
        kept = text[:room]
    else:
        kept = text[:room].rpartition(" ")[0]
    return kept or text[:room]


def _trailing(text: str, room: int) -> str:
    """As many words of its end as fit; a part of the last one where that alone does not."""
    kept = text[-room:]
    if not text[-room - 1 : -room].isspace():
        kept = kept.partition(" ")[2]
    return (kept or text[-room:]).strip()


def _bare(text: str) -> str:
    """Without the punctuation at its end, and without words that lead on to what is left out."""
    words = text.rstrip(" ,:;(").split(" ")
    while len(words) > 1 and _DANGLING.fullmatch(words[-1]):
        words.pop()
    return " ".join(words).rstrip(" ,:;(")
