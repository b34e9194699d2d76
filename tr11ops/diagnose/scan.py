"""A log read once, from its first line to its last: what it says of each launch. Pure: it is given
blocks of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

from msgspec.structs import replace

from tr11ops.base.errors import HostlistError
from tr11ops.base.word_search import WordPresence, line_end
from tr11ops.cluster.arrays import expand
from tr11ops.diagnose.elastic import HEADS, ReportReader
from tr11ops.diagnose.gpu_memory import is_absurd, is_held_by_others
from tr11ops.diagnose.hosts import LogHead
from tr11ops.diagnose.lines import full_origin, plain, split_prefixes, time_of
from tr11ops.diagnose.matcher import CandidateLine, Matcher, text_of
from tr11ops.diagnose.nvlink import CODES as NVLINK_CODES, of_nvlink
from tr11ops.diagnose.sighting import LogLaunch, ProgressMark, Sighting, TrainingStep
from tr11ops.diagnose.signature import SURE_END, FaultSignature, Role
from tr11ops.diagnose.topics import UNTOLD, of_exception, of_line
from tr11ops.diagnose.tracebacks import HEAD, RaisedException, TracebackReader
from tr11ops.dialects.reading import PLACE, StepReader, step_of, total_in, trainer_in
from tr11ops.dialects.table import progress_words

KEPT = 8  # sightings of one signature in a launch, and as many of each further writer
WRITERS = 64
LAUNCHES = 40  # the newest ones
TAIL_BYTES = 256 << 10  # of the steps before the end of a launch
END_BYTES = 64 << 10
LAST_BYTES, LAST_LINES = 8 << 10, 20  # in which the time of the end is sought
FEW_WORDS = 3  # are sought one by one
HEAD_BLOCKS, HEAD_BYTES = 4, 256 << 10  # where a trainer names itself before its first step
HOSTS_BYTES = 48 << 10  # of a launch's begin, where its hosts are named
SEQUENTIAL_LINES = 3000  # read one by one after a traceback or a report begins
TEXT = 1000  # characters of a line that are kept
TRIES = 8  # lines that hold a word of a step and are none, before a part is given up
_ORDER = (
    Role.BENIGN,
    Role.START,
    Role.END,
    Role.CAUSE,
    Role.STOP,
    Role.DEATH,
    Role.SYMPTOM,
    Role.SUMMARY,
    Role.CONSEQUENCE,
    Role.WARNING,
)
_EXCEPTION = "python-exception"
_NO_MEMORY = "cuda-oom"
_MISSING = "storage-missing-data"
_SAID_HOST = "said-host"
_HELD = "memory-held"
_ABSURD = "memory-absurd"
# a GPU that fell off the bus, or computes wrongly, is but a warning to some
_NEVER_MILD = frozenset({"xid", "replays", "checks", "monitors"})
_SAID_MILDLY = frozenset({"ray-node-dead"})  # by their program's habit
_OF_THE_PAST = re.compile(  # what is told of an earlier job, or is repaired
    r"\b(?:previous|earlier|former|last) (?:(?:job|run|attempt|launch|try)s? )?(?:\S{1,40} )?(?:had )?"
    r"(?:failed|died|crashed|ended)\b"
    r"|\b(?:repaired|replaced|fixed|mended) since\b"
)
# of a node, not of the job
_OF_OTHER_SERVICES = re.compile(r"/system\.slice/(?!slurm|docker|kube|containerd|cri-)")
# Commands, comments, source in boxes and settings name errors and are none.
_QUOTED = re.compile(
    r"\s*(?:(?!\w*(?:HOST|NODE|ADDR)|EXIT_CODE=)[A-Z][A-Z0-9_]{3,}=\S*\s*$"
    r"|\++ \S|# |#SBATCH\b|\$ |echo |export |declare -x |\u2502|[\w-]+ \.{3,} )"
    r"|\s{2,}(?:(?:raise|if|elif|return|assert|except|with|for|while)\b|print\(|self\.|(?!what\()[\w.]+\()"
)
_RETRIED = re.compile(
    r"\bretry \d+: "
    r"|\b(?:[Rr]etrying|will (?:be )?retr(?:y|ied)|[Tt]rying again|will try again|[Pp]olling again)\b"
    r"|\b(?:entering retry|backing off|will wait for recovery)\b"
    r"|\bthrown while requesting\b"
    r"|\b(?:[Rr]etry|[Aa]ttempt)[ :#]*(?P<try>\d+) ?(?:/|of) ?(?P<tries>\d+)"
)
# the levels of Python, glog, TensorFlow, NeMo and NCCL; NCCL's WARN is its word for an error
_MILD = re.compile(
    r"\[(?:INFO|DEBUG)\]|\b(?:INFO|DEBUG)(?::(?! task \S+ blocked)| *[|-] )|- (?:INFO|DEBUG) -"
    r"|(?<![A-Z]CCL )(?<!CCOM )(?<!=)\bWARN(?:ING)?\b|Warning: |(?<!kern: )\bwarning: |\bNCCL (?:INFO|TRACE) "
    r"|(?:^|[\s:\[])[IW]\d{4} (?:[\w.-]{1,40} )?\d\d:\d\d|\[[IW] [\w./]{1,80}\.\w{1,3}:\d"
    r"|^\[[IW] \w{1,40}\]|: [IW] [a-z_]{1,20}/|\[NeMo [IW] |\bfall(?:s|ing)? back (?:to|on)\b"
)
# a program's own word for an error, also where who repeats it calls it a warning
_OWN_ERROR = re.compile(
    r" NCCL WARN |CUDA initialization: (?:Unexpected error|CUDA unknown error|CUDA driver init)"
    r"|\b(?:sbatch|salloc): error: "
)
_AT_EXIT = re.compile(  # of Python, which prints what these raise, and goes on
    r"multiprocessing/util\.py.{0,40}in (?:_run_finalizers|_exit_function|_remove_temp_dir)"
)
_IN_A_THREAD = re.compile(r"threading\.py.*in _bootstrap_inner")
_REPORTERS = re.compile(  # whose threads tell others of a training, which goes on without them
    r"/(?:wandb|tensorboardX?|mlflow|comet_ml|neptune|clearml|swanlab|aim|sentry_sdk|prometheus_client|trackio)/"
)
_NUMBERS = re.compile(r"[-+]?\d[\d.,:]*(?:e[-+]?\d+)?")
_FULL_BAR = re.compile(r"\b100%\|[^|]*\| (\d+)/\1 \[")
BELOW_AT_MOST = 8  # lines that belong to a step
LEVEL = 160  # characters in which a line names its level
_LATE = "start-megatron"  # rank 0 may print it when it dies, with all that its buffer holds
_IS_OVER_FOR_CERTAIN = frozenset({Role.STOP, Role.DEATH, Role.END, Role.SUMMARY})
_IS_OVER = _IS_OVER_FOR_CERTAIN | {Role.CAUSE, Role.SYMPTOM}
_ORDERED = frozenset({Role.STOP, Role.END})
Writer = tuple[int | None, int | None, int | None, str | None]


class LogScan:
    """One file. Feed it blocks of whole lines, then ask for `launches()`."""

    def __init__(self, file: str, matcher: Matcher) -> None:
        self._file = file
        self._matcher = matcher
        self._exception = _signature_with(matcher, _EXCEPTION)
        self._held, self._absurd = (
            _signature_with(matcher, _HELD),
            _signature_with(matcher, _ABSURD),
        )
        self._launch = LogLaunch(file)
        self._past: list[LogLaunch] = []
        self._line = 1  # number of the first line of the block, then of the line at the cursor
        self._tracebacks: dict[Writer, TracebackReader] = {}
        self._reports = ReportReader()
        self._sequential = 0
        # signature: line of the last step when its sightings were looked through
        self._forgotten: dict[str, int] = {}
        # that lines of steps may hold in this log: up to the one that they held
        self._words = progress_words()
        self._words_here: tuple[bytes, ...] = ()  # of these, what the block holds
        self._trainer: str | None = None  # that the file names
        # steps that the training has, by its own words before the first one
        self._total: int | None = None
        self._heads = 0  # blocks in which these were looked for
        self._step_block = b""  # up to the last step
        self._before = b""  # the end of what this launch said in earlier blocks
        self._head = b""  # the first of what this launch said
        self._block = b""  # that is read
        self._begin = 0  # where in the block it goes on
        self._start_of_line = 0  # of the line that is read, in the block

    def begin_file(self, file: str) -> None:
        """What comes next is of another file, which goes on where the last one ended."""
        if file != self._file:
            self._file = file
            self._line = 1

    def feed(self, block: bytes) -> None:
        """The next block of whole lines."""
        self._read_head(block)
        self._words_here = self._held_words(block)
        self._block = block
        candidates = iter(self._matcher.candidates(block))
        candidate = next(candidates, None)
        self._begin = cursor = searched = 0  # self._line is the number of the line at the cursor
        while cursor < len(block):
            if self._sequential:
                start = cursor
            elif candidate is not None:
                start = max(cursor, block.rfind(b"\n", 0, candidate.start) + 1)
            else:
                break
            end = line_end(block, start)
            here: list[CandidateLine] = []
            while candidate is not None and candidate.start <= end:
                if candidate.start >= start:
                    here.append(candidate)
                candidate = next(candidates, None)
            self._line += block.count(b"\n", cursor, start)
            self._find_progress(block, searched, start)
            searched = self._start_of_line = start
            self._visit(block, start, end, here)
            cursor = end + 1
            # the last line of a log that is still written has no end yet
            self._line += end < len(block)
        if cursor < len(block):
            tail = max(searched, len(block) - END_BYTES)
        else:
            tail = searched
        self._line += block.count(b"\n", cursor)
        self._find_progress(block, tail, len(block))
        self._before = (self._before + block[max(self._begin, len(block) - TAIL_BYTES) :])[
            -TAIL_BYTES:
        ]
        self._add_to_head(len(block))
        self._block = b""

    def _add_to_head(self, end: int) -> None:
        """Keep the first of what the launch says, of the block up to an offset."""
        room = HOSTS_BYTES - len(self._head)
        if room > 0:
            self._head += self._block[self._begin : min(end, self._begin + room)]

    def _held_words(self, block: bytes) -> tuple[bytes, ...]:
        """The words of steps that the block may hold."""
        if len(self._words) <= FEW_WORDS:
            return self._words
        held = _progress_search().held(block)
        return tuple(word for word in self._words if word in held)

    def _read_head(self, block: bytes) -> None:
        """Which trainer it is, and how many steps it is to do, before the first of them."""
        if self._heads == HEAD_BLOCKS:
            return
        self._heads += 1
        head = block[:HEAD_BYTES]
        self._trainer = self._trainer or trainer_in(head)
        self._total = self._total or total_in(head)

    def launches(self) -> list[LogLaunch]:
        """All launches, the oldest first; at least one."""
        self._end_launch()
        while len(self._past) > 1 and _goes_on(self._past[-2], self._past[-1]):
            newest = self._past.pop()
            _join(self._past[-1], newest)
        return self._past

    # ------------------------------------------------------------------------- one line
    def _visit(self, block: bytes, start: int, end: int, candidates: list[CandidateLine]) -> None:
        if self._sequential:
            self._sequential -= 1
        if not candidates:
            candidates = [CandidateLine(start, min(end, start + TEXT), ())]
        for candidate in candidates:
            self._read(text_of(block, candidate), candidate.rules)
        if self._sequential and self._is_idle():
            self._sequential = 0

    def _read(self, text: str, numbers: tuple[int, ...]) -> None:
        prefix, body = split_prefixes(text)
        raised = self._raised(prefix.writer, body)
        if self._reports.is_open or body.strip().strip("*").strip() in HEADS:
            self._reports.feed(body, self._line)
            self._sequential = self._sequential or SEQUENTIAL_LINES
        if raised is None and _QUOTED.match(body):
            matches = []
        else:
            matches = list(self._matcher.match(body, numbers))
        if raised is not None and not raised.said and raised.source:
            # a bare AssertionError: what was asserted says more
            matches += self._matcher.match_text(raised.source)
        if raised is None and matches and self._is_in_frame(prefix.writer, body):
            return
        if raised is not None and (raised.is_ignored or _is_of_a_finalizer(raised)):
            return
        if matches or raised:
            signature, named = _best(matches, raised, self._exception)
            found = self._by_topic(signature, text, body, raised)
            if found is not None:
                self._add(text, found, named, raised)

    def _by_topic(
        self, signature: FaultSignature, text: str, body: str, raised: RaisedException | None
    ) -> FaultSignature | None:
        """What a line means by its words where no signature says more; None where it means nothing."""
        if signature is UNTOLD:
            return of_line(body)
        if signature.id in NVLINK_CODES:
            return of_nvlink(signature, body)
        if signature.id == _NO_MEMORY:
            return self._by_memory(signature, text)
        if signature.id == _MISSING and raised is not None:
            return of_exception("", "", raised.frames) or signature  # by where it was raised
        if signature is not self._exception:
            return signature
        if raised is None:
            name, _, said = body.partition(":")
            return of_exception(name, said, ()) or signature
        return of_exception(raised.name, raised.said, raised.frames) or signature

    def _by_memory(self, signature: FaultSignature, text: str) -> FaultSignature:
        """What a lack of GPU memory is, by the numbers beside it."""
        if is_absurd(text):
            return self._absurd
        if is_held_by_others(text):
            return self._held
        return signature

    def _is_in_frame(self, writer: Writer, body: str) -> bool:
        """Whether the line is source code that a traceback quotes."""
        reader = self._tracebacks.get(writer)
        return reader is not None and reader.is_source(body)

    def _raised(self, writer: Writer, body: str) -> RaisedException | None:
        reader = self._tracebacks.get(writer)
        if reader is None:
            if HEAD not in body and not body.startswith("Exception ignored in"):
                return None
            if len(self._tracebacks) > 4 * WRITERS:
                self._tracebacks.clear()
            reader = self._tracebacks[writer] = TracebackReader()
        if HEAD in body:
            self._sequential = SEQUENTIAL_LINES
        return reader.feed(body)

    def _is_idle(self) -> bool:
        return not self._reports.is_open and all(
            reader.is_idle for reader in self._tracebacks.values()
        )

    def _add(
        self,
        text: str,
        signature: FaultSignature,
        named: dict[str, str],
        raised: RaisedException | None,
    ) -> None:
        if signature.role is Role.BENIGN:
            if "host" in named:
                self._launch.said_hosts.add(named["host"])
            return
        if signature.role is Role.START:
            self._start(signature, named)
            return
        counts = self._launch.counts
        origin = full_origin(text[:TEXT])
        counts[signature.id] = counts.get(signature.id, 0) + 1
        if counts[signature.id] > KEPT and not self._forget(signature.id):
            # who tries again and again leaves room for the line in which it gives up
            key = f"{signature.id} of {origin.writer}, {_is_retried(text)}"
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > 2 or len(counts) > 40 * WRITERS:
                return
        progress = self._launch.progress
        since = None
        if origin.time is None:
            since, _ = _last_time(
                self._block[
                    max(self._begin, self._start_of_line - LAST_BYTES) : self._start_of_line
                ]
            )
        self._launch.sightings.append(
            Sighting(
                self._file,
                self._line,
                text=text[:TEXT],
                signature=signature,
                origin=origin,
                named=named,
                progress=progress,
                raised=raised,
                is_retried=_is_retried(text),
                is_mild=_is_mild(signature, text) if raised is None else _is_of_a_reporter(raised),
                since=since,
            )
        )

    def _forget(self, name: str) -> bool:
        """Drop the sightings of this signature that the training has overcome; whether there is
        room for more now.
        """
        launch = self._launch
        if launch.progress is None or self._forgotten.get(name) == launch.progress.line_number:
            return False
        self._forgotten[name] = launch.progress.line_number
        launch.sightings = [
            one
            for one in launch.sightings
            if one.signature.id != name or not launch.has_overcome(one)
        ]
        return sum(one.signature.id == name for one in launch.sightings) < KEPT

    # ------------------------------------------------------------------------- launches and steps
    def _start(self, signature: FaultSignature, named: dict[str, str]) -> None:
        """A launch begins, unless this is one more line of the same beginning, or one that was
        printed late.
        """
        launch = self._launch
        is_sure = signature.id != _LATE
        over = _IS_OVER if is_sure else _IS_OVER_FOR_CERTAIN
        is_over = launch.progress is not None or any(
            one.signature.role in over for one in launch.sightings
        )
        if is_over or _is_another(launch, named):
            self._end_launch()
            self._launch = LogLaunch(self._file, self._line, nodes=launch.nodes, is_sure=is_sure)
        self._launch.is_sure = self._launch.is_sure or is_sure
        if named.get("attempt"):
            self._launch.label, self._launch.task = named["attempt"], named.get("task") or ""
        if named.get("number"):
            self._launch.number = int(named["number"])
        self._launch.nodes = _nodes(named.get("nodes")) or self._launch.nodes
        if named.get("world"):
            self._launch.world_size = int(named["world"])

    def _end_launch(self) -> None:
        launch = self._launch
        launch.last_line = self._line
        launch.reports = self._reports.found
        self._reports = ReportReader()
        if launch.progress is not None:
            launch.steps = tuple(_steps(self._step_block, launch.progress.line_number))
            launch.is_usual_below = self._is_usual_below(launch)
            launch.progress = _with_total(launch.progress, self._before)
        launch.trainer = self._trainer
        launch.is_cut = bool(self._before) and not self._before.endswith(b"\n")
        launch.last_time, below = _last_time(self._before)
        launch.last_timed_line = launch.last_line - below - self._before.endswith(b"\n")
        self._add_to_head(self._start_of_line)
        launch.heads = (
            LogHead(launch.file, launch.first_line, self._head.decode("utf-8", "replace")),
        )
        self._head = b""
        self._step_block = self._before = b""
        self._begin = self._start_of_line
        self._past = [*self._past, launch][-LAUNCHES:]
        self._tracebacks.clear()
        self._sequential = 0

    def _is_usual_below(self, launch: LogLaunch) -> bool:
        """Whether what stands below the last step is what stands between steps too."""
        assert launch.progress is not None
        below = launch.last_line - launch.progress.line_number - self._before.endswith(b"\n")
        if not 0 < below <= BELOW_AT_MOST or len(launch.steps) <= 1:
            return False
        lines = self._before.decode("utf-8", "replace").rstrip("\n").split("\n")
        first = launch.steps[0].line_number - launch.progress.line_number
        above = {_shape(line) for line in lines[first - below : -below]}
        return all(_shape(line) in above for line in lines[-below:])

    def _find_progress(self, block: bytes, start: int, end: int) -> None:
        """Take note of the last step in a part of the block. The line at `end` has the number
        self._line.
        """
        for word in self._words_here:
            at = end
            for _ in range(TRIES):
                at = block.rfind(word, start, at)
                if at < 0:
                    break
                line = (
                    max(block.rfind(b"\n", start, at), block.rfind(b"\r", start, at), start - 1) + 1
                )
                raw = block[line : min(_piece_end(block, at), at + TEXT)].decode("utf-8", "replace")
                step = step_of(raw, None, PLACE)
                if step is not None and (
                    step.iteration is not None or not step.dialect.has_numbers
                ):
                    if not step.dialect.guess:
                        self._words = self._words[: self._words.index(word) + 1]
                        self._words_here = self._words_here[: self._words_here.index(word) + 1]
                    self._trainer = step.dialect.name
                    where = self._line - block.count(b"\n", line, end)
                    self._launch.progress = ProgressMark(
                        where, step.iteration, plain(raw), step.total or self._total
                    )
                    self._step_block = self._up_to(block, at)
                    return
                at = line

    def _up_to(self, block: bytes, at: int) -> bytes:
        """What this launch said last, up to the end of the line at an offset: it may have begun in
        earlier blocks.
        """
        here = block[max(self._begin, at - TAIL_BYTES) : line_end(block, at)]
        if len(here) >= TAIL_BYTES:
            return here
        return (self._before + here)[-TAIL_BYTES:]


def _shape(line: str) -> str:
    """A line without its numbers."""
    return _NUMBERS.sub("#", plain(line))


def _is_of_a_reporter(raised: RaisedException) -> bool:
    """Whether an exception ended a thread that only reports, and not its process."""
    is_thread = any(_IN_A_THREAD.search(frame) for frame in raised.frames)
    return is_thread and any(_REPORTERS.search(frame) for frame in raised.frames)


def _is_of_a_finalizer(raised: RaisedException) -> bool:
    """Whether Python printed it while it tidied up at its end, and went on."""
    return bool(raised.frames) and _AT_EXIT.search(raised.frames[0]) is not None


def _is_mild(signature: FaultSignature, text: str) -> bool:
    """Whether a line calls itself a warning, or less, or tells of what is over."""
    if _OF_THE_PAST.search(text) or _OF_OTHER_SERVICES.search(text):
        return True
    if signature.family in _NEVER_MILD or signature.id in _SAID_MILDLY or _OWN_ERROR.search(text):
        return False
    return _MILD.search(text[:LEVEL]) is not None


@cache
def _signature_with(matcher: Matcher, name: str) -> FaultSignature:
    return next(
        rule.signature
        for rule in matcher.rules
        if rule.signature is not None and rule.signature.id == name
    )


def _is_another(launch: LogLaunch, named: dict[str, str]) -> bool:
    """Whether a line that numbers the launch that begins numbers another one than this."""
    if not named.get("number") or launch.number is None:
        return False
    return (named.get("attempt"), int(named["number"])) != (launch.label, launch.number)


def _is_retried(text: str) -> bool:
    """Whether a line says that what failed is tried once more; the last of several tries is not."""
    found = _RETRIED.search(text)
    return found is not None and (found["try"] is None or int(found["try"]) < int(found["tries"]))


def _steps(tail: bytes, last_line: int) -> Iterator[TrainingStep]:
    """The steps in the bytes that end with the line of this number."""
    lines = tail.decode("utf-8", "replace").split("\n")
    reader = StepReader()
    for number, line in enumerate(lines, start=last_line - len(lines) + 1):
        for part in line.split("\r"):
            for step in reader.feed(part):
                yield TrainingStep(step, number, plain(part)[-TEXT:])


def _goes_on(before: LogLaunch, newest: LogLaunch) -> bool:
    """Whether a launch is no new one: a late line of the one before, or its launcher's try again
    that came nowhere.
    """
    if newest.is_sure or newest.progress is not None:
        return False
    return not any(one.signature.role in _ORDERED for one in (*before.sightings, *newest.sightings))


def _join(launch: LogLaunch, rest: LogLaunch) -> None:
    """What was taken for a launch of its own belongs to the one before."""
    launch.sightings += rest.sightings
    launch.reports += rest.reports
    launch.last_line = rest.last_line
    launch.said_hosts |= rest.said_hosts
    launch.world_size = launch.world_size or rest.world_size


def _with_total(last: ProgressMark, tail: bytes) -> ProgressMark:
    """The last step, and that it is the training's last one where a bar beside the steps is full there."""
    if last.total is not None or last.iteration is None:
        return last
    of_bars = _FULL_BAR.findall(tail[-LAST_BYTES:].decode("utf-8", "replace"))
    if str(last.iteration) in of_bars:
        return replace(last, total=last.iteration)
    return last


def _last_time(tail: bytes) -> tuple[str | None, int]:
    """The time of the last of a launch's lines that has one, and how many stand below it."""
    lines = tail[-LAST_BYTES:].decode("utf-8", "replace").splitlines()[-LAST_LINES:]
    for below, line in enumerate(reversed(lines)):
        time = time_of(line[:TEXT])
        if time is not None:
            return time, below
    return None, len(lines)


@cache
def _progress_search() -> WordPresence:
    return WordPresence(progress_words())


def _piece_end(block: bytes, at: int) -> int:
    """Where a line ends, or what a carriage return leaves of it."""
    end = line_end(block, at)
    found = block.find(b"\r", at, end)
    if found >= 0:
        return found
    return end


# whose exceptions tell of a service far away, though a peer's connection breaks in the same words
_CLIENTS_OF_STORES = re.compile(
    r"(?:^|/site-packages/|/dist-packages/)(?:azure|google|botocore|boto3|s3transfer|s3fs|gcsfs|adlfs|oss2"
    r"|oci|minio|huggingface_hub|wandb)[./]"
)


def _is_of_a_store(raised: RaisedException) -> bool:
    """Whether a client of a service far away raised it, or called who did."""
    return any(_CLIENTS_OF_STORES.search(place) for place in (raised.name, *raised.frames))


def _best(
    matches: list[tuple[FaultSignature, re.Match[str]]],
    raised: RaisedException | None,
    generic: FaultSignature,
) -> tuple[FaultSignature, dict[str, str]]:
    for vague in (UNTOLD, generic):
        matches = [one for one in matches if one[0] is not vague] or matches
    if any(one[0].role is Role.CAUSE and one[0] not in (UNTOLD, generic) for one in matches):
        # a line that begins with its host's name and tells of an error is no mere name
        matches = [one for one in matches if one[0].id != _SAID_HOST]
    if raised is not None and _is_of_a_store(raised):
        matches = [one for one in matches if one[0].role is not Role.SYMPTOM]
    if raised is not None and matches and matches[0][0] is UNTOLD:
        matches = []
    if not matches:
        return generic, {}
    if raised is not None:  # what was raised is no mere line, whatever its words
        matches = [one for one in matches if one[0].role is not Role.BENIGN] or matches
    signature, match = min(matches, key=lambda one: _rank(one[0]))
    groups = match.groupdict()
    return signature, {name: value for name, value in groups.items() if value is not None}


def _rank(signature: FaultSignature) -> tuple[int, float]:
    """Which of the signatures of one line counts: the least. An end that is not sure comes after
    all that is one.
    """
    is_vague = signature.role is Role.END and signature.confidence < SURE_END
    return len(_ORDER) if is_vague else _ORDER.index(signature.role), -signature.confidence


def _nodes(names: str | None) -> tuple[str, ...]:
    try:
        if names:
            return expand(names)
        return ()
    except HostlistError:
        return ()


def scan(file: str, blocks: Iterable[bytes], matcher: Matcher) -> list[LogLaunch]:
    """What a file says of each launch. `blocks` end with a line each."""
    log = LogScan(file, matcher)
    for block in blocks:
        log.feed(block)
    return log.launches()
