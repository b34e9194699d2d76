"""The screen of `tr11 top`. What it shows is made in `tr11ops.top.tables`, what it does are the
commands themselves through `tr11ops.api`, with their own preview. No look holds up a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from tr11ops import api
from tr11ops.alerts.mail_route import mailed
from tr11ops.alerts.policy import policy_of
from tr11ops.base.invocation import PLAN_CHANGED
from tr11ops.base.now import now
from tr11ops.base.shipped import page_lines
from tr11ops.base.units import timestamp
from tr11ops.logs.lines import as_typed
from tr11ops.rundir.journal import user_name
from tr11ops.top.commands import (
    REASON,
    exclusion,
    keys_of,
    reason_now,
    told_next,
    words_of,
)
from tr11ops.top.looks import RunLooks, name_of
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
from trainer.contract.errors import Tr11Error
from trainer.contract.state_file import tail_lines

LOG_BYTES = 64 << 10
PAGE_MARGIN = 1  # characters beside a text: the scroll bar
DRAW_SECONDS = 0.5  # between two drawings while a round of looks goes on
WHY = "why is {}? The journal keeps it. Enter: the plan, Esc: back."
NO_NODE = "No node is known to be slow or accused: go to a node (Enter) to exclude it."
NOTHING_BELOW = "Nothing is below this line: attempts that run have nodes, and nodes have ranks."
NOT_QUEUED = "Nothing stands in its way, and nothing is queued:\n\n"
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
k      save and stop it (tr11 kill): the reason and its plan first
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


class TextScreen(ModalScreen[None]):  # type: ignore[misc]  # textual may be absent
    """A text to read, from its beginning or `at_end`; `apply` is what the `keys` do, where there is
    something to do.
    """

    BINDINGS: ClassVar[list[Any]] = [("escape,q,n", "dismiss", "back")]
    # as wide as what commands print where no terminal is: 79 characters, and the scroll bar
    CSS = "TextScreen VerticalScroll { background: $surface; scrollbar-size-vertical: 1; }"

    def __init__(
        self,
        title: str,
        text: str,
        keys: str = "",
        apply: Callable[[], None] | None = None,
        at_end: bool = False,
    ) -> None:
        super().__init__()
        self._head, self._text, self._keys, self.apply = title, text, keys, apply
        self._typed, self._at_end = "", at_end

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._head, classes="head", markup=False)
            yield Static(self._text, id="text", markup=False)

    def on_mount(self) -> None:
        if self._at_end or self.apply is not None:
            self.query_one(VerticalScroll).scroll_end(animate=False)

    def on_key(self, event: Any) -> None:
        if self.apply is None:
            return
        self._typed += event.key
        if self._typed.endswith(self._keys):
            apply, self.apply = self.apply, None  # once, however often the keys come
            self.dismiss()
            apply()


class TopApp(App[None]):  # type: ignore[misc]  # textual may be absent
    """Runs -> a run's attempts -> an attempt's nodes -> a node's ranks."""

    CSS = """
    #head { height: 1; background: $primary; color: $text; }
    #why { height: auto; min-height: 2; max-height: 7; }
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
        self._finder, self._seconds = looks, seconds
        self._looks: dict[str, LookedAt] = {}
        self._path: list[str] = []
        self._alerts_of = ""  # the run whose alerts are shown, "" for none
        self._words = ""
        self._question = ""  # that is asked in the line at the bottom, "" for the filter's words
        self._asked: Callable[[str], object] = str  # what is done with the answer to it
        self._shown = TopTable("runs", (), ())
        self._drawn = 0.0
        self._round, self._is_looking = "looking ...", False
        self._waits_for = ""
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
        if time.monotonic() - self._drawn > DRAW_SECONDS:
            self._draw()

    def _looked(self, found: Set[str]) -> None:
        """A round is over: these runs were found."""
        self._is_looking = False
        self._looks = {key: look for key, look in self._looks.items() if key in found}
        self._round = timestamp(now(), UTC, "as of %H:%M:%S UTC")
        self._draw()

    def _draw(self, chosen: str = "") -> None:
        """The table of the place that the keys have gone to. `chosen`: the key of the line with the
        cursor; else it stays with its line, wherever that is now.
        """
        widget = self.query_one(DataTable)
        line, chosen = widget.cursor_row, chosen or self._chosen().key
        table = self._table()
        self._shown = table.filtered(self._words)
        self._drawn = time.monotonic()
        head = f"tr11 top   {table.title}   {self._waits_for or self._round}"
        if self._words:
            head += f"   /{self._words} ({len(self._shown.rows)} of {len(table.rows)})"
        self.query_one("#head", Static).update(head)
        self.query_one("#why", Static).update(self._question or table.sentence)
        widget.clear(columns=True)
        widths = column_widths(table, self.size.width)
        for title, width in zip(table.columns, widths, strict=False):
            widget.add_column(title, width=width)
        for row in self._shown.rows:
            widget.add_row(*row.cells[: len(widths)])
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
        rows, line = self._shown.rows, self.query_one(DataTable).cursor_row
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
        if self._alerts_of or not self._path:
            return self._alerts_of
        return self._path[0]

    # ------------------------------------------------------------------------- going
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
        """Out of a question or the filter first, then a table up."""
        box, left = self.query_one(Input), ""
        if self._question:
            self._question, box.display = "", False
        elif box.display or self._words:
            box.display, self._words = False, ""
        elif self._alerts_of:
            left, self._alerts_of = self._alerts_of, ""
            self.refresh_bindings()
        elif self._path:
            left = self._path.pop()
        self.query_one(DataTable).focus()
        self._draw(left)

    def action_filter(self) -> None:
        """Ask for the words that a line has to have."""
        self._ask("")

    def _ask(self, question: str, value: str = "") -> None:
        """Ask in the line at the bottom; `value` may be taken as it is."""
        box = self.query_one(Input)
        self._question = question
        box.value, box.display = value, True
        box.focus()
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        if not self._question:
            self._words = event.value
            self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        question, answer = self._question, event.value.strip()
        if question and not answer:
            return
        self._question = ""
        self.query_one(Input).display = False
        self.query_one(DataTable).focus()
        if question:
            self._asked(answer)

    def action_keys(self) -> None:
        """What each key does."""
        self.push_screen(TextScreen("keys", HELP.format(seconds=self._seconds)))

    # ------------------------------------------------------------------------- doing
    def _target(self) -> str:
        """The run that the screen is in, else that of the line; "" for none."""
        return self._place() or self._chosen().key

    def _opened(self, key: str) -> api.Run:
        """A run by its key, also before its first look. Raises as `api.open_run` does."""
        found = self._looks.get(key)
        if found is None or found.run is None:
            return self._finder.open(Path(key))
        return found.run

    def action_log(self) -> None:
        self._beside("log", _log_end)

    def action_diagnose(self) -> None:
        self._beside("tr11 diagnose", _diagnosis)

    def action_alerts(self) -> None:
        """Who has its alerts."""
        self._alerts_of, self._words = self._target(), ""
        self.refresh_bindings()
        self.query_one(DataTable).move_cursor(row=0)
        self._draw()

    def action_of_alert(self, words: str) -> None:
        """Of the incident of the line: not of a later one of its kind."""
        if self._chosen().key:
            self.action_of_alerts(words.format(self._chosen().key))

    def action_of_alerts(self, words: str) -> None:
        """A command about alerts."""
        self._preview(["alerts", *words.split()])

    def action_shift(self) -> None:
        """By the person's mail address; it is asked for where the card does not tell it."""
        found = self._looks[self._alerts_of].run
        if found is None:
            return
        policy = policy_of(found.card, mark="", host="")
        self._asked = partial(self._take_shift, self._alerts_of)
        address = mailed(policy, user_name())
        if address:
            self._asked(address)
        else:
            known = ", ".join(policy.everyone)
            self._ask(f"Who takes the shift? No mail reaches {user_name()}; the card has: {known}")

    def _take_shift(self, key: str, address: str) -> None:
        self._who = address
        self._preview(["alerts", "take-shift", "--as", address], key=key)

    def action_kill(self) -> None:
        self._ask_why("to be stopped", partial(self._preview, ["kill"]))

    def action_resume(self) -> None:
        """Take away what stands in its way; where nothing does and nothing is queued, launch it."""
        self._ask_why("to go on", self._resume, REASON)

    def _resume(self, reason: str, key: str) -> None:
        self._beside("tr11 resume", partial(self._way_on, reason=reason), key)

    def _ask_why(self, what: str, work: Callable[..., None], why: str = "") -> None:
        """Ask for the reason of an act on the run of the line; `why`, else what its look has found, stands
        there.
        """
        key = self._target()
        run = self._looks.get(key)
        if run is None or self._waits_for:
            return
        if run.look is not None:
            why = why or reason_now(run.look)
        self._asked = partial(work, key=key)
        self._ask(f"{run.name}: {WHY.format(f'it {what}')}", why)

    def _way_on(self, run: api.Run, reason: str) -> TextScreen:
        screen = self._plan(run, ["resume"], reason)
        if screen.apply is None:
            for line in told_next(run)[:1]:
                if words_of(line)[:1] == ["launch"]:
                    return self._plan(run, words_of(line), reason, before=NOT_QUEUED)
        return screen

    def action_exclude(self) -> None:
        """Keep the run off a node, for a reason that is asked for."""
        run = self._looks.get(self._target())
        if run is not None and run.look is not None:
            words, why = exclusion(run.look, self._node())
            if words:
                self._asked = partial(self._preview, words, key=run.key)
                self._ask(f"{run.name}: {WHY.format(f'{words[2]} to be excluded')}", why)
                return
        self.query_one("#why", Static).update(NO_NODE)

    def _node(self) -> str:
        """The node that the line with the cursor is, or is of; "" for none."""
        if len(self._path) == 2:
            return self._chosen().key
        if len(self._path) > 2:
            return self._path[2]
        return ""

    def _preview(self, words: list[str], reason: str = REASON, key: str = "") -> None:
        """The command's own plan; its keys type the command."""
        plan = partial(self._plan, words=words, reason=reason)
        self._beside(f"tr11 {' '.join(words)}", plan, key)

    def _plan(
        self, run: api.Run, words: list[str], reason: str = REASON, before: str = ""
    ) -> TextScreen:
        name = name_of(run)
        plan = run.command(words, reason, dry_run=True, who=self._who, as_text=True)
        lines = (line for line in plan.lines if not line.endswith("(--dry-run)"))
        head = f"{before}{name}: tr11 {' '.join(words)}, because: {reason}"
        text = "\n".join((head, "", *lines, ""))
        if not plan.plan:
            return TextScreen(name, f"{text}\nThere is nothing to carry out; Esc goes back.")
        keys = keys_of(plan.plan)
        text += f"\nType {keys} to carry it out on {name}; Esc leaves it."
        return TextScreen(
            name, text, keys, partial(self._apply, run, words, reason, mark=plan.plan)
        )

    def _apply(self, run: api.Run, words: list[str], reason: str, mark: str) -> None:
        """Carry out what was shown; what has become another plan meanwhile is shown again."""

        def work(target: api.Run) -> TextScreen:
            asks = words[0] != "alerts"
            answer = target.command(
                words, reason, asks=asks, plan=mark, who=self._who, as_text=True
            )
            self.call_from_thread(self.action_look)  # what has become of it
            if answer.has_changed:
                changed = f"{PLAN_CHANGED[0].upper()}{PLAN_CHANGED[1:]}.\n\n"
                return self._plan(target, words, reason, changed)
            lines: tuple[str, ...] = ()
            if words[0] in GO_ON:
                lines = told_next(target)
            if lines:
                lines = ("", "Next (k stops it, u resumes it or launches it):", *lines)
            text = "\n".join((*answer.lines, *lines))
            return TextScreen(f"{name_of(target)}: tr11 {' '.join(words)}", text, at_end=True)

        self._beside(f"tr11 {' '.join(words)}", work, str(run.directory.root))

    def _beside(self, words: str, work: Callable[[api.Run], TextScreen], key: str = "") -> None:
        """Show what takes its time, once it is there; the head says that it is awaited. One at a time:
        a key that is pressed again, while a slow line shows nothing yet, asks for no second one.
        `key`: of the run; else it is the one that the screen shows.
        """
        target = key or self._target()
        if not target or self._waits_for:
            return

        def make() -> None:
            try:
                screen = work(self._opened(target))
            except (Tr11Error, OSError, ValueError) as error:
                screen = TextScreen(words, str(error))
            self.call_from_thread(self._came, screen)

        self._waits_for = f"{words} ..."
        self._draw()
        self.run_worker(make, thread=True, group="act")

    def _came(self, screen: TextScreen) -> None:
        self._waits_for = ""
        self._draw()
        self.push_screen(screen)


def _log_end(run: api.Run) -> TextScreen:
    lines, _ = tail_lines(run.directory.paths.main_log, LOG_BYTES)
    return TextScreen(f"log   {run.name}", "\n".join(map(as_typed, lines)), at_end=True)


def _diagnosis(run: api.Run) -> TextScreen:
    return TextScreen(f"tr11 diagnose   {run.name}", run.output_of(["diagnose"]).text)
