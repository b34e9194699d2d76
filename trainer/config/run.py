"""Sections of the run card that say how the training runs: identity, exits, checkpoints, logs,
recovery, dumps.
"""

from typing import Literal

from pydantic import Field

from trainer.config.base import (
    AboveOne,
    Iterations,
    Positive,
    Section,
    SmallCount,
    StepCount,
)
from trainer.config.data import IterationRange


class RunSection(Section):
    """[run]: the training's identity, where it lives, and when one attempt ends."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """name of the run and of its Slurm job"""

    variant: str = Field(default="main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """experiment inside it"""

    directory: str = Field(min_length=1)
    """the run directory: checkpoints, logs, state"""

    seed: int = Field(default=1234, ge=0, lt=2**32)
    """seed of weights, dropout and data order"""

    kill_switch: str | None = None
    """path of the stop file; default: kill-switch in the directory"""

    exit_duration_minutes: Positive | None = None
    """save and leave after this long; default, without an early signal: so long before
    slurm.time_limit as a step, an evaluation and a save take
    """

    exit_interval: Iterations | None = None
    """save and leave at multiples of this iteration"""

    expect_resume: bool = False
    """refuse to start from random weights"""

    deterministic: bool = False
    """only kernels that repeat bit for bit: GPUs are slower in the backward pass of attention and
    embedding, and an operation without such a kernel ends the training
    """

    corruption_interval: Iterations | None = None
    """compare every worker's arithmetic with itself and other replicas every so many iterations, at
    the cost of some four micro batches; default: never
    """


DEFAULT_INTERVAL_MINUTES = 60.0


class CheckpointSection(Section):
    """[checkpoint]: when to save and how, and where a training starts from. May be left out."""

    interval: Iterations | None = None
    """save every this many iterations"""

    interval_minutes: float | None = Field(default=None, gt=0, le=10**6)
    """save this long after the last save; this, interval, or both; 60 where neither is given"""

    format: Literal["tr11", "deepspeed"] = "tr11"
    """topology-free, or the layout of Megatron-DeepSpeed; both are always read"""

    asynchronous: bool = True
    """copy to host memory, train on, write in the background"""

    verify: Literal["digests", "sizes"] = "digests"
    """what is checked before a load"""

    save_optimizer: bool = True
    """false: weights only, which no training resumes from"""

    save_random_state: bool = True
    """false: random streams are derived again on resume"""

    load: str | None = None
    """folder of checkpoints to start from while this run has none of its own"""

    finetune: bool = False
    """with load: take the weights, start all counters at zero"""

    load_optimizer: bool = True
    """false: moments start at zero"""

    load_random_state: bool = True
    """false: random streams are derived again"""


class LoggingSection(Section):
    """[logging]: what is written, and how often."""

    interval: Iterations = 1
    """iterations per log line"""

    folder: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,94}-logs$")
    """name of the folder of logs in the run directory, ends in -logs; default: NAME-logs"""

    tensorboard: bool = True
    """write TensorBoard events"""

    tensorboard_queue: Iterations = 5
    """events kept before a flush"""

    params_norm: bool = False
    """log the norm of all weights"""

    zeros_in_gradient: bool = False
    """log how many gradient elements are zero"""

    layer_norms_interval: Iterations | None = None
    """every so many iterations the norms of each layer's gradients, update and weights, and what
    each block hands on; default: never
    """

    tensorboard_interval: Iterations = 1
    """iterations per TensorBoard record"""

    tensorboard_timers: bool = False
    """times of the step's parts"""

    tensorboard_batch_size: bool = True
    """the global batch size"""

    tensorboard_validation_perplexity: bool = True
    """perplexity beside validation loss"""

    tensorboard_learning_rate: bool = True
    """the learning rate"""

    tensorboard_loss_scale: bool = True
    """the loss scale of fp16"""


class RecoverySection(Section):
    """[recovery]: what a loss spike does. A spike is a gradient norm or a loss far above its own
    median.
    """

    on_spike: Literal["flag", "roll_back", "off"] = "flag"
    """say so in the log, or also go back and pass over the data, or do not look"""

    gradient_factor: AboveOne = 10.0
    """gradient norm over its median, two steps in a row"""

    loss_factor: AboveOne = 2.0
    """loss over its median"""

    window: int = Field(default=100, ge=10, le=100_000)
    """steps that the medians are taken over"""

    roll_backs: SmallCount = 2
    """roll-backs of the whole run; then spikes are flagged"""

    dropped_steps: StepCount = 50
    """steps in a row that are not finite and change nothing, after which the training stops; 0 =
    never
    """

    skip_margin: StepCount = 10
    """iterations passed over beyond the spike, on each side"""


class DebugSection(Section):
    """[debug]: dumps of every parameter around a step, for `tr11 checkpoints diff`."""

    dump: Literal["off", "full", "fingerprint"] = "off"
    """whole tensors, or their least, largest and mean value, norm and digest"""

    iterations: list[IterationRange] = Field(default=[])
    """iterations that are dumped, both ends included: "805-806"; default: all"""
