"""Sections of the run card that say what the training reads and how it proceeds: batch, schedule,
data.
"""

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.base import (
    LARGEST_WIDTH,
    MOST_SAMPLES,
    BatchSize,
    Iterations,
    NotNegative,
    Positive,
    Samples,
    Section,
    StepCount,
    Tokens,
    Width,
)

WorkerCount = Annotated[int, Field(ge=0, le=256)]
IterationRange = Annotated[str, Field(pattern=r"^[0-9]{1,12}-[0-9]{1,12}$")]


class RampSection(Section):
    """[batch.ramp]: the global batch grows from `start` by `increment` over the first `samples`
    samples.
    """

    start: BatchSize
    """first global batch"""

    increment: BatchSize
    """added at each level"""

    samples: int = Field(ge=0, le=MOST_SAMPLES)
    """length of the ramp"""


class MicroBatchSection(Section):
    """[[batch.micro_batch_ramp]]: the micro batch from one level of the batch ramp on."""

    from_batch: BatchSize
    """the level: a global batch that the ramp reaches"""

    size: BatchSize
    """micro batch from there on"""


class BatchSection(Section):
    """[batch]: how many samples a step takes, and how many the whole training takes."""

    micro_batch_size: BatchSize
    """samples of one forward pass of one replica"""

    micro_batch_ramp: list[MicroBatchSection] = Field(default=[])
    """larger micro batches from later levels of the ramp on, such as [{ from_batch = 784, size = 2
    }]
    """

    global_batch_size: BatchSize
    """samples of one step, after the ramp"""

    train_samples: Samples
    """samples of the whole training; may be left out when train_iterations is given"""

    train_iterations: Iterations | None = None
    """instead of train_samples: steps of the whole training"""

    train_tokens: Tokens | None = None
    """stop at the first step that reaches so many tokens"""

    ramp: RampSection | None = None
    """default: the full batch from the first step"""

    def micro_batch_at(self, global_batch: int) -> int:
        """Samples of one forward pass of one replica in steps of `global_batch`."""
        sizes = [entry.size for entry in self.micro_batch_ramp if entry.from_batch <= global_batch]
        if sizes:
            return sizes[-1]
        return self.micro_batch_size

    def micro_batches(self, global_batch: int, data_parallel: int) -> int:
        """Micro batches of each of `data_parallel` replicas in a step of `global_batch`."""
        return global_batch // (self.micro_batch_at(global_batch) * data_parallel)


class ScheduleSection(Section):
    """[schedule]: the learning rate as a function of consumed samples or tokens."""

    learning_rate: Positive
    """peak, reached at the end of the warm-up"""

    min_learning_rate: NotNegative = 0.0
    """floor, kept after the decay"""

    decay_style: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """way from peak to floor; wsd: warm-up, then stable at the peak, then a cooldown to the decay's
    end
    """

    decay_samples: Samples | None = None
    """where the floor is reached; default: batch.train_samples"""

    decay_iterations: Iterations | None = None
    """the same in steps, with batch.train_iterations"""

    decay_tokens: Tokens | None = None
    """the same in tokens; goes before the other two"""

    cooldown_style: Literal["minus_sqrt", "linear", "cosine", "exponential"] = "minus_sqrt"
    """wsd: way from peak to floor; minus_sqrt is 1 - the root of what is behind"""

    cooldown_samples: Samples | None = None
    """wsd: length of the cooldown, at the end of the decay"""

    cooldown_iterations: Iterations | None = None
    """the same in steps, with batch.train_iterations"""

    cooldown_tokens: Tokens | None = None
    """the same in tokens, with schedule.decay_tokens"""

    warmup_samples: int = Field(default=0, ge=0, le=MOST_SAMPLES)
    """linear rise from zero"""

    warmup_iterations: Iterations | None = None
    """the same in steps, with batch.train_iterations"""

    warmup_fraction: float | None = Field(default=None, gt=0, lt=1)
    """the same as a share of the decay, instead of a number"""

    on_resume: Literal["match", "override", "checkpoint"] = "match"
    """where card and checkpoint differ: refuse, the card wins, the checkpoint wins"""


class CurriculumSection(Section):
    """[curriculum]: short sequences first. Evaluation always uses the full length."""

    kind: Literal["linear", "root", "discrete"] = "linear"
    """how the length grows"""

    start_length: Width | None = None
    """linear, root: length of the first step"""

    step: Width = 8
    """linear, root: lengths are multiples of this"""

    total_steps: Iterations | None = None
    """linear, root: step at which the full length is reached"""

    root_degree: Positive = 2.0
    """root: 2 is the square root"""

    lengths: list[int] = Field(default=[])
    """discrete: the lengths, the last one in full"""

    until_steps: list[int] = Field(default=[])
    """discrete: last step of each length but the last one"""


class EvaluationSection(Section):
    """[evaluation]: validation loss during the training."""

    interval: Iterations = 1000
    """evaluate every this many iterations"""

    iterations: StepCount = 0
    """global batches in one evaluation; 0 = never"""


def data_set_name(prefix: str) -> str:
    """The name of a data set among others: that of its folder, which is its language or source. May
    be "".
    """
    return PurePath(prefix).parent.name


class DataSection(Section):
    """[data]: indexed datasets (`PREFIX.bin`, `PREFIX.idx`).

    Either `prefixes` with `weights` and one `split`, or named groups, each `NAME: WEIGHT START:END
    PREFIX, ...`.
    """

    prefixes: list[str] = Field(default=[])
    """paths without extension"""

    weights: list[float] | None = None
    """one per prefix; default: by their sizes"""

    split: str = "949,50,1"
    """shares of train, validation, test of `prefixes`"""

    validate_each: bool = False
    """with prefixes: a validation loss of each data set too, called valid_ and its folder's name"""

    train_group: str | None = None
    """the training mixture as one group"""

    valid_groups: list[str] = Field(default=[])
    """validation mixtures; each has its own loss"""

    test_groups: list[str] = Field(default=[])
    """test mixtures"""

    train_groups_file: str | None = None
    """file of one line with the quoted training group"""

    valid_groups_file: str | None = None
    """file of one line with quoted groups"""

    test_groups_file: str | None = None
    """file of one line with quoted groups"""

    implementation: Literal["infer", "mmap", "lazy", "cached"] = "infer"
    """kind of the indexed files; infer looks at their first bytes"""

    order: Literal["single", "cyclic"] = "single"
    """one pass in the order of the maps, or epochs that are shuffled again"""

    order_samples: Samples | None = None
    """length of the training that the order of the samples is made for; default:
    batch.train_samples. Where epochs repeat, a shorter branch goes on with the data of its trunk
    only with the trunk's value
    """

    on_resume: Literal["match", "switch"] = "match"
    """where the data is not the checkpoint's: refuse, or go on with the card's"""

    workers: WorkerCount = 2
    """processes that read training samples ahead; 0 = none"""

    valid_workers: WorkerCount = 0
    """the same for validation"""

    skip_ranges: list[IterationRange] = Field(default=[])
    """iterations whose data is skipped, both ends included: "13251-14000\""""

    end_of_document_id: int | None = Field(default=None, ge=0, le=LARGEST_WIDTH)
    """token that ends a document, for the three keys below"""

    reset_position_ids: bool = False
    """positions count from each document's start"""

    reset_attention_mask: bool = False
    """attention stays inside a document"""

    mask_end_of_document_loss: bool = False
    """no loss where the input ends a document"""

    mask_probability: float = Field(default=0.15, gt=0, lt=1)
    """bert, t5: share of a sample's tokens that are masked"""

    short_sequence_probability: float = Field(default=0.1, ge=0, le=1)
    """bert, t5: share of samples that are shorter than they could be"""

    binary_head: bool = True
    """bert: two segments a sample, whose order is learned"""

    extra_ids: int = Field(default=100, gt=0, le=10_000)
    """t5: sentinels, behind the vocabulary unless it has <extra_id_0>, ..."""

    cache: str | None = None
    """folder of the index maps; default: beside the data"""

    @property
    def uses_groups(self) -> bool:
        """Whether named groups say what is read."""
        return bool(self.train_group or self.train_groups_file)

    @property
    def marks_documents(self) -> bool:
        """Whether the model must know where documents end."""
        return (
            self.reset_position_ids or self.reset_attention_mask or self.mask_end_of_document_loss
        )
