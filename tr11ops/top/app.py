"""The screen of `tr11 top`. What it shows is made in `tr11ops.top.tables`, what it does are the
commands themselves through `tr11ops.api`, with their own preview. No look holds up a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from tr11ops.base.invocation import PLAN_CHANGED
from tr11ops.base.now import now
from tr11ops.base.shipped import page_lines
from tr11ops.base.units import timestamp
from tr11ops.rundir.journal import user_name
from tr11ops.top.commands import REASON, exclusion, keys_of, next_commands, words_of
from tr11ops.top.looks import RunLooks
from tr11ops.top.tables import (
    LookedAt,
    TopRow,
    TopTable,
    alerts_table,
    attempts_table,
    column_widths,
    nodes_table,
    ranks_table,
    runs_table,
)
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.errors import Tr11Error
from trainer.contract.state_file import tail_lines
from trainer.contract.units import shortened

if TYPE_CHECKING:
    from tr11ops.api import Run

BECAUSE = "because"  # how the reason is asked for
LOOKING = "looking ..."
DOING = "carrying it out ..."
LEAVING = "qn"  # keys that leave a text, beside Esc
LOG_BYTES = 64 << 10
PAGE_MARGIN = 1  # characters beside a text: the scroll bar
DRAW_SECONDS = 0.5  # between two drawings while a round of looks goes on
SAID_SECONDS = 60.0  # that an answer stays whose screen was left
FOLLOW_SECONDS = 1.0  # between two looks at a run that stops, while a person waits for it
NO_NODE = "No node is known to be slow or accused: go to a node (Enter) to exclude it."
NOTHING_BELOW = "Nothing is below this line: attempts that run have nodes, and nodes have ranks."
NOT_QUEUED = "Nothing stands in its way, and nothing is queued: "
OF_ALERTS = frozenset({"of_alert", "of_alerts", "shift"})  # keys of the alerts alone
GO_ON = frozenset({"nodes", "resume"})  # commands after which it is said how the run goes on
HELP = """\
up, down  another line (the arrow keys; k is no move)
Enter  go into the line: run, running attempt, node
Esc    back; out of a filter first
/      show the lines that have these words
l      the end of the run's log
d      what ended it (tr11 diagnose)
a      its alerts; there: a take it, A take all, s snooze it for 2 h,
       t take the shift, Enter its runbook page
k      save and stop it (tr11 kill): its plan and the reason first
u      let it go on (tr11 resume; where nothing is queued, tr11 launch)
x      keep it off a node (tr11 nodes exclude): the node of the line, of a
       run the slow or accused one; it asks for the reason
r      look now
?      this page
q      leave

What changes something shows the command's own plan first. Only the three
keys that the plan names carry it out, as it was shown; Esc does not.

It looks every {seconds:g} s. What is not known is a dash.
"""


# On the run of a screen, with what was typed there; and what the screen becomes, one after another.
Act: TypeAlias = Callable[["TextScreen", str], None]
Steps: TypeAlias = Iterator[tuple[Any, ...]]


class TextScreen(ModalScreen[None]):  # type: ignore[misc]  # textual may be absent
    """A text to read, which may be open before its text is there. `asked`: what is asked for first (""
    for nothing), `proposed` the answer to it that may be taken as it is; `answered` is what another
    answer does. `key`: the run that it is about.
    """

    BINDINGS: ClassVar[list[Any]] = [("escape,q,n", "dismiss", "back")]
    # as wide as what commands print where no terminal is: 79 characters, and the scroll bar
    CSS = "TextScreen VerticalScroll { background: $surface; scrollbar-size-vertical: 1; }"

    def __init__(
        self,
        head: str,
        text: str,
        key: str = "",
        asked: str = "",
        proposed: str = "",
        answered: Act | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.text = text
        self.key = key
        self._asked = asked
        self._answer = proposed
        self._answered = answered
        self._typed = self.keys = ""
        self.apply: Act | None = None

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self.head, classes="head", markup=False)
            yield Static(self._said(), id="text", markup=False)

    def become(
        self, text: str, keys: str = "", apply: Act | None = None, at_end: bool = False
    ) -> None:
        """Show what was awaited; `apply` is what the `keys` do. What was typed meanwhile as the answer stays,
        and confirms nothing.
        """
        self.text = text
        self.keys = keys
        self.apply = apply
        self._show(at_end or bool(keys))

    def _show(self, at_end: bool = False) -> None:
        # none where the screen is left, or still to be drawn
        for place in self.query("#text").results(Static):
            place.update(self._said())
            if at_end:
                self.query_one(VerticalScroll).scroll_end(animate=False)

    def _said(self) -> str:
        """The text, and right behind it what is to be typed."""
        said = self.text
        first = ""
        if self._asked:
            answer = self._typed or self._answer
            said += f"\n\n{self._asked}: {answer}_"
            first = "Enter, then " if answer else "why, Enter, then "
        if self.keys:
            said += f"\n\nType {first}{self.keys} to do it; Esc: back."
        return said

    def on_paste(self, event: Any) -> None:
        if self._asked:
            self._typed += event.text
            self._show()

    def on_key(self, event: Any) -> None:
        """First what is asked for, then the keys of the plan that is shown."""
        typed = event.character if event.is_printable else ""
        if not self._asked:
            if not typed or typed in LEAVING:
                return
            self._confirm(typed)
        elif typed:
            self._typed += typed
        elif event.key == "backspace":
            self._typed = self._typed[:-1]
        elif event.key == "enter":
            self._take()
        else:
            return
        event.stop()
        event.prevent_default()
        self._show()

    def _take(self) -> None:
        """Take the answer, once there is one."""
        typed = " ".join(self._typed.split())
        self._typed = ""
        self._answer = typed or self._answer
        if self._answer:
            self._asked = ""
        if typed and self._answered is not None:
            self._answered(self, typed)

    def _confirm(self, typed: str) -> None:
        if self.apply is not None:
            self._typed += typed
            if self._typed.endswith(self.keys):
                apply = self.apply
                self.become(DOING)  # once, however often the keys come
                apply(self, self._answer)


class TopApp(App[None]):  # type: ignore[misc]  # textual may be absent
    """Runs -> a run's attempts -> an attempt's nodes -> a node's ranks."""

    CSS = """
    #head { height: 1; background: $primary; color: $text; }
    #why { height: auto; min-height: 2; max-height: 7; padding: 0 1; }
    #more { height: auto; min-height: 4; max-height: 11; padding: 0 1; background: $boost; }
    Input { display: none; height: 1; border: none; }
    DataTable { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        Binding("slash", "filter", "find", key_display="/"),
        ("l", "log", "log"),
        ("d", "diagnose", "why"),
        ("a", "alerts", "alerts"),
        ("a", "of_alert('ack {}')", "ack"),
        Binding("A", "of_alerts('ack --all')", "ack all", show=False),
        ("s", "of_alert('snooze {} --for 2h')", "snooze"),
        ("t", "shift", "shift"),
        ("k", "kill", "kill"),
        ("u", "resume", "go on"),
        ("x", "exclude", "exclude"),
        Binding("r", "look", "look", show=False),  # no room in 80 columns, nor for `q`
        ("escape", "back", "back"),
        Binding("question_mark", "keys", "keys", key_display="?"),
        Binding("q", "quit", "quit", show=False),
    ]

    def __init__(self, looks: RunLooks, seconds: float) -> None:
        super().__init__()
        self.animation_level = "none"  # a slow line carries the text alone
        self._finder = looks
        self._seconds = seconds
        self._looks: dict[str, LookedAt] = {}
        self._path: list[str] = []
        self._alerts_of = ""  # the run whose alerts are shown, "" for none
        self._words = ""
        self._shown = TopTable("runs", (), ())
        self._drawn = 0.0
        self._is_due = False  # a drawing
        self._round = LOOKING
        self._is_looking = False
        self._is_untouched = True  # no key yet, in the first round of looks
        self._who = ""  # who has taken the shift here, "" for the user of this process

    # ------------------------------------------------------------------------- the frame
    def compose(self) -> ComposeResult:
        yield Static("tr11 top: looking ...", id="head", markup=False)
        yield Static("", id="why", markup=False)
        yield DataTable(cursor_type="row")
        yield Static("", id="more", markup=False)
        yield Input(placeholder="words; Esc leaves it")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self.set_interval(self._seconds, self.action_look)
        self.action_look()

    def action_look(self) -> None:
        """Look at all runs, beside the screen; one round at a time."""
        if not self._is_looking:
            self._is_looking = True
            self.run_worker(self._look, thread=True, group="look")

    def _look(self) -> None:
        if not self._looks:
            self.call_from_thread(self._seen, tuple(self._finder.on_record()))
        found = set()
        for look in self._finder.each():
            found.add(look.key)
            self.call_from_thread(self._seen, (look,))
        self.call_from_thread(self._looked, found)

    def _seen(self, looks: Sequence[LookedAt]) -> None:
        """Show what is known so far; of a long round, twice a second."""
        self._looks |= {look.key: look for look in looks}
        left = self._drawn + DRAW_SECONDS - time.monotonic()
        if left < 0.0:
            self._draw()
        elif not self._is_due:  # the next look may take its time
            self._is_due = True
            self.set_timer(left, self._draw_due)

    def _draw_due(self) -> None:
        if self._is_due:  # and not drawn meanwhile
            self._draw()

    def _looked(self, found: Set[str]) -> None:
        """A round is over: these runs were found."""
        self._is_looking = False
        self._looks = {key: look for key, look in self._looks.items() if key in found}
        self._round = timestamp(now(), UTC, "as of %H:%M:%S UTC")
        self._draw()
        self._is_untouched = False

    def _draw(self, chosen: str = "") -> None:
        """The table of the place that the keys have gone to. `chosen`: the key of the line with the
        cursor; else it stays with its line, wherever that is now. Where no key was pressed, it is with the
        worst run until all were looked at.
        """
        widget = self.query_one(DataTable)
        line = widget.cursor_row
        chosen = chosen or self._chosen().key
        if self._is_untouched:
            line = 0
            chosen = ""
        table = self._table()
        self._shown = table.filtered(self._words)
        self._drawn = time.monotonic()
        self._is_due = False
        head = f"{table.title}   {self._round}"
        if self._words:
            head += f"   /{self._words} ({len(self._shown.rows)} of {len(table.rows)})"
        self.query_one("#head", Static).update(head)
        self.query_one("#why", Static).update(table.sentence)
        widget.clear(columns=True)
        widths = column_widths(table, self.size.width)
        for title, width in zip(table.columns, widths, strict=False):
            widget.add_column(title, width=width)
        for row in self._shown.rows:
            widget.add_row(*map(shortened, row.cells, widths))
        keys = [row.key for row in self._shown.rows]
        if chosen and chosen in keys:
            line = keys.index(chosen)
        if keys:
            widget.move_cursor(row=line)  # or the last one
        self.on_data_table_row_highlighted()

    def on_data_table_row_highlighted(self) -> None:
        """What the line with the cursor is about, in full."""
        for place in self.query("#more").results(Static):  # none while the screen is left
            place.update(self._chosen().more)

    def _chosen(self) -> TopRow:
        """The line with the cursor; an empty one where there is none."""
        rows = self._shown.rows
        line = self.query_one(DataTable).cursor_row
        return rows[line] if 0 <= line < len(rows) else TopRow("", ())

    def on_resize(self) -> None:
        """The last column takes what is left of the line."""
        if self._looks:
            self._draw()

    def _table(self) -> TopTable:
        run = self._looks.get(self._place())
        if run is None:
            return runs_table(tuple(self._looks.values()))
        if run.look is None:
            return TopTable(run.name, ("run",), (), run.sentence)
        if self._alerts_of:
            return alerts_table(run)
        if len(self._path) == 1:
            return attempts_table(run)
        if len(self._path) == 2:
            return nodes_table(run, self._path[1])
        return ranks_table(run, self._path[2])

    def _place(self) -> str:
        """The run that the screen is in, "" for all runs."""
        return self._alerts_of or "".join(self._path[:1])

    # ------------------------------------------------------------------------- going
    def on_key(self, event: Any) -> None:
        """A key reaches the table first. One that was typed right behind another, which has opened a
        question meanwhile, belongs to that.
        """
        self._is_untouched = False
        box = self.query_one(Input)
        if isinstance(self.screen, TextScreen):
            self.screen.on_key(event)
        elif box.display and event.is_printable:
            box.insert_text_at_cursor(event.character)
            event.prevent_default()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Which keys count where the screen is, and stand in its last line."""
        if action in OF_ALERTS:
            return bool(self._alerts_of)
        if action in {"alerts", "log", "diagnose", "exclude"}:
            return not self._alerts_of
        return True

    def on_data_table_row_selected(self) -> None:
        """Into the line with the cursor, at the first line of what is there."""
        row = self._chosen()
        if row.page:
            lines = page_lines(f"{row.page}.md", self.size.width - PAGE_MARGIN)
            self.push_screen(TextScreen(f"tr11 runbook {row.page}", "\n".join(lines)))
            return
        if self._alerts_of or not row.key:
            self.query_one("#why", Static).update(NOTHING_BELOW)
            return
        self._path.append(row.key)
        self._words = ""
        self.query_one(DataTable).move_cursor(row=0)
        self._draw()

    def action_back(self) -> None:
        """Out of the filter first, then a table up."""
        box = self.query_one(Input)
        left = ""
        if box.display or self._words:
            box.display = False
            self._words = ""
        elif self._alerts_of:
            left = self._alerts_of
            self._alerts_of = ""
            self.refresh_bindings()
        elif self._path:
            left = self._path.pop()
        self.query_one(DataTable).focus()
        self._draw(left)

    def action_filter(self) -> None:
        """Ask for the words that a line has to have."""
        box = self.query_one(Input)
        box.value = ""
        box.display = True
        self.screen.set_focus(box)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._words = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        self.query_one(Input).display = False
        self.query_one(DataTable).focus()

    def action_keys(self) -> None:
        """What each key does."""
        self.push_screen(TextScreen("keys", HELP.format(seconds=self._seconds)))

    # ------------------------------------------------------------------------- doing
    def _target(self) -> str:
        """The run that the screen is in, else that of the line; "" for none."""
        return self._place() or self._chosen().key

    def action_log(self) -> None:
        self._beside("log", _log_end)

    def action_diagnose(self) -> None:
        self._beside("tr11 diagnose", _diagnosis)

    def action_alerts(self) -> None:
        """Who has its alerts."""
        self._alerts_of = self._target()
        self._words = ""
        self.refresh_bindings()
        self.query_one(DataTable).move_cursor(row=0)
        self._draw()

    def action_of_alert(self, words: str) -> None:
        """Of the incident of the line: not of a later one of its kind."""
        if self._chosen().key:
            self.action_of_alerts(words.format(self._chosen().key))

    def action_of_alerts(self, words: str) -> None:
        """A command about alerts."""
        self._plan(["alerts", *words.split()])

    def action_shift(self) -> None:
        """By the person's mail address; where none is known of this user, the plan says whose are."""
        who = self._who or user_name()
        self._plan(["alerts", "take-shift"], "who", who, self._take_shift)

    def _take_shift(self, screen: TextScreen, address: str) -> None:
        self._who = address
        screen.become(LOOKING)
        words = ["alerts", "take-shift", "--as", address]
        self._fill(screen, partial(self._planned, words=words))

    def action_kill(self) -> None:
        self._plan(["kill"], BECAUSE, self._fault())

    def action_resume(self) -> None:
        """Take away what stands in its way; where nothing does and nothing is queued, launch it."""
        self._beside("tr11 resume", self._way_on, BECAUSE, self._fault())

    def _fault(self) -> str:
        """What an act on the run would be about; "" where nothing is wrong, or that is not known."""
        run = self._looks.get(self._target())
        return "" if run is None or run.look is None else run.look.status.main_fault

    def _way_on(self, run: Run) -> Steps:
        [plan] = self._planned(run, ["resume"])
        if len(plan) == 1:
            for line in next_commands(self._finder.look(run.directory.root).seen)[:1]:
                if words_of(line)[:1] == ["launch"]:
                    [plan] = self._planned(run, words_of(line), f"{NOT_QUEUED}{line}\n\n")
        yield plan

    def action_exclude(self) -> None:
        """Keep the run off a node, for a reason that is asked for."""
        run = self._looks.get(self._target())
        if run is not None and run.look is not None:
            words, why = exclusion(run.look, "".join((*self._path, self._chosen().key)[2:3]))
            if words:
                self._plan(words, BECAUSE, why)
                return
        self.query_one("#why", Static).update(NO_NODE)

    def _plan(self, words: list[str], *asked: Any) -> None:
        """The command's own plan; its keys type the command. `asked`: as a TextScreen asks it first."""
        self._beside(f"tr11 {' '.join(words)}", partial(self._planned, words=words), *asked)

    def _planned(self, run: Run, words: list[str], before: str = "") -> Steps:
        plan = run.command(words, REASON, dry_run=True, who=self._who, as_text=True)
        lines = [line for line in plan.lines if not line.endswith("(--dry-run)")]
        text = before + "\n".join(lines)
        if plan.plan:
            yield text, keys_of(plan.plan), partial(self._apply, words, plan.plan)
        else:
            yield (f"{text}\n\nThere is nothing to carry out; Esc goes back.",)

    def _apply(self, words: list[str], mark: str, screen: TextScreen, reason: str) -> None:
        """Carry out what was shown, and say how the run is then: of one that stops, until it has
        stopped. What has become another plan meanwhile is shown again.
        """
        asks = words[0] != "alerts"

        def work(run: Run) -> Steps:
            answer = run.command(
                words, reason if asks else REASON, asks=asks, plan=mark, who=self._who, as_text=True
            )
            if answer.has_changed:
                yield from self._planned(run, words, f"{PLAN_CHANGED}.\n\n")
                return
            said = "\n".join(answer.lines)
            yield (said,)
            while asks:
                seen = self._finder.look(run.directory.root)
                self.call_from_thread(self._seen, (seen,))
                # who has just typed the reason need not read it again
                lines = [seen.state.replace(f" ({reason})", ""), "", said]
                if words[0] in GO_ON:
                    lines += [f"next: {way}" for way in next_commands(seen.seen)]
                yield ("\n".join(lines),)
                if words[0] != "kill" or not screen.is_attached:
                    break
                if seen.seen.status.verdict is not VerdictWord.STOPPING:
                    break
                time.sleep(FOLLOW_SECONDS)
            self.call_from_thread(self.action_look)  # what has become of it

        self._fill(screen, work)

    def _beside(self, words: str, work: Callable[[Run], Steps], *asked: Any) -> None:
        """Open a screen at once, and show there what takes its time."""
        run = self._looks.get(self._target())
        if run is not None:
            screen = TextScreen(f"{run.name}: {words}", LOOKING, run.key, *asked)
            self.push_screen(screen)
            self._fill(screen, work)

    def _fill(self, screen: TextScreen, work: Callable[[Run], Steps]) -> None:
        """Make beside the screen what it shows: each is shown in place of the one before."""

        def make() -> None:
            try:
                for made in work(self._finder.open(Path(screen.key))):
                    self.call_from_thread(self._came, screen, *made)
            except (Tr11Error, OSError, ValueError) as error:
                self.call_from_thread(self._came, screen, str(error))

        self.run_worker(make, thread=True, group="act")

    def _came(self, screen: TextScreen, text: str, *plan: Any) -> None:
        """Show it there; of what was carried out also where that was left."""
        if screen.text == DOING and screen not in self.screen_stack:
            self.notify(text, title=screen.head, timeout=SAID_SECONDS, markup=False)
        screen.become(text, *plan)


def _log_end(run: Run) -> Steps:
    from tr11ops.logs.lines import as_typed

    lines, _ = tail_lines(run.directory.paths.main_log, LOG_BYTES)
    yield "\n".join(map(as_typed, lines)), "", None, True


def _diagnosis(run: Run) -> Steps:
    yield (run.output_of(["diagnose"]).text,)
