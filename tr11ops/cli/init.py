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

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.invocation import command_for
from tr11ops.base.units import quantity
from tr11ops.cli import completion
from tr11ops.cli.common import card_path, is_terminal, say
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
from tr11ops.runcard.card import ForeignCard, OwnCard, load_card, shipped_folder
from tr11ops.runcard.load import apply_overrides, read_tables
from tr11ops.runcard.toml_writer import toml_value
from tr11ops.rundir.journal import user_name
from tr11ops.watchdog.policy import POWERS
from trainer.config.card import CardError
from trainer.contract.files import write_beside

EXAMPLE = "toy"


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
    is asked: the size of the model, the tokens, the name, the directory, the data, who is told of
    trouble, and whether the watchdog may act by itself. Options and --set answer beforehand; --yes
    takes what is proposed, which is that it only tells.

    With --trainer the card operates another trainer, unchanged: its command and its output folder
    are asked in the place of model and data (`tr11 adopt` reads them in a batch script).

    Exit code 0: written; 1: the file is there, or no nodes are; 2: wrong usage; 3: no answer from
    the scheduler.

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
    if preset is not None and preset not in PRESETS:
        raise WrongUsage(f"--preset {preset!r}: must be one of {', '.join(PRESETS)}")
    if trainer is not None:
        trainer = _family(trainer, preset or tokens or example)
    goal = _tokens(tokens)
    edge = open_scheduler(context.scheduler)
    found = partition_choices(edge.partitions(), edge.nodes())
    if not found:
        raise Refusal(
            f"{edge.name} has no partition with nodes that is up: nothing to write a card for"
        )
    if not yes and not is_terminal():
        raise WrongUsage(
            "no one can be asked here (not a terminal): add --yes, and --set for what you know",
        )
    site = _site(edge)
    overrides = [*context.overrides, *_of_options(account, mail, urls_file, act)]
    asker = _Asker(_given(overrides), ask=not yes)
    if trainer is None:
        source, base = _start(asker, preset, example)
        base = _with_tokens(asker, base, goal)
    else:
        source, base = Path(trainer), {"slurm": BASE}
    choice = _choose_partition(asker, found)
    name = asker.text("run.name", "Name of the run", _word(Path.cwd().name))
    proposed = str(proposed_nodes(choice, base))
    answers = Answers(
        name=name,
        directory=asker.text(
            "run.directory",
            "Run directory: logs, checkpoints, state",
            f"{name.removesuffix('-run')}-run",
        ),
        choice=choice,
        nodes=_count(
            asker.text("slurm.nodes", f"Nodes of one attempt, of {choice.nodes}", proposed)
        ),
        account=_account(asker, site),
        time_limit=asker.given("slurm.time_limit"),
    )
    if trainer is not None:
        return _foreign(trainer, answers, asker, site=site, overrides=overrides, output=output)
    tables = _completed(starter_tables(base, answers), asker, overrides)
    _watching(tables, asker)
    _write(output, starter_text(tables, answers, site, source.name))
    notes = [f"written: {output}; look it over, then `tr11 doctor --run {output}`"]
    if "rehearsal" in read_tables(source):
        notes.insert(
            0,
            f"[rehearsal] of {source.name} is left out: this card trains; to rehearse, add the section "
            "(docs/how-to/twin.md)",
        )
    return Outcome(notes=notes)


def _family(word: str, own: str | None) -> str:
    """The family that `--trainer` names. Raises WrongUsage for no family, and for `own`, an option that
    is about tr11's own trainer.
    """
    if own:
        raise WrongUsage(
            "--preset, --tokens and --example are of tr11's own trainer: leave them out"
        )
    family = SHORT_NAMES.get(word, word)
    if family not in trainer_choices():
        raise WrongUsage(f"--trainer {word!r}: must be one of {', '.join(trainer_choices())}")
    return family


def _foreign(
    family: str,
    answers: Answers,
    asker: _Asker,
    site: SiteRules | None,
    overrides: list[str],
    output: Path,
) -> Outcome:
    """The card of another trainer."""
    proposed = shlex.join(example_of(family))
    command = shlex.split(proposed)
    if "trainer.command" not in asker.known:
        command = _words(asker.text("trainer.command", "Words behind torchrun", proposed))
    tables = foreign_tables(family, answers, command)
    if "trainer.folder" not in asker.known and "folder" in tables["trainer"]:
        proposed = tables["trainer"]["folder"]
        tables["trainer"]["folder"] = asker.text(
            "trainer.folder", "The trainer's own output folder", proposed
        )
    done, problems = apply_overrides(tables, overrides, ForeignCard)
    if problems:
        raise CardError("command line", problems)
    _watching(done, asker)
    _write(output, foreign_text(family, done, answers, site))
    card = "" if output == Path("tr11.toml") else str(output)
    dialect = "" if family == COMMAND else f" --dialect {family}"
    notes = [
        f"written: {output}; put your command and folder into [trainer], then:",
        f"  tr11 trainer check{dialect} --log OLD.log",
        f"  {command_for(card, 'launch --dry-run')}",
    ]
    return Outcome(notes=notes)


def _words(text: str) -> list[str]:
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise WrongUsage(f"trainer.command: {text!r}: {error}") from None
    if not found:
        raise WrongUsage("trainer.command: there is no word in it")
    return found


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


# ----------------------------------------------------------------------------- what to start from
def _start(asker: _Asker, preset: str | None, example: str | None) -> tuple[Path, dict[str, Any]]:
    """The card to start from, and its tables. Raises CardError."""
    if example is not None:
        source = card_path(example)
        return source, example_tables(source)
    if preset is None:
        for name, size in PRESETS.items():
            asker.show(f"  {name:<9} {size.parameters}")
        preset = asker.text("preset", "Size of the model", EXAMPLE)
        if preset not in PRESETS:
            raise WrongUsage(f"size {preset!r}: must be one of {', '.join(PRESETS)}")
    folder = shipped_folder()
    return folder / f"{PRESETS[preset].example}.toml", preset_tables(preset, folder)


def _with_tokens(asker: _Asker, tables: dict[str, Any], goal: int | None) -> dict[str, Any]:
    if goal is None and "batch.train_samples" not in asker.known:
        proposed = quantity(tokens_of(tables)).replace(" ", "")
        answer = asker.text("tokens", "Tokens to train on", proposed)
        if answer == proposed:
            goal = None
        else:
            goal = _tokens(answer)
    if goal is None:
        return tables
    return with_tokens(tables, goal)


def _tokens(text: str | None) -> int | None:
    try:
        if text is None:
            return None
        return token_count(text)
    except ValueError as error:
        raise WrongUsage(f"--tokens {text!r}: {error}") from None


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

    def given(self, key: str) -> str:
        """What `--set` gives for this key; "" where it gives nothing."""
        return self._given.get(key, "")

    def show(self, line: str) -> None:
        """What helps to answer the next question, where it is asked."""
        if self._ask:
            say(line)

    def text(self, key: str, question: str, proposed: str) -> str:
        if key in self._given:
            return self._given[key]
        if not self._ask:
            return proposed
        return str(typer.prompt(question, default=proposed, err=True))

    def yes(self, key: str, question: str, proposed: bool) -> bool:
        """An answer that is yes or no; only for keys that `--set` does not give."""
        if not self._ask or key in self._given:
            return proposed
        return typer.confirm(question, default=proposed, err=True)


def _given(overrides: list[str]) -> dict[str, str]:
    """Key and text of each `--set`, without quotes."""
    pairs = (override.partition("=") for override in overrides)
    return {name.strip(): text.strip().strip("\"'") for name, equals, text in pairs if equals}


def _choose_partition(asker: _Asker, found: tuple[PartitionChoice, ...]) -> PartitionChoice:
    if len(found) > 1:
        for choice in found:
            say(f"  {choice}")
    name = found[0].partition.name
    if len(found) > 1 or "slurm.partition" in asker.known:
        name = asker.text("slurm.partition", "Partition", name)
    chosen = next((choice for choice in found if choice.partition.name == name), None)
    if chosen is None:
        there = ", ".join(choice.partition.name for choice in found)
        raise WrongUsage(
            f"slurm.partition = {name!r}: is not a partition here; use one of: {there}"
        )
    return chosen


def _account(asker: _Asker, site: SiteRules | None) -> str:
    """Slurm's own default where the user has one account; else it is asked."""
    accounts = site.accounts if site else ()
    if len(accounts) > 1:
        return asker.text("slurm.account", f"Account ({', '.join(accounts)})", accounts[0])
    return ""


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise WrongUsage(f"slurm.nodes = {text!r}: is not a number of nodes; use 1 or more")
    return int(text)


def _word(text: str) -> str:
    """A folder's name as a run's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


# ----------------------------------------------------------------------------- who watches it
def _watching(tables: dict[str, dict[str, Any]], asker: _Asker) -> None:
    """Who is told, and what the watchdog may do: asked, and written into the card also where it is
    the default.
    """
    alerts, watch = tables.setdefault("alerts", {}), tables.setdefault("watch", {})
    if "alerts.recipients" not in asker.known:
        before = alerts.get("recipients", [])
        text = asker.text(
            "alerts.recipients",
            "Mail addresses for alerts, with commas (empty: none)",
            ", ".join(before),
        )
        alerts["recipients"] = [address.strip() for address in text.split(",") if address.strip()]
    if "alerts.urls_file" not in asker.known:
        asker.show(
            "Chats: a private file with a URL a line, as ntfy://ntfy.sh/TOPIC, slack://A/B/C"
        )
        file = asker.text(
            "alerts.urls_file", "File of chat URLs, empty for none", alerts.get("urls_file", "")
        )
        if file:
            alerts["urls_file"] = file
    if "watch.act" not in asker.known:
        for line in _powers():
            asker.show(line)
        watch["act"] = asker.yes("watch.act", "May it act by itself", bool(watch.get("act", False)))


def _powers() -> Iterator[str]:
    """What the watchdog does where it may act, within 80 columns."""
    yield "The watchdog tells of trouble; each of these then waits for a person. Where it"
    yield "may act, it does them at once, within the budgets of [watch]:"
    for power in POWERS:
        yield from textwrap.wrap(
            f"{power.trouble}: {power.does}", 78, initial_indent="  - ", subsequent_indent="    "
        )


# ----------------------------------------------------------------------------- the card
def _site(edge: Scheduler) -> SiteRules | None:
    if edge.name == "slurm":
        return read_site(user_name())
    return None


def _completed(
    tables: dict[str, dict[str, Any]], asker: _Asker, overrides: list[str]
) -> dict[str, Any]:
    """Data and tokenizer asked for, and all of `--set` applied. Raises CardError for a `--set` that
    is wrong.
    """
    directory = tables["run"]["directory"]
    data, tokenizer = tables.setdefault("data", {}), tables.setdefault("tokenizer", {})
    if not {"data.prefixes", "data.train_group", "data.train_groups_file"} & asker.known:
        made = f"{directory}/data/corpus{dataset_suffix(tables['model'].get('family', 'gpt'))}"
        prefix = asker.text("data.prefix", "Indexed dataset, without .bin or .idx", made)
        for key in ("weights", "train_group", "train_groups_file", "cache"):
            data.pop(key, None)
        data["prefixes"] = [prefix]
    if "vocabulary_file" in tokenizer:
        if "tokenizer.vocabulary_file" not in asker.known:
            made = f"{directory}/data/tokenizer/vocab.txt"
            tokenizer["vocabulary_file"] = asker.text(
                "tokenizer.vocabulary_file", "File of the vocabulary", made
            )
    elif "tokenizer.path" not in asker.known:
        tokenizer["path"] = asker.text(
            "tokenizer.path", "Folder of the tokenizer", f"{directory}/data/tokenizer"
        )
    done, problems = apply_overrides(tables, overrides, OwnCard)
    if problems:
        raise CardError("command line", problems)
    return done


def _write(output: Path, text: str) -> None:
    """Put the card in place once it has been read as one. Raises CardError when it is none,
    OSError.
    """
    draft = write_beside(output, text)
    try:
        load_card(draft, (), os.environ, keep_undefined=True)
        draft.replace(output)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
