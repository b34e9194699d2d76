"""A node made of texts: what commands print, what files say, and what is done to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tr11ops.base.errors import Unanswered
from tr11ops.base.processes import ProbeOutput
from tr11ops.health.base import SharedMemoryFile, Space, TrainerProcess

DATA = Path(__file__).parents[2] / "data" / "health"


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


@dataclass
class RecordedSystem:
    """`commands`: words that the command line must hold, to what it gives; anything else is not
    installed.
    """

    commands: dict[str, ProbeOutput | Exception] = field(default_factory=dict)
    files: dict[str, str | OSError] = field(default_factory=dict)
    spaces: dict[str, Space] = field(default_factory=dict)
    probe: float | OSError = 0.01
    time: float = 1000.0
    processes: tuple[TrainerProcess, ...] = ()
    immortal: frozenset[int] = frozenset()
    shared: tuple[SharedMemoryFile, ...] = ()
    ended: list[int] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def command(self, arguments: Sequence[str], seconds: float) -> ProbeOutput:
        line = " ".join(arguments)
        self.asked.append(line)
        for words, answer in self.commands.items():
            if words in line:
                if isinstance(answer, Exception):
                    raise answer
                return answer
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

    def read(self, path: str) -> str:
        answer = self.files.get(path, FileNotFoundError(2, "No such file or directory", path))
        if isinstance(answer, OSError):
            raise answer
        return answer

    def names(self, folder: str) -> tuple[str, ...]:
        below = {
            path.removeprefix(folder + "/").split("/")[0]
            for path in self.files
            if path.startswith(folder + "/")
        }
        return tuple(sorted(below))

    def space(self, folder: str) -> Space:
        return self.spaces[folder]

    def write_probe(self, folder: str) -> float:
        if isinstance(self.probe, OSError):
            raise self.probe
        return self.probe

    def now(self) -> float:
        return self.time

    def trainer_processes(self) -> tuple[TrainerProcess, ...]:
        return self.processes

    def end(self, pids: Iterable[int]) -> tuple[int, ...]:
        self.ended += pids
        return tuple(pid for pid in self.ended if pid in self.immortal)

    def segments(self, names: re.Pattern[str]) -> tuple[SharedMemoryFile, ...]:
        return tuple(segment for segment in self.shared if names.fullmatch(segment.name))

    def remove_segment(self, name: str) -> None:
        self.removed.append(name)


def smi(name: str, words: str = "nvidia-smi", status: int = 0) -> RecordedSystem:
    """A node on which nvidia-smi prints one text."""
    return RecordedSystem(commands={words: ProbeOutput(status, text(name))})


SILENT = Unanswered("nvidia-smi: no answer within 30 s")
