"""The run card's sections that say what is copied away: logs to the hub, checkpoints to archives,
and what may go.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tr11ops.runcard.sections import TimeLimit, Word
from trainer.config.base import Days, Hours
from trainer.config.card import Section
from trainer.contract.secret_names import is_secret_name
from trainer.contract.secret_shapes import has_secret

# \w is all of Unicode, which costs 70 ms in each start of a command
REPOSITORY = r"^[A-Za-z0-9_.-]{1,96}/[A-Za-z0-9_.-]{1,96}$"
Step = Annotated[int, Field(gt=0, le=10**9)]
Every = Annotated[int, Field(ge=0, le=10**9)]  # so many steps; 0: none
_KINDS_OF_TOKEN = ("anon", "google_default", "cloud")  # not one itself


class HubSection(Section):
    """[hub]: the hub repository that logs and TensorBoard events are mirrored to, and the one for
    the model.
    """

    repository: str | None = Field(default=None, pattern=REPOSITORY)
    """OWNER/NAME; default: nothing is mirrored"""

    patterns: list[str] = Field(default=["tensorboard/*/*tfevents*", "logs/*/*.txt"], min_length=1)
    """files below NAME-logs"""

    interval_minutes: int = Field(default=60, gt=0, le=10_080)
    """between two synchronisations"""

    credentials_file: str | None = None
    """JSON with the bot's user, mail and token"""

    endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^\s@/?#]+(/[^\s@?#]*)?$", repr=False
    )
    """a hub of one's own; no credentials"""

    private: bool = True
    """of a repository that is made: only members see it"""

    publish_status: bool = True
    """status.json goes along, without node and user names: tr11 status --remote reads it"""

    model_repository: str | None = Field(default=None, pattern=REPOSITORY)
    """OWNER/NAME that tr11 upload publishes models to"""

    license: str | None = Field(default=None, pattern=r"^[a-z0-9.-]{1,64}$")
    """on the model's card"""

    languages: list[Annotated[str, Field(pattern=r"^[a-z]{2,8}$")]] = Field(default=[])
    """on the model's card: en, fr, ..."""


class BackupSection(Section):
    """[backup]: which checkpoints are kept, and where their copies go."""

    store: str | None = None
    """folder of the archive file system"""

    url: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9+.-]*://[^\s@?#]+$", repr=False)
    """bucket, e.g. gs://NAME/PATH; no credentials"""

    options: dict[str, str | int | float | bool] = Field(default={}, repr=False)
    """how fsspec opens the url, e.g. {endpoint_url = "http://host:4443"}; no secrets"""

    credentials_file: str | None = None
    """of the url, e.g. a service account's JSON; default: what the library finds itself"""

    keep_latest: int = Field(default=15, ge=2, le=100_000)
    """newest checkpoints never deleted"""

    store_interval: Every = 1000
    """steps copied whole to the store: its multiples; 0 = none"""

    store_format: Literal["files", "tar"] = "files"
    """tar: one file for a checkpoint, where inodes are scarce"""

    full_interval: Every = 10_000
    """steps copied whole to the url: its multiples; 0 = none"""

    full_steps: list[Step] = Field(default=[])
    """more steps that are copied whole to the url"""

    weights_interval: Every = 3000
    """steps whose weights go to the url unless whole there; 0 = none"""

    spike_steps: list[Step] = Field(default=[])
    """steps around spikes whose weights go to the url's checkpoints-spikes-weights"""

    milestone_percent: float = Field(default=10, ge=0, le=100)
    """one whole checkpoint is kept for each such share of the training; 0 = none"""

    data: bool = False
    """data sets and tokenizer of the card are copied too, and verified like checkpoints"""

    logs: bool = True
    """logs and TensorBoard events are copied too"""

    interval_hours: Hours = 24
    """between two rounds of the periodic job"""

    prune: bool = False
    """each round ends with tr11 checkpoints prune; false: a person does it"""

    parallel: int = Field(default=8, gt=0, le=256)
    """files on their way at once"""

    megabytes_per_second: float = Field(default=0, ge=0, le=10**6)
    """most that is sent, all files together; 0 = no limit"""

    reread_days: Days = 30
    """every byte of the archives is read again within this time"""

    confirm_hours: Hours = 48
    """a copy behind a network counts for prune if it was listed so lately"""

    partition: Word | None = None
    """of a round that is a job; default: [cron] partition"""

    account: Word | None = None
    """who pays for it; default: [cron] account"""

    constraint: Word | None = None
    """node feature asked for; default: [cron] constraint"""

    quality_of_service: Word | None = None
    """QoS; default: [cron] quality_of_service"""

    time_limit: TimeLimit = "20:00:00"
    """of a round that is a job"""

    @property
    def copies_checkpoints(self) -> bool:
        """Whether some step must be copied to an archive that the card has."""
        return bool(
            (self.store and self.store_interval)
            or (self.url and (self.full_interval or self.weights_interval))
        )

    @property
    def has_store(self) -> bool:
        return self.store is not None

    @property
    def has_url(self) -> bool:
        return self.url is not None

    @field_validator("options")
    @classmethod
    def _no_secrets(
        cls, options: dict[str, str | int | float | bool]
    ) -> dict[str, str | int | float | bool]:
        for name, value in options.items():
            is_shaped = isinstance(value, str) and has_secret(value)
            if value not in _KINDS_OF_TOKEN and (is_secret_name(name) or is_shaped):
                raise ValueError(
                    f"{name} may hold a secret, and cards are shared: use backup.credentials_file"
                )
            if isinstance(value, str) and "@" in value:
                raise ValueError(
                    f"{name} may hold a password, and cards are shared: use backup.credentials_file"
                )
        return options
