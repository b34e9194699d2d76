"""`tr11 init`: a starter card for this cluster."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.invocation import command_for
from tr11ops.base.units import quantity
from tr11ops.cli import completion
from tr11ops.cli.common import card_path, is_terminal
from tr11ops.cli.questions import (
    ACCOUNT,
    ACT,
    CHATS,
    DATASET,
    DIRECTORY,
    FOLDER,
    MAIL,
    NAME,
    NODES,
    NONE,
    PARTITION,
    SIZE,
    TOKENIZER,
    TOKENS,
    TRAINER,
    VOCABULARY,
    WORDS,
    Asker,
)
from tr11ops.cli.runner import NO_RUN, SCHEDULER, SET, Outcome, RunContext
from tr11ops.cluster.base import Scheduler
from tr11ops.cluster.site import SiteRules, read_site
from tr11ops.launch.foreign_starter import (
    BASE,
    COMMAND,
    SHORT_NAMES,
    example_of,
    foreign_tables,
    foreign_text,
    output_of,
    trainer_choices,
)
from tr11ops.launch.presets import PRESETS, preset_tables, token_count, tokens_of, with_tokens
from tr11ops.launch.starter import (
    Answers,
    PartitionChoice,
    dataset_suffix,
    example_tables,
    partition_choices,
    proposed_nodes,
    starter_tables,
    starter_text,
)
from tr11ops.observe.readers import open_scheduler
from tr11ops.runcard.card import ForeignCard, OwnCard, load_card, placed, shipped_folder
from tr11ops.runcard.load import apply_overrides, read_tables
from tr11ops.runcard.toml_writer import toml_value
from tr11ops.rundir.journal import user_name
from tr11ops.watchdog.policy import POWERS
from trainer.config.card import CardError
from trainer.contract.files import write_beside

EXAMPLE = "toy"
OWN = "tr11"  # the trainer that is not another's


def init(
    context: Annotated[RunContext, NO_RUN, SCHEDULER, SET],
    *,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="SIZE",
            help=f"Size of the model: {', '.join(PRESETS)}; toy unless given.",
            autocompletion=completion.words(*PRESETS),
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="COUNT", help="How much to train on: 300B, 5e9; else the size's."
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer",
            metavar="FAMILY",
            help="A card of another trainer: a family of `tr11 trainer list`, or command for any other.",
            autocompletion=completion.words(*trainer_choices()),
        ),
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", metavar="NAME", help="Who pays (slurm.account).")
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            "--example",
            "--from",
            metavar="CARD",
            help="Start from this card instead: a path, or a shipped one.",
        ),
    ] = None,
    mail: Annotated[
        list[str] | None,
        typer.Option(
            "--mail",
            metavar="ADDRESS",
            help="Who gets the alerts (alerts.recipients); may be repeated.",
        ),
    ] = None,
    urls_file: Annotated[
        str | None,
        typer.Option(
            "--urls-file",
            metavar="FILE",
            help="Delivery URLs of chats, one a line (alerts.urls_file).",
        ),
    ] = None,
    act: Annotated[
        bool | None,
        typer.Option(
            "--act/--no-act",
            help="The watchdog may act by itself (watch.act), or only tells: the default.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The card to write.")
    ] = Path("tr11.toml"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it is there.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take what is proposed.")
    ] = False,
) -> Outcome:
    """Write a starter card for this cluster.

    Partition, limits, GPUs, cores and accounts come from the scheduler. Only what cannot be known
    is asked, in this order: the name, the directory, whose trainer, its size and tokens (or its
    command and output folder), the data, partition and nodes, who is told of trouble, and whether
    the watchdog may act by itself. Options and --set answer beforehand; --yes takes what is
    proposed, which is tr11's own trainer, and that it only tells. A wrong answer is asked for again;
    Ctrl-C leaves nothing behind.

    With --trainer the card operates another trainer, unchanged (`tr11 adopt` reads its command and
    its output folder in a batch script).

    Exit code 0: written; 1: the file is there, no nodes are, or interrupted; 2: wrong usage, or no
    terminal to ask in; 3: no answer from the scheduler.

    Examples:
      tr11 init
      tr11 init --preset 7b --tokens 140B --account six@a100 --mail you@example.org --act --yes
      tr11 init --trainer huggingface
      tr11 init --example tr11-176B-ml -o big.toml --yes --set run.name=big
    """
    if output.exists() and not force:
        raise Refusal(
            f"{output} is there: nothing was written; use -o FILE, or --force to replace it"
        )
    if example is not None and preset is not None:
        raise WrongUsage("--preset and --example both say what to start from: give one")
    if preset is not None:
        _size(preset)
    if trainer is not None:
        trainer = _family(trainer)
    if preset or tokens or example:
        if trainer not in {None, OWN}:
            raise WrongUsage(
                "--preset, --tokens and --example are of tr11's own trainer: leave them out"
            )
        trainer = OWN
    goal = _tokens(tokens)
    if not yes and not is_terminal():
        raise WrongUsage(
            "no one can be asked here (not a terminal): add --yes, and --set for what you know",
        )
    edge = open_scheduler(context.scheduler)
    found = partition_choices(edge.partitions(), edge.nodes())
    if not found:
        raise Refusal(
            f"{edge.name} has no partition with nodes that is up: nothing to write a card for"
        )
    site = _site(edge)
    overrides = [*context.overrides, *_of_options(account, mail, urls_file, act)]
    asker = Asker(_given(overrides), is_asked=not yes)
    asker.show(f"Enter takes what stands in [ ]. {output} is written at the end.")
    name = asker.ask(NAME, _word(Path.cwd().name), str)
    directory = asker.ask(DIRECTORY, f"{name.removesuffix('-run')}-run", str)
    if trainer is None:
        trainer = asker.ask(TRAINER, OWN, _family)
    if trainer == OWN:
        source, base = _start(asker, preset, example)
        base = _with_data(asker, _with_tokens(asker, base, goal), directory)
    else:
        source, base = Path(trainer), {"slurm": BASE}
        command, folder = _command(asker, trainer)
    choice = _choose_partition(asker, found)
    answers = Answers(
        name=name,
        directory=directory,
        choice=choice,
        account=_account(asker, site),
        nodes=_nodes(asker, choice, proposed_nodes(choice, base)),
        time_limit=asker.given("slurm.time_limit"),
    )
    if trainer == OWN:
        tables = _overridden(starter_tables(base, answers), overrides, OwnCard)
    else:
        tables = foreign_tables(trainer, answers, command, folder)
        tables = _overridden(tables, overrides, ForeignCard)
    _watching(tables, asker)
    if trainer == OWN:
        _write(output, starter_text(tables, answers, site, source.name), overrides)
        return Outcome(notes=_notes(output, source))
    _write(output, foreign_text(trainer, tables, answers, site), overrides)
    return Outcome(notes=_foreign_notes(output, trainer))


def _notes(output: Path, source: Path) -> list[str]:
    notes = [f"written: {output}; look it over, then `tr11 doctor --run {output}`"]
    if "rehearsal" in read_tables(source):
        notes.insert(
            0,
            f"[rehearsal] of {source.name} is left out: this card trains; to rehearse, add the section "
            "(docs/how-to/twin.md)",
        )
    return notes


def _foreign_notes(output: Path, family: str) -> list[str]:
    card = "" if output == Path("tr11.toml") else str(output)
    dialect = "" if family == COMMAND else f" --dialect {family}"
    return [
        f"written: {output}; put your command and folder into [trainer], then:",
        f"  tr11 trainer check{dialect} --log OLD.log",
        f"  {command_for(card, 'launch --dry-run')}",
    ]


def _of_options(
    account: str | None, mail: list[str] | None, urls_file: str | None, act: bool | None
) -> Iterator[str]:
    """What options answer beforehand, as `--set` gives it."""
    if account:
        yield f"slurm.account={account}"
    if mail:
        yield f"alerts.recipients={toml_value(mail)}"
    if urls_file:
        yield f"alerts.urls_file={toml_value(urls_file)}"
    if act is not None:
        yield f"watch.act={toml_value(act)}"


def _given(overrides: list[str]) -> dict[str, str]:
    """Key and text of each `--set`, without quotes."""
    pairs = (override.partition("=") for override in overrides)
    return {name.strip(): text.strip().strip("\"'") for name, equals, text in pairs if equals}


def _word(text: str) -> str:
    """A folder's name as a run's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


# ----------------------------------------------------------------------------- what is trained
def _family(word: str) -> str:
    """The trainer that a person names: OWN, or a family. Raises WrongUsage."""
    family = SHORT_NAMES.get(word, word)
    if family not in (OWN, *trainer_choices()):
        known = ", ".join((OWN, *trainer_choices()))
        raise WrongUsage(f"trainer {word!r}: must be one of {known}")
    return family


def _start(asker: Asker, preset: str | None, example: str | None) -> tuple[Path, dict[str, Any]]:
    """The card to start from, and its tables. Raises CardError."""
    if example is not None:
        source = card_path(example)
        return source, example_tables(source)
    if preset is None:
        preset = asker.ask(SIZE, EXAMPLE, _size)
    folder = shipped_folder()
    return folder / f"{PRESETS[preset].example}.toml", preset_tables(preset, folder)


def _size(text: str) -> str:
    if text not in PRESETS:
        raise WrongUsage(f"size {text!r}: must be one of {', '.join(PRESETS)}")
    return text


def _with_tokens(asker: Asker, tables: dict[str, Any], goal: int | None) -> dict[str, Any]:
    if goal is None and "batch.train_samples" not in asker.known:
        shown = quantity(tokens_of(tables)).replace(" ", "")
        goal = asker.ask(TOKENS, shown, _tokens)
        if goal == token_count(shown):  # as proposed, which is shown rounded
            return tables
    if goal is None:
        return tables
    return with_tokens(tables, goal)


def _tokens(text: str | None) -> int | None:
    try:
        if text is None:
            return None
        return token_count(text)
    except ValueError as error:
        raise WrongUsage(f"tokens {text!r}: {error}") from None


def _with_data(asker: Asker, tables: dict[str, Any], directory: str) -> dict[str, Any]:
    """The tables with the data and the tokenizer that are asked for."""
    data, tokenizer = dict(tables.get("data", {})), dict(tables.get("tokenizer", {}))
    if not {"data.prefixes", "data.train_group", "data.train_groups_file"} & asker.known:
        suffix = dataset_suffix(tables["model"].get("family", "gpt"))
        made = f"{directory}/data/corpus{suffix}"
        for key in ("weights", "train_group", "train_groups_file", "cache"):
            data.pop(key, None)
        data["prefixes"] = asker.ask(DATASET, made, _listed)
    if "vocabulary_file" in tokenizer:
        made = f"{directory}/data/tokenizer/vocab.txt"
        tokenizer["vocabulary_file"] = asker.ask(VOCABULARY, made, str)
    else:
        tokenizer["path"] = asker.ask(TOKENIZER, f"{directory}/data/tokenizer", str)
    return {**tables, "data": data, "tokenizer": tokenizer}


def _command(asker: Asker, family: str) -> tuple[list[str], str]:
    """The words of another trainer's command, and its output folder, "" where it is not asked for."""
    example = shlex.join(example_of(family))
    command = shlex.split(example)
    if "trainer.command" not in asker.known:
        command = asker.ask(WORDS, example, _words)
    folder = output_of(family)
    if folder:
        folder = asker.ask(FOLDER, folder, str)
    return command, folder


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise WrongUsage(f"trainer.command: {text!r}: {error}") from None


# ----------------------------------------------------------------------------- where it trains
def _choose_partition(asker: Asker, found: tuple[PartitionChoice, ...]) -> PartitionChoice:
    named = {choice.partition.name: choice for choice in found}

    def known(name: str) -> str:
        if name not in named:
            raise WrongUsage(
                f"slurm.partition = {name!r}: is not a partition here; use one of: {', '.join(named)}"
            )
        return name

    if len(found) == 1 and "slurm.partition" not in asker.known:
        return found[0]
    lines = [f"  {choice}" for choice in found]
    return named[asker.ask(PARTITION, found[0].partition.name, known, lines)]


def _nodes(asker: Asker, choice: PartitionChoice, proposed: int) -> int:
    def count(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and 0 < int(text) <= choice.nodes):
            raise WrongUsage(
                f"slurm.nodes = {text!r}: is not a number of nodes that {choice.partition.name} has; "
                f"use 1 to {choice.nodes}"
            )
        return int(text)

    return asker.ask(NODES, str(proposed), count, [f"  {choice}"])


def _account(asker: Asker, site: SiteRules | None) -> str:
    """Slurm's own default where the user has one account; else it is asked."""
    accounts = site.accounts if site else ()
    if len(accounts) > 1:
        return asker.ask(ACCOUNT, accounts[0], str)
    return ""


# ----------------------------------------------------------------------------- who watches it
def _watching(tables: dict[str, Any], asker: Asker) -> None:
    """Who is told, and what the watchdog may do: asked, and written into the card also where it is
    the default.
    """
    alerts, watch = tables.setdefault("alerts", {}), tables.setdefault("watch", {})
    if "alerts.recipients" not in asker.known:
        before = ", ".join(alerts.get("recipients", [])) or NONE
        alerts["recipients"] = asker.ask(MAIL, before, _listed)
    if "alerts.urls_file" not in asker.known:
        file = asker.ask(CHATS, alerts.get("urls_file", NONE), str)
        if file != NONE:
            alerts["urls_file"] = file
    if "watch.act" not in asker.known:
        watch["act"] = asker.agree(ACT, bool(watch.get("act", False)), _powers())


def _listed(text: str) -> list[str]:
    """What stands between commas; nothing for NONE."""
    return [part.strip() for part in text.split(",") if part.strip() not in {"", NONE}]


def _powers() -> Iterator[str]:
    """What the watchdog does where it may act, within 80 columns."""
    for power in POWERS:
        yield from textwrap.wrap(
            f"{power.trouble}: {power.does}", 78, initial_indent="  - ", subsequent_indent="    "
        )


# ----------------------------------------------------------------------------- the card
def _site(edge: Scheduler) -> SiteRules | None:
    if edge.name == "slurm":
        return read_site(user_name())
    return None


def _overridden(
    tables: dict[str, dict[str, Any]], overrides: list[str], kind: type[BaseModel]
) -> dict[str, Any]:
    """The tables with all of `--set`. Raises CardError for one that is wrong."""
    done, problems = apply_overrides(tables, overrides, kind)
    if problems:
        raise CardError("command line", problems)
    return done


def _write(output: Path, text: str, overrides: list[str]) -> None:
    """Put the card in place once it has been read as one; `overrides` are in it already. Raises
    CardError when it is none, OSError.
    """
    draft = write_beside(output, text)
    try:
        load_card(draft, (), os.environ, keep_undefined=True)
        draft.replace(output)
    except CardError as error:
        raise placed(error, str(output), overrides) from None
    finally:
        draft.unlink(missing_ok=True)
