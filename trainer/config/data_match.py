"""Whether a training goes on with the data that its checkpoint was trained on. Pure; standard
library only.

A checkpoint's cursor keeps, under `data`, what the card said of the data, what each data set of the
mixture holds, and digests of some of the samples that they make. Data sets and samples decide: data
that was moved elsewhere is the same, files that were made again under the same name may not be.
What the card said explains a difference, and is all that can be compared before a training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from trainer.contract.documents import document
from trainer.contract.errors import DataMismatch
from trainer.contract.record import Record

if TYPE_CHECKING:
    from trainer.config.card import TrainerConfig

OnResume = Literal["match", "switch"]
CURSOR_KEY = "data"
PROBES = 16  # samples whose digests are kept, spread evenly over all of them
# With another value of one of these, the samples that follow are others, whatever the files hold.
DECISIVE = (
    "run.seed",
    "model.sequence_length",
    "data.order",
    "data.split",
    "data.weights",
    "data.train_group",
)
# Of the families that are trained on masked words: keys that shape their samples.
_MASKING = ("data.mask_probability", "data.short_sequence_probability")
MASKING_KEYS = {
    "bert": (*_MASKING, "data.binary_head"),
    "t5": (*_MASKING, "model.decoder_sequence_length", "data.extra_ids"),
}
# that the order is made for; the key's name since before data.order_samples
ORDERED = "batch.train_samples"
MOST_SETS = 3  # that are told of by name
_LONGEST = 60


class DataSetIdentity(Record):
    """What one data set of the mixture holds, wherever it lies.

    `lengths`: digest of the lengths of all sequences and of where documents begin. `tokens`: digest
    of the tokens, all of them or evenly spread parts. `sample`: digest of the first sample that it
    gives, "" where it gives none.
    """

    name: str
    sequences: int
    size: int  # tokens
    lengths: str
    tokens: str
    sample: str

    def difference(self, now: DataSetIdentity) -> str:
        """How it differs from what is there now, in a few words; "" when it does not."""
        if self.size != now.size:
            return f"had {self.size:,} tokens, has {now.size:,}"
        if (self.sequences, self.lengths) != (now.sequences, now.lengths):
            return "has documents of other lengths"
        if self.tokens != now.tokens:
            return "holds other tokens"
        if self.sample == now.sample:
            return ""
        return "makes other samples"


class DataRecord(Record):
    """What a cursor keeps. `samples`: (number, digest of its tokens). `sets`: in the order of the
    mixture.

    No `sets`: written by a tr11 that did not keep them.
    """

    facts: Mapping[str, Any]
    samples: tuple[tuple[int, str], ...]
    sets: tuple[DataSetIdentity, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "facts": dict(self.facts),
            "samples": [list(sample) for sample in self.samples],
            "sets": [document(one) for one in self.sets],
        }

    @classmethod
    def of(cls, cursor: Mapping[str, Any]) -> DataRecord | None:
        """What a cursor keeps of its data; None where an older tr11, or another tool, wrote it."""
        value = cursor.get(CURSOR_KEY)
        try:
            samples = tuple((int(number), str(digest)) for number, digest in value["samples"])  # type: ignore[index]
            sets = tuple(DataSetIdentity(**one) for one in value.get("sets", ()))  # type: ignore[union-attr]
            return cls(dict(value["facts"]), samples, sets)  # type: ignore[index]
        except (TypeError, KeyError, ValueError):
            return None


def data_facts(config: TrainerConfig) -> dict[str, Any]:
    """What a card says of the training data, under its keys."""
    data = config.data
    masking = MASKING_KEYS.get(str(config.model.family), ())
    facts: dict[str, Any] = {
        "run.seed": config.run.seed,
        "model.sequence_length": config.model.sequence_length,
        ORDERED: config.ordered_samples,
        "data.order": data.order,
        "tokenizer.path": config.tokenizer.path or config.tokenizer.vocabulary_file,
        **{key: attrgetter(key)(config) for key in masking},
    }
    if data.uses_groups:
        return {
            **facts,
            "data.train_group": data.train_group,
            "data.train_groups_file": data.train_groups_file,
        }
    return {
        **facts,
        "data.prefixes": list(data.prefixes),
        "data.weights": data.weights,
        "data.split": data.split,
    }


def fact_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Keys on which two cards' facts differ, each with a few words that say how."""
    keys = dict.fromkeys((*saved, *now))
    found = {
        key: f"{key} was {_shown(saved.get(key))}, is {_shown(now.get(key))}"
        for key in keys
        if saved.get(key) != now.get(key)
    }
    before, after = saved.get(ORDERED), now.get(ORDERED)
    if ORDERED in found and isinstance(before, int) and isinstance(after, int) and before > after:
        found[ORDERED] += f" (data.order_samples = {before} keeps the order)"
    return found


def decisive_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences with which the samples cannot be the same; found without reading any data."""
    return [text for key, text in fact_differences(saved, now).items() if key in DECISIVE]


def compare(
    record: DataRecord,
    facts: Mapping[str, Any],
    digest_of: Callable[[int], str | None],
    sets: Sequence[DataSetIdentity],
) -> list[str]:
    """How the data differs from what a checkpoint was trained on, one line each; empty when it is
    the same.

    `digest_of`: the digest of one of the samples as they are now; None where there is no such
    sample any more. `sets`: the data sets as they are now.
    """
    found = [*decisive_differences(record.facts, facts), *_other_sets(record.sets, sets)]
    now = [(number, digest, digest_of(number)) for number, digest in record.samples]
    others = [number for number, then, here in now if here is not None and then != here]
    if not others and not found:
        return []
    explained = [
        text for key, text in fact_differences(record.facts, facts).items() if key not in DECISIVE
    ]
    lines = [*found, *(explained if others else [])]
    if others:
        lines.append(
            f"{len(others)} of {len(now)} samples that were compared hold other tokens, the first {others[0]}"
        )
    return lines


def _other_sets(then: Sequence[DataSetIdentity], now: Sequence[DataSetIdentity]) -> list[str]:
    """What differs between the data sets of two mixtures, by their places in it: a name may be
    another.
    """
    if not then:
        return []
    if len(then) != len(now):
        return [f"the mixture had {len(then)} data sets, has {len(now)}"]
    others = [
        (after.name, text)
        for before, after in zip(then, now, strict=True)
        if (text := before.difference(after))
    ]
    shown = [f"{name} {text}" for name, text in others[:MOST_SETS]]
    more = len(others) - len(shown)
    if more:
        return [*shown, f"{more} more of {len(now)} data sets differ"]
    return shown


def decide(differences: Sequence[str], on_resume: OnResume, place: str) -> list[str]:
    """The lines to say of a resume; raises DataMismatch where differing data was not asked for."""
    if not differences:
        return []
    if on_resume == "match":
        raise DataMismatch(
            f'{place} was trained on other data: {"; ".join(differences)}; restore it, or set data.on_resume = "switch"'
            " to go on with the new data from here"
        )
    return [f"tr11: DATA SWITCHED (data.on_resume): {text}" for text in differences]


def probe_numbers(samples: int) -> list[int]:
    """Numbers of the samples that are kept, of `samples`."""
    if samples:
        return sorted({samples * place // PROBES for place in range(PROBES)})
    return []


def _shown(value: Any) -> str:
    if value is None:
        text = "not there"
    else:
        text = str(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 3]}..."
