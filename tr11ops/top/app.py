"""The screen of `tr11 top`. What it shows is made in `tr11ops.top.tables`, what it does are the
commands themselves through `tr11ops.api`, with their own preview. No look holds up a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from tr11ops import api
from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import PLAN_CHANGED
from tr11ops.top.commands import REASON, Planned, plan_of, said
from tr11ops.top.tables import (
    LookedAt,
    TopTable,
    attempts_table,
    column_widths,
    nodes_table,
    ranks_table,
    runs_table,
)
from trainer.contract.errors import Tr11Error
from trainer.contract.state_file import tail_lines

LOG_BYTES = 64 << 10
HELP = """\
Enter  go into the line: run, attempt, node
Esc    back; out of a filter first
/      show the lines that have these words
l      the end of the run's log
d      what ended it (tr11 diagnose)
a      take its alerts (tr11 alerts ack --all)
k      save and stop it (tr11 kill)
u      let it go on (tr11 resume)
r      look now
?      this page
q      leave

a, k and u show the command's own plan first. Only the three keys that
the plan names carry it out, as it was shown; Esc does not.

It looks every {seconds:g} s. What is not known is a dash.
"""


class TextScreen(ModalScreen[None]):  # type: ignore[misc]  # textual may be absent
    """A text to read; `apply` is what the `keys` do, where there is something to do."""

    BINDINGS: ClassVar[list[Any]] = [Binding("escape,q,n", "dismiss", "back")]
    CSS = "TextScreen VerticalScroll { background: $surface; padding: 0 1; }"

    def __init__(
        self, title: str, text: str, keys: str = "", apply: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._head, self._text, self._keys, self._apply = title, text, keys, apply
        self._typed = ""

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._head, classes="head", markup=False)
            yield Static(self._text, id="text", markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).scroll_end(animate=False)

    def on_key(self, event: Any) -> None:
        if self._apply is None:
            return
        self._typed += event.key
        if self._typed.endswith(self._keys):
            apply, self._apply = self._apply, None  # once, however often the keys come
            self.dismiss()
            apply()


class TopApp(App[None]):  # type: ignore[misc]  # textual may be absent
    """Runs -> a run's attempts -> an attempt's nodes -> a node's ranks."""

    CSS = """
    #head { height: 1; background: $primary; color: $text; }
    #why { height: 2; }
    Input { display: none; height: 1; border: none; }
    DataTable { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("l", "log", "log"),
        Binding("d", "diagnose", "diagnose"),
        Binding("a", "ack", "ack"),
        Binding("k", "kill", "kill"),
        Binding("u", "resume", "go on"),
        Binding("r", "look", "look", show=False),  # no room in 80 columns
        Binding("escape", "back", "back"),
        Binding("question_mark", "keys", "keys", key_display="?"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, find: Callable[[], Sequence[api.Run | Refusal]], seconds: float) -> None:
        super().__init__()
        self.animation_level = "none"  # a slow line carries the text alone
        self._find, self._seconds = find, seconds
        self._runs: dict[str, api.Run] = {}
        self._looks: tuple[LookedAt, ...] = ()
        self._path: list[str] = []
        self._words = ""
        self._shown = TopTable("runs", (), ())
        self._is_planning = False

    # ------------------------------------------------------------------------- the frame
    def compose(self) -> ComposeResult:
        yield Static("tr11 top: looking ...", id="head", markup=False)
        yield Static("", id="why", markup=False)
        yield DataTable(cursor_type="row")
        yield Input(placeholder="words; Esc shows all")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self.set_interval(self._seconds, self.action_look)
        self.action_look()

    def action_look(self) -> None:
        """Look at all runs, beside the screen; one round at a time."""
        self.run_worker(self._look, thread=True, exclusive=True, group="look")

    def _look(self) -> None:
        runs: dict[str, api.Run] = {}
        looks: list[LookedAt] = []
        for found in self._find():
            if isinstance(found, Refusal):
                looks.append(LookedAt("", "?", None, str(found)))
                continue
            key = str(found.directory.root)
            runs[key] = found
            name = f"{found.name}/{found.directory.paths.variant}"
            looks.append(LookedAt(key, name, found.look()))
        self.call_from_thread(self._seen, runs, tuple(looks))

    def _seen(self, runs: dict[str, api.Run], looks: tuple[LookedAt, ...]) -> None:
        self._runs, self._looks = runs, looks
        self._draw()

    def _draw(self) -> None:
        table = self._table()
        self._shown = table.filtered(self._words)
        head = f"tr11 top   {table.title}"
        if self._words:
            head += f"   /{self._words} ({len(self._shown.rows)} of {len(table.rows)})"
        self.query_one("#head", Static).update(head)
        self.query_one("#why", Static).update(table.sentence)
        widget = self.query_one(DataTable)
        line = widget.cursor_row
        widget.clear(columns=True)
        for title, width in zip(table.columns, column_widths(table, self.size.width), strict=True):
            widget.add_column(title, width=width)
        for row in self._shown.rows:
            widget.add_row(*row.cells)
        if self._shown.rows:
            widget.move_cursor(row=min(max(0, line), len(self._shown.rows) - 1))

    def on_resize(self) -> None:
        """The last column takes what is left of the line."""
        if self._looks:
            self._draw()

    def _table(self) -> TopTable:
        run = self._run_seen()
        if run is None:
            return runs_table(self._looks)
        if len(self._path) == 1:
            return attempts_table(run)
        if len(self._path) == 2:
            return nodes_table(run, self._path[1])
        return ranks_table(run, self._path[2])

    def _run_seen(self) -> LookedAt | None:
        if not self._path:
            return None
        return next((run for run in self._looks if run.key == self._path[0]), None)

    # ------------------------------------------------------------------------- going
    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        key = self._shown.rows[event.cursor_row].key
        if key:
            self._path.append(key)
            self._words = ""
            self._draw()

    def action_back(self) -> None:
        """Out of the filter first, then a table up."""
        box = self.query_one(Input)
        if box.display or self._words:
            box.display, self._words = False, ""
        elif self._path:
            self._path.pop()
        self.query_one(DataTable).focus()
        self._draw()

    def action_filter(self) -> None:
        """Ask for the words that a line has to have."""
        box = self.query_one(Input)
        box.value, box.display = "", True
        box.focus()

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
    def _run(self) -> api.Run | None:
        """The run that the screen is in, else that of the line."""
        if self._path:
            return self._runs.get(self._path[0])
        rows, line = self._shown.rows, self.query_one(DataTable).cursor_row
        if 0 <= line < len(rows):
            return self._runs.get(rows[line].key)
        return None

    def action_log(self) -> None:
        run = self._run()
        if run is not None:
            self._beside(run, "log", partial(_log_end, run.directory.paths.main_log))

    def action_diagnose(self) -> None:
        run = self._run()
        if run is not None:
            self._beside(run, "diagnose", partial(_answer, run, ["diagnose"]))

    def action_ack(self) -> None:
        self._preview(["alerts", "ack", "--all"], [])

    def action_kill(self) -> None:
        self._preview(["kill"], ["--yes"])

    def action_resume(self) -> None:
        self._preview(["resume"], ["--yes"])

    def _preview(self, words: list[str], flags: list[str]) -> None:
        """The command's own plan; its keys type the command, with the flags. One plan at a time: a
        key that is pressed again, while a slow line shows nothing yet, asks for no second one.
        """
        run = self._run()
        if run is not None and not self._is_planning:
            self._is_planning = True
            work = partial(self._plan, run, words, flags)
            self.run_worker(work, thread=True, group="act")

    def _plan(self, run: api.Run, words: list[str], flags: list[str], before: str = "") -> None:
        title = f"tr11 {' '.join(words)}   {run.name}"
        try:
            plan = plan_of(run, words)
        except (Tr11Error, OSError) as error:
            self.call_from_thread(self._show_plan, TextScreen(title, str(error)))
            return
        text = f"{before}{plan.text}"
        if not plan.mark:
            self.call_from_thread(self._show_plan, TextScreen(title, text))
            return
        text += f"\n\nType {plan.keys} to carry it out; Esc leaves it."
        apply = partial(self._apply, run, words, flags, plan=plan)
        self.call_from_thread(self._show_plan, TextScreen(title, text, plan.keys, apply))

    def _show_plan(self, screen: TextScreen) -> None:
        self._is_planning = False
        self.push_screen(screen)

    def _apply(self, run: api.Run, words: list[str], flags: list[str], plan: Planned) -> None:
        """Carry out what was shown; what has become another plan meanwhile is shown again."""

        def work() -> None:
            line = [*words, *flags, *REASON, "--as-shown", plan.mark]
            try:
                _, text = said(run, line)
            except (Tr11Error, OSError) as error:
                text = str(error)
            if PLAN_CHANGED in text:
                self._plan(run, words, flags, f"{PLAN_CHANGED[0].upper()}{PLAN_CHANGED[1:]}.\n\n")
                return
            title = f"{' '.join(words)}   {run.name}"
            self.call_from_thread(self._show_plan, TextScreen(title, text))

        self._is_planning = True
        self.run_worker(work, thread=True, group="act")

    def _beside(self, run: api.Run, title: str, read: Callable[[], str]) -> None:
        """Show a text that takes its time, once it is there."""

        def work() -> None:
            try:
                text = read()
            except (Tr11Error, OSError) as error:
                text = str(error)
            self.call_from_thread(self.push_screen, TextScreen(f"{title}   {run.name}", text))

        self.run_worker(work, thread=True, group="act")


def _log_end(path: Path) -> str:
    lines, _ = tail_lines(path, LOG_BYTES)
    return "\n".join(lines)


def _answer(run: api.Run, words: list[str]) -> str:
    return said(run, words)[1]
