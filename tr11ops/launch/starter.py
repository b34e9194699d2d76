"""A starter card for a cluster: what its scheduler says is filled in, what no one can know is asked
or left to change.

Pure, but for reading an example card and a tokenizer's size.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tr11ops.base.errors import Refusal
from tr11ops.base.units import counted, format_time_limit
from tr11ops.cluster.base import Node, Partition
from tr11ops.cluster.site import SiteRules
from tr11ops.runcard.card import OwnCard
from tr11ops.runcard.docs import meaning_of
from tr11ops.runcard.load import read_tables
from tr11ops.runcard.rules import advised_exit_minutes
from tr11ops.runcard.sections import parse_time_limit
from tr11ops.runcard.speed import memory_gb
from tr11ops.runcard.toml_writer import schema_of, write_card
from tr11ops.rundir.datasets import TOKENIZER_FILE, prefixes_of
from trainer.config.base import MOST_SAMPLES
from trainer.config.card import BatchSection
from trainer.config.rules import batch_problems
from trainer.contract.record import Record
from trainer.schedule.devices import device_peak

# The commands that make what a card's data lacks, for someone who has none yet: corpus, tokenizer,
# indexed dataset.

# what `tr11 data preprocess` adds to its --output-prefix
DOCUMENTS = "_text_document"
SENTENCES = "_text_sentence"
MOST_DATASETS = 3  # a mixture of many is no one's first try


def data_commands(card: OwnCard, current: Path) -> tuple[str, ...]:
    """Lines to be typed in `current`, in order; none where nothing is missing, or the data is not
    tr11's to make.

    Only what is not there at all is made: a damaged dataset is for a person to look at.
    """
    missing = [prefix for prefix in prefixes_of(card.data) if not _is_there(prefix)]
    if card.rehearsal is not None or not 0 < len(missing) <= MOST_DATASETS:
        return ()
    suffix = dataset_suffix(card.model.family)
    if _tokenizer_file(card) is None or not all(prefix.endswith(suffix) for prefix in missing):
        return ()
    return tuple(
        dict.fromkeys(_commands(card, [prefix.removesuffix(suffix) for prefix in missing], current))
    )


def dataset_suffix(family: str) -> str:
    """How the name ends that `tr11 data preprocess` gives to what a family of models reads."""
    if family == "gpt":
        return DOCUMENTS
    return SENTENCES


def _tokenizer_file(card: OwnCard) -> Path | None:
    """The file that `tr11 data tokenizer` would make; None where it makes none of this type, or the
    card names none.
    """
    tokenizer = card.tokenizer
    if tokenizer.type == "huggingface":
        if tokenizer.path is None:
            return None
        return Path(tokenizer.path) / TOKENIZER_FILE
    file = tokenizer.vocabulary_file
    if file is not None and tokenizer.type.startswith("bert_"):
        return Path(file)
    return None


def _is_there(prefix: str) -> bool:
    return Path(f"{prefix}.idx").exists() or Path(f"{prefix}.bin").exists()


def _commands(card: OwnCard, stems: list[str], current: Path) -> Iterator[str]:
    file = _tokenizer_file(card)
    assert file is not None
    is_wordpiece = card.tokenizer.type != "huggingface"
    kind = ""
    if is_wordpiece:
        kind = f"--tokenizer-type {card.tokenizer.type} "
        used = f"{kind}--vocab-file {_shown(str(file), current)}"
    else:
        used = f"--tokenizer {_shown(str(card.tokenizer.path), current)}"
    sentences = (
        "--split-sentences --no-append-eod "
        if dataset_suffix(card.model.family) == SENTENCES
        else ""
    )
    for stem in stems:
        corpus = _shown(f"{stem}.jsonl", current)
        if not Path(f"{stem}.jsonl").exists():
            yield f"tr11 data corpus --output {corpus}"
        if file.is_absolute() and not file.exists():
            size = card.tokenizer.vocabulary_size or card.tokenizer.padded_vocabulary_size
            made = f"{kind}--vocab-size {size} --output {_shown(str(file.parent), current)}"
            yield f"tr11 data tokenizer --corpus {_shown(f'{stems[0]}.jsonl', current)} {made}"
        yield f"tr11 data preprocess --input {corpus} {used} {sentences}--output-prefix {_shown(stem, current)}"


def _shown(path: str, current: Path) -> str:
    """A path as one types it in `current`."""
    place = Path(path)
    return shlex.quote(str(place.relative_to(current) if place.is_relative_to(current) else place))


USUAL_LIMIT_SECONDS = 20 * 3600
SHORTEST_LIMIT_SECONDS = 3600
SIGNAL_SECONDS = 300
NODES_PER_SPARE = 12  # the 176B training held 4 spare nodes for 48
_OF_ANOTHER_CLUSTER = (
    "account",
    "constraint",
    "reservation",
    "quality_of_service",
    "partition",
    "exclude",
    "hint",
    "options",
)
_OF_OTHER_NODES = ("gpus_per_node", "gpu_kind", "gpu_memory_gb", "workers_per_node")


class PartitionChoice(Record):
    """Where runs can go: a partition, and what each of its nodes has at least."""

    partition: Partition
    nodes: int
    usable: int
    gpus: int
    cpus: int
    gpu_kind: str = ""  # where it is one, and its rate is known
    gpu_memory_megabytes: int = 0

    def __str__(self) -> str:
        gpus = ""
        if self.gpus:
            gpus = f" with {counted(self.gpus, 'GPU')}"
        limit = self.partition.max_time_seconds
        most = ""
        if limit:
            most = f", at most {format_time_limit(limit)}"
        nodes = counted(self.nodes, "node")
        cores = counted(self.cpus, "core")
        return f"{self.partition.name}: {self.usable} of {nodes}{gpus}, {cores} each{most}"


def partition_choices(
    partitions: Iterable[Partition], nodes: Iterable[Node]
) -> tuple[PartitionChoice, ...]:
    """The partitions that are up and have nodes: those with most GPUs first, then the default, then
    most nodes.
    """
    known = {node.name: node for node in nodes}
    found = []
    for partition in partitions:
        own = [known[name] for name in partition.node_names if name in known]
        usable = [node for node in own if node.is_usable]
        if own and partition.is_up:
            of = usable or own
            gpus = min(node.gpus for node in of)
            cpus = min(node.cpus for node in of)
            kinds = {node.gpu_kind for node in of}
            kind = ""
            if len(kinds) == 1:
                kind = kinds.pop()
            known_kind = kind if device_peak(kind) is not None else ""
            memory = min(node.gpu_memory_megabytes for node in of)
            found.append(
                PartitionChoice(
                    partition,
                    len(own),
                    usable=len(usable),
                    gpus=gpus,
                    cpus=cpus,
                    gpu_kind=known_kind,
                    gpu_memory_megabytes=memory,
                )
            )
    return tuple(
        sorted(
            found, key=lambda one: (-one.gpus * one.nodes, not one.partition.is_default, -one.nodes)
        )
    )


class Answers(Record):
    """What a person must say, or leave at what is proposed. `account` is "" for the user's default,
    `time_limit` for the partition's.
    """

    name: str
    directory: str
    choice: PartitionChoice
    nodes: int
    account: str = ""
    time_limit: str = ""


def proposed_nodes(choice: PartitionChoice, base: Mapping[str, Any]) -> int:
    """As many nodes as give the example card's number of workers, or all that there are."""
    slurm = base["slurm"]
    wanted = int(slurm["nodes"]) * _workers(slurm)
    return max(1, min(-(-wanted // _workers_here(choice, slurm)), choice.nodes))


def starter_tables(base: Mapping[str, Any], answers: Answers) -> dict[str, dict[str, Any]]:
    """The card's tables: those of the example, with the cluster's values in place of the other
    cluster's.
    """
    tables = {name: dict(table) for name, table in base.items() if isinstance(table, Mapping)}
    run = tables.setdefault("run", {})
    before = dict(tables.setdefault("slurm", {}))
    run.pop("kill_switch", None)
    run |= {"name": answers.name, "directory": answers.directory}
    limit = _limit(answers, before)
    tables["slurm"] = starter_slurm(before, answers)
    run["exit_duration_minutes"] = int(advised_exit_minutes(limit)) or round(
        advised_exit_minutes(limit), 2
    )
    _fit(tables, answers.nodes * int(tables["slurm"]["workers_per_node"]))
    return tables


def starter_slurm(before: Mapping[str, Any], answers: Answers) -> dict[str, Any]:
    """`[slurm]` for this cluster, with what holds anywhere of another card's."""
    choice, limit = answers.choice, _limit(answers, before)
    gone = (
        *_OF_ANOTHER_CLUSTER,
        *_OF_OTHER_NODES,
        "setup",
        "spare_nodes",
        "least_spare_nodes",
        "comment",
    )
    slurm = {key: value for key, value in before.items() if key not in gone}
    slurm |= {
        "nodes": answers.nodes,
        "spare_nodes": min(
            -(-answers.nodes // NODES_PER_SPARE), max(0, choice.usable - answers.nodes)
        ),
        "partition": choice.partition.name,
        "workers_per_node": _workers_here(choice, before),
        "cpus_per_task": max(1, choice.cpus),
        "time_limit": format_time_limit(limit),
        "signal_seconds_before_limit": min(SIGNAL_SECONDS, max(1, limit // 4)),
    }
    if choice.gpus:
        slurm["gpus_per_node"] = choice.gpus
        if choice.gpu_kind:
            slurm["gpu_kind"] = choice.gpu_kind
        if choice.gpu_memory_megabytes:
            slurm["gpu_memory_gb"] = memory_gb(choice.gpu_memory_megabytes)
    if answers.account:
        slurm["account"] = answers.account
    return slurm


def _limit(answers: Answers, slurm: Mapping[str, Any]) -> int:
    """Seconds: as it was said; else the example's, as far as the partition allows. What is no time
    limit is refused where the card is read.
    """
    try:
        return parse_time_limit(answers.time_limit)
    except ValueError:
        most = answers.choice.partition.max_time_seconds or USUAL_LIMIT_SECONDS
        return min(most, _limit_of(slurm))


def _limit_of(slurm: Mapping[str, Any]) -> int:
    """The example's limit, unless it is one for a demonstration."""
    try:
        limit = parse_time_limit(str(slurm.get("time_limit", "")))
    except ValueError:
        return USUAL_LIMIT_SECONDS
    if limit >= SHORTEST_LIMIT_SECONDS:
        return limit
    return USUAL_LIMIT_SECONDS


def _workers(slurm: Mapping[str, Any]) -> int:
    return int(slurm.get("workers_per_node") or slurm.get("gpus_per_node") or 1)


def _workers_here(choice: PartitionChoice, slurm: Mapping[str, Any]) -> int:
    """A worker for each GPU; on nodes without GPUs as many as the example has, while there are
    cores for them.
    """
    return choice.gpus or max(1, min(_workers(slurm), choice.cpus))


def _fit(tables: dict[str, dict[str, Any]], workers: int) -> None:
    """Make topology and batch fit the number of workers: the example's degrees halved until they
    divide it.
    """
    parallel = tables.setdefault("parallel", {})
    batch = tables.setdefault("batch", {})
    tensor = int(parallel.get("tensor", 1))
    pipeline = int(parallel.get("pipeline", 1))
    while workers % (tensor * pipeline):
        if pipeline > 1:
            pipeline //= 2
        elif tensor > 1:
            tensor //= 2
    parallel |= {"tensor": tensor, "pipeline": pipeline}
    replicas = workers // (tensor * pipeline)
    chunk = int(batch.get("micro_batch_size", 1)) * replicas
    size = int(batch.get("global_batch_size", chunk))
    whole = {
        **batch,
        "micro_batch_size": chunk // replicas,
        "global_batch_size": size,
        "train_samples": MOST_SAMPLES,
    }
    if batch_problems(BatchSection.model_validate(whole), replicas):
        batch.pop("ramp", None)
        batch.pop("micro_batch_ramp", None)
        batch["global_batch_size"] = max(chunk, size // chunk * chunk)


# ----------------------------------------------------------------------------- the text
def starter_text(
    tables: Mapping[str, Any], answers: Answers, site: SiteRules | None, source: str
) -> str:
    """The card with a remark on each key: what it is, and where its value comes from."""
    remarks = described_keys(OwnCard, tables) | told_keys(tables, answers, site)
    head = [
        f"A starter card for this cluster, made by `tr11 init` from {source}. Any key: tr11 config explain KEY",
        "Look it over, then: tr11 doctor; tr11 launch --array 1-10 (--run FILE where it is not ./tr11.toml)",
        "",
        *_unsaid(site),
    ]
    return write_card(tables, remarks, [line for line in head if line])


def described_keys(schema: type[BaseModel], tables: Mapping[str, Any]) -> dict[str, str]:
    """What each key of these tables is, by the schema; by dotted key."""
    return {
        f"{section}.{key}": remark
        for section, table in tables.items()
        for key in table
        if (remark := _described(schema, (section, key)))
    }


def told_keys(
    tables: Mapping[str, Any], answers: Answers, site: SiteRules | None
) -> dict[str, str]:
    """Remarks on the keys of `[slurm]` whose value the scheduler told."""
    remarks = {
        f"slurm.{key}": f"{_described(OwnCard, ('slurm', key)) or key}; by the scheduler"
        for key in ("gpus_per_node", "gpu_kind", "gpu_memory_gb", "cpus_per_task")
        if key in tables["slurm"]
    }
    remarks["slurm.partition"] = f"{answers.choice}"
    if site is not None and site.accounts:
        remarks["slurm.account"] = f"who pays; yours: {', '.join(site.accounts)}"
    return remarks


def _unsaid(site: SiteRules | None) -> list[str]:
    if site is None or not site.qualities:
        return []
    return [f"QoS that you may use (slurm.quality_of_service): {', '.join(site.qualities)}"]


def _described(schema: type[BaseModel], key: Sequence[str]) -> str:
    """The schema's description of a key, "" where it has none."""
    if key[0] not in schema.model_fields:
        return ""
    if len(key) == 1:
        return meaning_of(schema, key[0])
    inner = schema_of(schema, key[0])
    if inner is not None:
        return _described(inner, key[1:])
    return ""


def example_tables(path: Path) -> dict[str, Any]:
    """The tables of the card to start from, its variables as written. Raises CardError or
    Refusal.
    """
    tables = read_tables(path)
    if not isinstance(tables.get("slurm"), Mapping) or "nodes" not in tables["slurm"]:
        raise Refusal(f"{path} has no [slurm] nodes: it cannot serve as an example")
    tables.pop("rehearsal", None)
    return dict(tables)
