"""`make recording`: a real first run in a terminal, recorded, as the picture of README.

The commands are typed into a shell of 80 x 24 on the embedded scheduler: a card, its data, a launch,
the watchdog, the status, a worker killed, what tr11 does then, and a stop. Mails go to a server of
this machine that keeps none. What the terminal shows after each is a
frame; the frames become one SVG that steps through them, without scripts or references, readable on
light and dark. Waits are left out, nothing else is. It takes some four minutes, and no network.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "first-run.svg"
TR11 = Path(sys.executable).parent
COLUMNS, ROWS = 80, 24
# Of one length, so that lines break where they would have broken at the place that is shown.
HOME, SHOWN_HOME = Path("/tmp/tr11"), "/home/ana"
PERSON = "ana"
PROMPT = "\x1b]133;A\x07"  # which a terminal does not show: a command has ended
MOST_BYTES = 150_000
PATIENCE_SECONDS = 600.0

DATA = "first-run/data"
TO_CARD = (
    "tr11 init --preset toy --yes --scheduler local --set run.name=first --mail ana@example.org"
    " --set alerts.smtp_host=127.0.0.1 --set alerts.smtp_port=8025"
)
TO_DATA = (
    f"tr11 data corpus --output {DATA}/corpus.jsonl",
    f"tr11 data tokenizer --corpus {DATA}/corpus.jsonl --vocab-size 4096 --output {DATA}/tokenizer",
    f"tr11 data preprocess --input {DATA}/corpus.jsonl --tokenizer {DATA}/tokenizer --output-prefix {DATA}/corpus",
)


class RecordingFailed(Exception):
    """The session did not go as it is to be shown; the text says what."""


@dataclass(frozen=True)
class Run:
    """Characters of one row that look alike; `column` is the first one's."""

    column: int
    text: str
    look: str


@dataclass(frozen=True)
class Frame:
    """What the terminal shows, row by row, and for how long."""

    rows: tuple[tuple[Run, ...], ...]
    seconds: float


class Terminal:
    """A shell in a terminal of 80 x 24 below HOME, what it has shown, and the frames taken of it."""

    def __init__(self) -> None:
        self._end, end = pty.openpty()
        termios.tcsetwinsize(end, (ROWS, COLUMNS))
        self.environment = {
            "HOME": str(HOME),
            "PATH": f"{TR11}:/usr/local/bin:/usr/bin:/bin",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "USER": PERSON,
            "LOGNAME": PERSON,
            "TR11_LOCAL_NODES": "8",
            "PS1": rf"\[{PROMPT}\]$ ",
        }
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            cwd=HOME,
            env=self.environment,
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
        )
        os.close(end)
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.Stream(self._screen)
        self._text = ""
        self.commands: list[str] = []
        self.frames: list[Frame] = []
        self._until_prompts(1)

    def _read(self) -> None:
        if select.select([self._end], [], [], 0.2)[0]:
            text = os.read(self._end, 65536).decode("utf-8", errors="replace")
            self._text += text
            self._stream.feed(text)

    def _until(self, text: str, count: int = 1) -> None:
        before = time.monotonic()
        while self._text.count(text) < count:
            if time.monotonic() - before > PATIENCE_SECONDS:
                raise RecordingFailed(f"{text!r} was not shown:\n{self._text[-2000:]}")
            self._read()

    def _until_prompts(self, count: int) -> None:
        self._until(PROMPT, count)

    def _press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def take(self, seconds: float) -> None:
        """A frame of what is shown now."""
        self.frames.append(Frame(tuple(rows_of(self._screen)), seconds))

    def clear(self) -> None:
        self._screen.reset()
        self._stream.feed("$ ")

    def type(self, command: str, seconds: float, until: str = "") -> None:
        """Type a command, and take what is shown when it has ended, for so many seconds; one that
        does not end by itself is left with Ctrl-C once it has shown `until`.
        """
        self.commands.append(command)
        prompts = self._text.count(PROMPT)
        self._press(command)
        self._until(command[-8:], self._text.count(command[-8:]) + 1)
        self.take(1.2)
        self._press("\r")
        if until:
            self._until(until)
            self._press("\x03")
        self._until_prompts(prompts + 1)
        self.take(seconds)

    def close(self) -> None:
        """End the shell, and first what runs in its background: that outlives it."""
        self._press("kill $(jobs -p); wait; exit\r")
        try:
            self._shell.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._shell.pid, signal.SIGHUP)
            self._shell.wait()
        os.close(self._end)


def rows_of(screen: pyte.Screen) -> Iterator[tuple[Run, ...]]:
    """What a screen shows, without the blanks behind it."""
    for number in range(screen.lines):
        runs: list[Run] = []
        for column in range(screen.columns):
            cell = screen.buffer[number][column]
            look = " ".join(looks(cell))
            if runs and runs[-1].look == look:
                runs[-1] = Run(runs[-1].column, runs[-1].text + cell.data, look)
            else:
                runs.append(Run(column, cell.data, look))
        yield tuple(run for run in runs if run.text.strip() or "reverse" in run.look)


def looks(cell: pyte.screens.Char) -> Iterator[str]:
    """The classes of a character."""
    if cell.fg != "default":
        yield {"brown": "yellow", "brightblack": "dim"}.get(cell.fg, cell.fg.removeprefix("bright"))
    if cell.bg != "default":
        yield "reverse"
    if cell.bold:
        yield "bold"
    if cell.reverse and cell.bg == "default":
        yield "reverse"


# ----------------------------------------------------------------------------- the session
def recorded() -> Terminal:
    """The session, typed. Raises RecordingFailed."""
    terminal = Terminal()
    sink = subprocess.Popen(
        [sys.executable, "-m", "aiosmtpd", "-n", "-l", "127.0.0.1:8025"],
        stdout=subprocess.DEVNULL,
    )
    try:
        terminal.type(TO_CARD, 3.0)
        terminal.type("tr11 doctor --scheduler local | tail -n 13", 5.0)
        terminal.clear()
        for command in TO_DATA:
            terminal.type(command, 1.5)
        terminal.clear()
        terminal.type("tr11 launch --array 1-3 --scheduler local | tail -n 12", 5.0)
        terminal.type("tr11 cron run &> watchdog.txt &   # it looks every five minutes", 3.0)
        until_trained(terminal, 30)
        terminal.clear()
        terminal.type("tr11 status", 7.0)
        terminal.clear()
        terminal.type('kill -9 $(pgrep -n -f "trainer $HOME")   # a worker dies', 2.0)
        terminal.type("tr11 logs -f -n 0 --grep ^tr11:", 7.0, until="launch 2 on")
        until_trained(terminal, 60)
        terminal.clear()
        terminal.type("tr11 status", 7.0)
        terminal.clear()
        terminal.type('tr11 kill --wait --yes --reason "good night"', 7.0)
    finally:
        stop(terminal)
        terminal.close()
        sink.terminate()
        sink.wait()
    return terminal


def until_trained(terminal: Terminal, step: int) -> None:
    """Wait, unseen, until the run is healthy and as far as this step."""
    before = time.monotonic()
    while True:
        done = subprocess.run(
            ["tr11", "status", "--json"],
            cwd=HOME,
            env=terminal.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        state = json.loads(done.stdout)
        reached = state.get("iteration") or 0
        if state.get("verdict") == "healthy" and reached >= step:
            return
        if time.monotonic() - before > PATIENCE_SECONDS:
            raise RecordingFailed(f"it does not train: {done.stdout[:2000]}")
        time.sleep(2)


def stop(terminal: Terminal) -> None:
    """Whatever became of the session, nothing of it runs on."""
    subprocess.run(
        ["tr11", "kill", "--now", "--wait", "--yes"],
        cwd=HOME,
        env=terminal.environment,
        capture_output=True,
        check=False,
    )


# ----------------------------------------------------------------------------- the picture
CELL, LINE, MARGIN = 8.4, 18, 16
STYLE = """
svg{--back:#fbfbfa;--ink:#24292f;--edge:#d0d7de;--dim:#57606a;--red:#b3261e;--green:#116329;
--yellow:#7d4e00;--blue:#0550ae;--magenta:#8250df;--cyan:#0b6a75}
@media (prefers-color-scheme:dark){svg{--back:#161b22;--ink:#e6edf3;--edge:#30363d;--dim:#9da7b3;
--red:#ff7b72;--green:#56d364;--yellow:#e3b341;--blue:#79c0ff;--magenta:#d2a8ff;--cyan:#56d4dd}}
.back{fill:var(--back);stroke:var(--edge)}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;
fill:var(--ink);white-space:pre}
.bold{font-weight:700}.block{fill:var(--ink)}.reverse{fill:var(--back)}
.frame{visibility:hidden}.still{visibility:visible}
"""
COLOURS = ("dim", "red", "green", "yellow", "blue", "magenta", "cyan")


def picture(frames: list[Frame], commands: Iterable[str], still: int) -> str:
    """The SVG that steps through the frames without end; where nothing moves it shows that of the
    number `still`.
    """
    width, height = COLUMNS * CELL + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    style = STYLE + "".join(f".{name}{{fill:var(--{name})}}" for name in COLOURS)
    style += "".join(f".block.{name}{{fill:var(--{name})}}" for name in COLOURS)
    style += ".reverse{fill:var(--back)}\n"
    whole = sum(frame.seconds for frame in frames)
    style += "@media (prefers-reduced-motion:no-preference){.frame{visibility:hidden;"
    style += f"animation-duration:{whole:.1f}s;animation-timing-function:step-end;"
    style += "animation-iteration-count:infinite}\n"
    begin = 0.0
    groups = []
    for number, frame in enumerate(frames):
        end = begin + frame.seconds
        style += f"#f{number}{{animation-name:k{number}}}@keyframes k{number}{{0%{{visibility:"
        first = "visible" if number == 0 else "hidden"
        style += f"{first}}}{100 * begin / whole:.3f}%{{visibility:visible}}"
        style += f"{100 * end / whole:.3f}%{{visibility:hidden}}100%{{visibility:hidden}}}}\n"
        shown = "frame still" if number == still else "frame"
        groups.append(f'<g id="f{number}" class="{shown}">{"".join(_rows(frame))}</g>')
        begin = end
    style += "}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
            "<title>A first run in a terminal; waits are left out</title>",
            f"<desc>{escape(chr(10).join(commands))}</desc>",
            f"<style>{style}</style>",
            f'<rect class="back" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
            *groups,
            "</svg>\n",
        )
    )


def _rows(frame: Frame) -> Iterator[str]:
    for number, row in enumerate(frame.rows):
        top = MARGIN + number * LINE
        for run in row:
            text = run.text if "reverse" in run.look else run.text.rstrip()
            left, wide = MARGIN + run.column * CELL, len(text) * CELL
            if "reverse" in run.look:
                block = run.look.replace("reverse", "block")
                yield f'<rect class="{block}" x="{left:g}" y="{top:g}" width="{wide:g}" height="{LINE}"/>'
            look = f' class="{run.look}"' if run.look else ""
            if "reverse" in run.look:
                look = ' class="reverse bold"'
            yield (
                f'<text x="{left:g}" y="{top + 13:g}" textLength="{wide:g}"{look}>'
                f"{escape(text, quote=False)}</text>"
            )


def without_place(text: str) -> str:
    """The picture's text without this machine's folder. Raises RecordingFailed where more of the
    machine is in it.
    """
    text = text.replace(str(HOME), SHOWN_HOME)
    for word in (str(ROOT), str(Path.home()), socket.gethostname(), getpass.getuser(), "/tmp/"):
        if f" {word}" in text or (word.startswith("/") and word in text and len(word) > 1):
            raise RecordingFailed(f"{word} is in the picture: name it otherwise, or leave it out")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Record a first run as the picture of README.")
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    try:
        HOME.mkdir()
    except FileExistsError:
        print(
            f"{HOME} is there: remove it, or wait for the recording that uses it", file=sys.stderr
        )
        return 1
    try:
        terminal = recorded()
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
    still = next(n for n, frame in enumerate(terminal.frames) if "HEALTHY" in str(frame.rows))
    text = without_place(picture(terminal.frames, terminal.commands, still))
    if len(text.encode()) > MOST_BYTES:
        raise RecordingFailed(f"{len(text.encode())} bytes: more than {MOST_BYTES}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {len(terminal.frames)} frames, {len(text.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
