"""What Slurm writes in short. Tasks of an array: their numbers ("1-10%1", "0-8:4", "1,3,5-7"; one
reader, one writer), which run each one is, and changing them by name. Lists of nodes, to names and
back: `jean-zay-iam[01-26,28-49],x1`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from tr11ops.base.errors import ArraySyntaxError, HostlistError
from tr11ops.cluster.base import Job, JobState
from trainer.contract.record import Record

LARGEST_ARRAY_INDEX = 4_000_000  # Slurm's MaxArraySize cannot be configured beyond this
MOST_ARRAY_TASKS = 10_000  # of one submission
# Slurm's "none": a file's name has it for the task of a job that is no array's
NO_TASK = 0xFFFFFFFE
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


class ArraySpec(Record):
    """An array as it is submitted: sorted `indices`, of which `throttle` may run at once (None: no
    limit).

    `step` is that of a single range, 1 for any other array.
    """

    text: str  # what the scheduler is given, "1-10%1"
    indices: tuple[int, ...]
    throttle: int | None = None
    step: int = 1

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.indices)


def parse_array(text: str) -> ArraySpec:
    """Read what `--array` takes: `1-10%1`, `0-15:4`, `1,3,5-7`. A task that is named twice counts
    once, as in Slurm.

    Raises ArraySyntaxError for other syntax, for an empty range, an index that Slurm cannot have,
    too many tasks.
    """
    body, percent, limit = text.strip().partition("%")
    if percent and not (re.fullmatch(r"[0-9]{1,9}", limit) and int(limit) > 0):
        raise ArraySyntaxError("the number after % must be 1 or more", "use 1-10%1")
    ranges = [_strict_range(part) for part in body.split(",")]
    named = sum(map(len, ranges))
    if named > MOST_ARRAY_TASKS or max(found[-1] for found in ranges) > LARGEST_ARRAY_INDEX:
        raise ArraySyntaxError(
            f"has more than {MOST_ARRAY_TASKS} tasks, or an index above {LARGEST_ARRAY_INDEX}"
        )
    indices = sorted({number for found in ranges for number in found})
    step = ranges[0].step if len(ranges) == 1 else 1
    return ArraySpec(text.strip(), tuple(indices), int(limit) if percent else None, step)


def task_numbers(text: str) -> tuple[int, ...]:
    """The tasks that the queue shows: "4-10%1", "[1,3,7-9]". What cannot be read of it is left out."""
    numbers: list[int] = []
    for part in _parts(text):
        numbers.extend((_range(part) or range(0))[: LARGEST_ARRAY_INDEX + 1 - len(numbers)])
    return tuple(numbers)


def named_tasks(text: str) -> tuple[int, ...] | None:
    """The tasks that a job's name means: "7", "[4-10%1]"; None where any of it cannot be read."""
    ranges = [_range(part) for part in _parts(text)]
    if not all(ranges) or sum(len(found or ()) for found in ranges) > LARGEST_ARRAY_INDEX + 1:
        return None
    return task_numbers(text)


def _parts(text: str) -> list[str]:
    return text.partition("%")[0].strip("[]").split(",")


def format_ranges(numbers: Iterable[int]) -> str:
    """`1,2,3,7` as people write it: "1-3,7". The numbers must be sorted."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _range(part: str) -> range | None:
    """One number or range; None for other text, and empty for a range that runs backwards or has no
    step.
    """
    match = _RANGE.fullmatch(part)
    if match is None:
        return None
    first = int(match[1])
    last = int(match[2] or match[1])
    step = int(match[3] or 1)
    if step:
        return range(first, last + 1, step)
    return range(0)


def _strict_range(part: str) -> range:
    found = _range(part)
    if found is None:
        raise ArraySyntaxError("is not an array: a range such as 1-10, or numbers with commas")
    if not found:
        first, last, *_ = (*re.split("[-:]", part), "")
        turned = int(last) < int(first)
        raise ArraySyntaxError(
            f"the range {part} is empty", f"use {last}-{first}" if turned else f"use {first}-{last}"
        )
    return found


# Arrays whose tasks are runs of their own: which run a task is, written in the one comment that an
# array has. Pure.
#
#     tr11-tasks:1=TAG@MARK,2=TAG@MARK [the card's comment]
#
# A scheduler has one name and one comment for an array. Each task of such an array is shown as a job
# of its own, with the comment that its run would have had, so that it belongs to that run for every
# command.

COMMENT_PREFIX = "tr11:"  # begins the comment of every job of a run
LONGEST_COMMENT = 1024  # characters that Slurm takes
CELL = "tr11-cell"  # a word in the comment of such a task: its namesakes are known to be other runs
_MARKS = re.compile(r"tr11-tasks:(\d+=[^\s,=]+(?:,\d+=[^\s,=]+)*)(?: (.*))?", re.DOTALL)


def array_comment(marks: Mapping[int, str], more: str) -> str:
    """The comment of an array whose task `number` is the run that `marks[number]` names:
    `TAG@MARK`.
    """
    named = ",".join(f"{number}={mark}" for number, mark in sorted(marks.items()))
    return f"tr11-tasks:{named}{f' {more}' if more else ''}"


def tasks_apart(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs, with each task of such an array as a job of its own; all others as they are."""
    return tuple(one for job in jobs for one in _apart(job))


def task_apart(job: Job) -> Job:
    """The same of one job; what stands for several of its tasks stays as it is."""
    apart = tasks_apart((job,))
    if len(apart) == 1:
        return apart[0]
    return job


def is_cell(comment: str) -> bool:
    """Whether it is the comment of such a task, as `tasks_apart` shows it."""
    return CELL in comment.split()


def _apart(job: Job) -> Iterator[Job]:
    match = None
    if job.array_id is not None:
        match = _MARKS.fullmatch(job.comment)
    if match:
        numbers = _numbers(job)
    else:
        numbers = ()
    if match is None or not numbers:
        yield job
        return
    marks = {
        int(number): mark
        for number, _, mark in (part.partition("=") for part in match[1].split(","))
    }
    is_started = bool(job.nodes) or (job.state.is_active and len(numbers) == 1)
    for number in numbers:
        name = f"{job.array_id}_{number}"
        words = (
            (f"{COMMENT_PREFIX}{marks[number]}", CELL, match[2])
            if number in marks
            else (job.comment,)
        )
        yield replace(
            job,
            job_id=name,
            raw_id=job.raw_id if is_started and job.state is not JobState.PENDING else name,
            array_id=None,
            task_id=None,
            pending_tasks=(),
            comment=" ".join(filter(None, words)),
            output=job.output.replace("%a", str(number)),
        )


def _numbers(job: Job) -> tuple[int, ...]:
    """The tasks that a job stands for; a cancelled part of an array has them in its name alone."""
    if job.task_id is not None:
        return (job.task_id,)
    return job.pending_tasks or named_tasks(job.job_id.partition("_")[2]) or ()


# What changes queued jobs by name: "12" is a whole job or array, "12_5" and "12_[4-10]" are tasks
# of one. Pure.

_PART = re.compile(r"(.+)_([0-9]{1,7}|\[[0-9,:%-]+\])")


def array_number(job: Job) -> str:
    """The number that stands for a job's whole submission."""
    return job.array_id or job.raw_id


def names_of(chosen: Iterable[Job], left: Iterable[Job]) -> tuple[str, ...]:
    """Names for the chosen waiting jobs that leave out those in `left`: one for each array or
    single job.

    An array goes by its number where nothing of it is left out; else its chosen tasks are named.
    """
    apart = {array_number(job) for job in left}
    tasks: dict[str, set[int]] = {}
    for job in chosen:
        tasks.setdefault(array_number(job), set()).update(tasks_of(job))
    return tuple(
        _name(number, found if number in apart else set()) for number, found in tasks.items()
    )


def split(job: Job, names: Iterable[str]) -> tuple[Job | None, Job | None]:
    """The part of a waiting job that these names cover, and the part that they do not; None for
    nothing.
    """
    tasks = set(tasks_of(job))
    covered = set[int]()
    for name in names:
        number, meant = _read(name)
        if number != array_number(job):
            continue
        if meant is None:
            return job, None
        covered |= tasks & meant
    if not covered:
        return None, job
    if covered == tasks:
        return (job, None)
    return (_only(job, covered), _only(job, tasks - covered))


def covered(name: str, jobs: Iterable[Job]) -> tuple[Job, ...]:
    """What of these waiting jobs a name covers."""
    return tuple(part for job in jobs if (part := split(job, (name,))[0]) is not None)


def covers(name: str, job: Job) -> bool:
    """Whether a name covers a waiting job, or some tasks of it."""
    return split(job, (name,))[0] is not None


def without(names: Iterable[str], gone: Iterable[str]) -> tuple[str, ...]:
    """The names less what `gone` covers. A whole array of which a part is gone is gone: what is
    left has no name.
    """
    lost: dict[str, set[int] | None] = {}
    for number, tasks in map(_read, gone):
        before = lost.get(number, set())
        if before is None or tasks is None:
            lost[number] = None
        else:
            lost[number] = before | tasks
    found = []
    for name in names:
        number, tasks = _read(name)
        taken = lost.get(number, set())
        if taken == set():
            found.append(name)
        elif tasks is not None and taken is not None and tasks - taken:
            found.append(_name(number, tasks - taken))
    return tuple(found)


def not_repeated(names: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    """The names less what `more` names again. A whole array stays whole where `more` names some
    tasks of it.
    """
    again = tuple(more)
    whole = {number for number, tasks in map(_read, again) if tasks is None}
    found: list[str] = []
    for name in names:
        number, tasks = _read(name)
        if tasks is None and number not in whole:
            found.append(name)
        else:
            found += without((name,), again)
    return tuple(found)


def tasks_of(job: Job) -> tuple[int, ...]:
    """The waiting tasks that a job stands for; none for a job that is no array's."""
    return job.pending_tasks or (() if job.task_id is None else (job.task_id,))


def _name(number: str, tasks: set[int]) -> str:
    if not tasks:
        return number
    if len(tasks) == 1:
        return f"{number}_{min(tasks)}"
    return f"{number}_[{format_ranges(sorted(tasks))}]"


def _only(job: Job, tasks: set[int]) -> Job:
    name = _name(array_number(job), tasks)
    single = min(tasks) if len(tasks) == 1 else None
    return replace(job, job_id=name, task_id=single, pending_tasks=tuple(sorted(tasks)))


def _read(name: str) -> tuple[str, set[int] | None]:
    """The number and the tasks (None: all) that a name means; what is no part is a number, that of
    no job perhaps.
    """
    match = _PART.fullmatch(name)
    tasks = None
    if match:
        tasks = named_tasks(match[2])
    if match is None or tasks is None:
        return (name, None)
    return (match[1], set(tasks))


MAXIMUM_NAMES = 65_536  # Slurm's own bound for one range; a longer list is a mistake, not a cluster

_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})", re.DOTALL)
# ----------------------------------------------------------------------------- lists of nodes
_HOSTS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand(text: str) -> tuple[str, ...]:
    """The names of a host list, in its order, repeated names kept. An empty text has none.

    Raises HostlistError for unbalanced brackets, bad ranges, or more than MAXIMUM_NAMES names.
    """
    names: list[str] = []
    try:
        for part in _split(text) if text.strip() else ():
            names.extend(_expand_part(part))
            if len(names) > MAXIMUM_NAMES:
                raise HostlistError(f"more than {MAXIMUM_NAMES} names")
    except HostlistError as error:
        if len(text) <= 60:
            shown = text
        else:
            shown = text[:57] + "..."
        raise HostlistError(f"host list {shown!r}: {error}") from None
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """The shortest usual host list of these names: sorted, each name once, ranges over the last
    number of a name.
    """
    plain: set[str] = set()
    numbered: dict[str, set[str]] = {}
    for name in names:
        if not name or re.search(r"[\s,\[\]]", name):
            raise HostlistError(
                f"{name!r} is no host name: it is empty or has blanks, commas or brackets"
            )
        match = _LAST_NUMBER.fullmatch(name)
        if match:
            numbered.setdefault(match[1], set()).add(match[2])
        else:
            plain.add(name)
    texts = [(name, name) for name in plain]
    for prefix, digits in numbered.items():
        ranges = _ranges(digits)
        single = len(ranges) == 1 and "-" not in ranges[0]
        texts.append((prefix, prefix + ranges[0] if single else f"{prefix}[{','.join(ranges)}]"))
    return ",".join(text for _, text in sorted(texts))


def nodes_text(names: Iterable[str]) -> str:
    """Node names as people write them, tw[01-04,07]; one after another where that cannot be done."""
    found = set(names)
    try:
        return compress(found)
    except HostlistError:
        return ",".join(sorted(found))


def _ranges(digits: set[str]) -> list[str]:
    """Ranges such as "01-26": a range's width is that of its first number."""
    remaining = set(digits)
    ranges = []
    for first in sorted(digits, key=lambda text: (int(text), len(text))):
        if first not in remaining:
            continue
        last = first
        remaining.discard(first)
        while (following := str(int(last) + 1).zfill(len(first))) in remaining:
            remaining.discard(following)
            last = following
        ranges.append(first if last == first else f"{first}-{last}")
    return ranges


def _split(text: str) -> list[str]:
    """Parts between the commas that stand outside brackets."""
    parts = []
    part = ""
    inside = False
    for character in text.strip():
        if character == "," and not inside:
            parts.append(part.strip())
            part = ""
            continue
        if character in "[]":
            if (character == "[") == inside:
                raise HostlistError("brackets do not match")
            inside = not inside
        part += character
    if inside:
        raise HostlistError("a bracket is not closed")
    parts.append(part.strip())
    if "" in parts:
        raise HostlistError("a name between two commas is missing")
    return parts


def _expand_part(part: str) -> list[str]:
    """All names of one part; several brackets multiply, the last varying fastest."""
    names = [""]
    for index, piece in enumerate(re.split(r"[\[\]]", part)):
        if index % 2 == 0:
            if re.search(r"\s", piece):
                raise HostlistError("a name has a blank in it")
            choices = [piece]
        else:
            choices = _expand_ranges(piece)
        if len(names) * len(choices) > MAXIMUM_NAMES:
            raise HostlistError(f"more than {MAXIMUM_NAMES} names")
        names = [name + choice for name in names for choice in choices]
    return names


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for entry in ranges.split(","):
        match = _HOSTS.fullmatch(entry.strip())
        if match is None:
            raise HostlistError(f"{entry!r} is neither a number nor a range like 01-26")
        first = match[1]
        last = match[2] or match[1]
        count = int(last) - int(first) + 1
        if count < 1:
            raise HostlistError(f"the range {entry!r} runs backwards")
        if len(numbers) + count > MAXIMUM_NAMES:
            raise HostlistError(f"more than {MAXIMUM_NAMES} names")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers
