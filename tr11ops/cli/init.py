"""`tr11 init`: writes a starter card for this cluster from what its scheduler says, and asks for the rest."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import Refusal, SchedulerOption, SetOption, card_path, is_terminal, open_scheduler, say

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler
    from tr11ops.cluster.site import SiteRules
    from tr11ops.launch.starter import Place

EXAMPLE = "demo"


def init(
    *,
    example: Annotated[
        str | None, typer.Option("--from", metavar="CARD", help="Card to start from: a path, or a shipped one's name.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The card to write.")] = Path(
        "tr11.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take what is proposed.")] = False,
    scheduler: SchedulerOption = "auto",
    overrides: SetOption = None,
) -> None:
    """Write a starter card for this cluster.

    Partition, limits, GPUs, cores and accounts come from the scheduler; the model from the example card. Only what
    cannot be known is asked: the name, the directory, the data. --set answers beforehand.

    Exit code 0: written; 1: the file is there, or no nodes are; 2: wrong usage; 3: no answer from the scheduler.

    [bold]Examples[/bold]

      tr11 init

      tr11 init --from tr11-176B-ml -o big.toml --yes --set run.name=big --set data.prefixes='["corpus/text_document"]'
    """
    from tr11ops.launch.starter import Answers, example_tables, places, proposed_nodes, starter_tables, starter_text
    from tr11ops.runcard_load import read_tables

    if output.exists() and not force:
        raise Refusal(f"{output} is there: nothing was written; use -o FILE, or --force to replace it")
    source = card_path(example or EXAMPLE)
    base = example_tables(source)
    edge = open_scheduler(scheduler)
    found = places(edge.partitions(), edge.nodes())
    if not found:
        raise Refusal(f"{edge.name} has no partition with nodes that is up: nothing to write a card for")
    if not yes and not is_terminal():
        raise Refusal("nobody can be asked here (not a terminal): add --yes, and --set for what you know", exit_code=2)
    site = _site(edge)
    asker = _Asker(_given(overrides or []), ask=not yes)
    place = _choose_place(asker, found)
    name = asker.text("run.name", "Name of the run", _word(Path.cwd().name))
    proposed = str(proposed_nodes(place, base))
    answers = Answers(
        name=name,
        directory=asker.text("run.directory", "Run directory: logs, checkpoints, state", f"{name}-run"),
        place=place,
        nodes=_count(asker.text("slurm.nodes", f"Nodes of one attempt, of {place.nodes}", proposed)),
        account=_account(asker, site),
    )
    tables = _completed(starter_tables(base, answers), asker, overrides or [])
    _write(output, starter_text(tables, answers, site, source.name))
    if "rehearsal" in read_tables(source):
        say(f"[rehearsal] of {source.name} is left out: this card trains; to rehearse, add the section (docs/twin.md)")
    say(f"written: {output}; look it over, then `tr11 doctor --run {output}`")


# ----------------------------------------------------------------------------- questions
class _Asker:
    """Answers from `--set` first, then from the person, then as proposed."""

    def __init__(self, given: dict[str, str], ask: bool) -> None:
        self._given = given
        self._ask = ask

    @property
    def known(self) -> frozenset[str]:
        """The keys that `--set` gives."""
        return frozenset(self._given)

    def text(self, key: str, question: str, proposed: str) -> str:
        if key in self._given:
            return self._given[key]
        if not self._ask:
            return proposed
        return str(typer.prompt(question, default=proposed, err=True))


def _given(overrides: list[str]) -> dict[str, str]:
    """Key and text of each `--set`, without quotes."""
    pairs = (override.partition("=") for override in overrides)
    return {name.strip(): text.strip().strip("\"'") for name, equals, text in pairs if equals}


def _choose_place(asker: _Asker, found: tuple[Place, ...]) -> Place:
    if len(found) > 1:
        for place in found:
            say(f"  {place}")
    name = found[0].partition.name
    if len(found) > 1 or "slurm.partition" in asker.known:
        name = asker.text("slurm.partition", "Partition", name)
    chosen = next((place for place in found if place.partition.name == name), None)
    if chosen is None:
        there = ", ".join(place.partition.name for place in found)
        raise Refusal(f"slurm.partition = {name!r}: is not a partition here; use one of: {there}", exit_code=2)
    return chosen


def _account(asker: _Asker, site: SiteRules | None) -> str:
    """Slurm's own default where the user has one account; else it is asked."""
    accounts = site.accounts if site else ()
    return asker.text("slurm.account", f"Account ({', '.join(accounts)})", accounts[0]) if len(accounts) > 1 else ""


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise Refusal(f"slurm.nodes = {text!r}: is not a number of nodes; use 1 or more", exit_code=2)
    return int(text)


def _word(text: str) -> str:
    """A folder's name as a run's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


# ----------------------------------------------------------------------------- the card
def _site(edge: Scheduler) -> SiteRules | None:
    from tr11ops.cluster.site import read_site
    from tr11ops.journal import user_name

    return read_site(user_name()) if edge.name == "slurm" else None


def _completed(tables: dict[str, dict[str, Any]], asker: _Asker, overrides: list[str]) -> dict[str, Any]:
    """Data and tokenizer asked for, and all of `--set` applied. Raises CardError for a `--set` that is wrong."""
    from tr11ops.runcard import RunCard
    from tr11ops.runcard_load import apply_overrides
    from trainer.config import CardError

    directory = tables["run"]["directory"]
    data, tokenizer = tables.setdefault("data", {}), tables.setdefault("tokenizer", {})
    if not {"data.prefixes", "data.train_group", "data.train_groups_file"} & asker.known:
        prefix = asker.text(
            "data.prefix", "Indexed dataset, without .bin or .idx", f"{directory}/data/corpus_text_document"
        )
        for key in ("weights", "train_group", "train_groups_file", "cache"):
            data.pop(key, None)
        data["prefixes"] = [prefix]
    if "tokenizer.path" not in asker.known:
        tokenizer["path"] = asker.text("tokenizer.path", "Folder of the tokenizer", f"{directory}/data/tokenizer")
    done, problems = apply_overrides(tables, overrides, RunCard)
    if problems:
        raise CardError("command line", problems)
    return done


def _write(output: Path, text: str) -> None:
    """Put the card in place once it has been read as one. Raises CardError when it is none, OSError."""
    from tr11ops.runcard import load_card
    from trainer.contract import write_beside

    draft = write_beside(output, text)
    try:
        load_card(draft, (), os.environ, keep_undefined=True)
        draft.replace(output)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
