"""What an error text means: the values that a signature file holds. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import field

from trainer.contract.record import Record


class FaultClass(StrEnum):
    """What sort of thing ended a training; or that nothing did."""

    GPU_HARDWARE = "gpu_hardware"
    NCCL_NETWORK = "nccl_network"
    NCCL_TIMEOUT = "nccl_timeout"
    CUDA_OOM = "cuda_oom"
    HOST_OOM = "host_oom"
    DATALOADER = "dataloader"
    STORAGE = "storage"
    CHECKPOINT_MISMATCH = "checkpoint_mismatch"
    NUMERICS = "numerics"
    SLURM_TIME_LIMIT = "slurm_time_limit"
    SLURM_PREEMPTED = "slurm_preempted"
    SLURM_NODE_FAIL = "slurm_node_fail"
    SLURM_USER_CANCEL = "slurm_user_cancel"
    SLURM_SUBMIT = "slurm_submit"
    SLURM_AUTH = "slurm_auth"
    RENDEZVOUS = "rendezvous"
    USER_CODE = "user_code"
    HUB_AUTH = "hub_auth"
    GCS = "gcs"
    CLEAN_EXIT = "clean_exit"
    UNKNOWN = "unknown"
    RUNNING = "running"  # nothing has ended: no signature says so, only a look at the run
    STALLED = "stalled"  # nor has anything here, and it stands still
    SLOW = "slow"  # nor here: it trains, and takes longer
    KILLED = "killed"  # by a signal that neither tr11 nor the scheduler sent, as far as is known

    @property
    def words(self) -> str:
        """What every screen calls it."""
        return _WORDS[self]


_WORDS = {
    FaultClass.GPU_HARDWARE: "broken GPU",
    FaultClass.NCCL_NETWORK: "network between the nodes",
    FaultClass.NCCL_TIMEOUT: "hang in a collective",
    FaultClass.CUDA_OOM: "out of GPU memory",
    FaultClass.HOST_OOM: "out of memory on a node",
    FaultClass.DATALOADER: "data loader",
    FaultClass.STORAGE: "storage",
    FaultClass.CHECKPOINT_MISMATCH: "checkpoint does not fit or is damaged",
    FaultClass.NUMERICS: "numbers not finite, or diverging",
    FaultClass.SLURM_TIME_LIMIT: "time limit",
    FaultClass.SLURM_PREEMPTED: "preempted",
    FaultClass.SLURM_NODE_FAIL: "node lost",
    FaultClass.SLURM_USER_CANCEL: "cancelled by a person",
    FaultClass.SLURM_SUBMIT: "not accepted by Slurm",
    FaultClass.SLURM_AUTH: "Slurm's authentication",
    FaultClass.RENDEZVOUS: "workers did not find each other",
    FaultClass.USER_CODE: "software or data, not the nodes",
    FaultClass.HUB_AUTH: "access to the hub",
    FaultClass.GCS: "object store",
    FaultClass.CLEAN_EXIT: "clean end",
    FaultClass.UNKNOWN: "cannot tell",
    FaultClass.RUNNING: "nothing has ended, it runs and is well",
    FaultClass.STALLED: "nothing has ended, and it stands still",
    FaultClass.SLOW: "nothing has ended, and it trains slowly",
    FaultClass.KILLED: "ended by a signal from outside",
}


class NextStep(StrEnum):
    """What to do about it."""

    EXCLUDE_AND_RESUBMIT = "exclude_and_resubmit"
    RESUBMIT = "resubmit"
    FIX_CONFIG = "fix_config"
    FIX_STORAGE = "fix_storage"
    ROLLBACK_AND_SKIP = "rollback_and_skip"
    PAGE = "page"
    NONE = "none"


class Restart(StrEnum):
    """Whether a plain restart helps: the same program with the same settings, from the newest
    checkpoint.
    """

    PLAIN = "plain"
    ELSEWHERE = "elsewhere"  # on other nodes
    CHANGE = "change"  # not until something is changed
    UNKNOWN = "unknown"
    NONE = "none"  # there is nothing to restart


class NodeBlame(StrEnum):
    """What an error text says of the node that printed it."""

    NODE = "node"
    PROGRAM = "program"
    UNKNOWN = "unknown"


class Proof(StrEnum):
    """Why one line is enough to condemn a node: all else that one log says makes a suspect."""

    XID = "xid"  # the driver's own word for a fault of the GPU that it cannot go on after
    MEMORY = "memory"  # an uncorrectable memory error
    BUS = "bus"  # a device fell off its bus
    SCHEDULER = "scheduler"  # who gave the node to the job says that it lost it
    HEALTH_CHECK = "health_check"  # a check of the hardware failed


class Role(StrEnum):
    """What a line is in the story of a failure.

    A CAUSE says what went wrong. A DEATH says that a process died and not why. A SYMPTOM tells of
    another rank that was lost or waited for. A STOP is an end that the scheduler or a person
    ordered. A SUMMARY repeats what others said; a CONSEQUENCE follows from any end. A WARNING may
    explain a failure and is none. BENIGN lines mean nothing. An END is a clean one. A START begins
    a launch.
    """

    CAUSE = "cause"
    DEATH = "death"
    SYMPTOM = "symptom"
    STOP = "stop"
    SUMMARY = "summary"
    CONSEQUENCE = "consequence"
    WARNING = "warning"
    BENIGN = "benign"
    END = "end"
    START = "start"


SURE_END = 0.9  # confidence of an END; one that is less sure is one only where nothing failed

USUAL_STEP: Mapping[FaultClass, NextStep] = {
    FaultClass.GPU_HARDWARE: NextStep.EXCLUDE_AND_RESUBMIT,
    FaultClass.NCCL_NETWORK: NextStep.RESUBMIT,
    FaultClass.NCCL_TIMEOUT: NextStep.RESUBMIT,
    FaultClass.CUDA_OOM: NextStep.FIX_CONFIG,
    FaultClass.HOST_OOM: NextStep.FIX_CONFIG,
    FaultClass.DATALOADER: NextStep.FIX_CONFIG,
    FaultClass.STORAGE: NextStep.FIX_STORAGE,
    FaultClass.CHECKPOINT_MISMATCH: NextStep.FIX_CONFIG,
    FaultClass.NUMERICS: NextStep.ROLLBACK_AND_SKIP,
    FaultClass.SLURM_TIME_LIMIT: NextStep.RESUBMIT,
    FaultClass.SLURM_PREEMPTED: NextStep.RESUBMIT,
    FaultClass.SLURM_NODE_FAIL: NextStep.EXCLUDE_AND_RESUBMIT,
    FaultClass.SLURM_USER_CANCEL: NextStep.NONE,
    FaultClass.SLURM_SUBMIT: NextStep.FIX_CONFIG,
    FaultClass.SLURM_AUTH: NextStep.PAGE,
    FaultClass.RENDEZVOUS: NextStep.RESUBMIT,
    FaultClass.USER_CODE: NextStep.FIX_CONFIG,
    FaultClass.HUB_AUTH: NextStep.FIX_CONFIG,
    FaultClass.GCS: NextStep.FIX_STORAGE,
    FaultClass.CLEAN_EXIT: NextStep.NONE,
    FaultClass.UNKNOWN: NextStep.PAGE,
    FaultClass.STALLED: NextStep.PAGE,
    FaultClass.SLOW: NextStep.EXCLUDE_AND_RESUBMIT,
    FaultClass.KILLED: NextStep.RESUBMIT,
}

USUAL_CONFIDENCE: Mapping[Role, float] = {
    Role.CAUSE: 0.9,
    Role.STOP: 0.9,
    Role.END: 0.9,
    Role.DEATH: 0.6,
    Role.SYMPTOM: 0.55,
    Role.SUMMARY: 0.4,
    Role.WARNING: 0.4,
}


class FaultSignature(Record):
    """One kind of line. `confidence`: how often its class is right where it is the first cause; 0
    to 1.

    `examples` must match, `counterexamples` must not; `source` is an address or a document's name.
    """

    id: str
    family: str
    role: Role
    fault: FaultClass
    step: NextStep
    blame: NodeBlame
    confidence: float
    meaning: str
    source: str
    lasting: bool = False  # counts although the training went on after it
    own: bool = False  # of the network, and yet of the very process that says it, not of a peer
    ordered: bool = False  # an order that is carried out though a training makes steps until then
    # a first launch says it too: it counts only where an earlier one has trained
    restart: bool = False
    helps: Restart | None = None  # whether a plain restart does, where the step does not tell
    # of the guilt of the node that it names; without one, that is a suspect
    proof: Proof | None = None
    examples: tuple[str, ...] = ()
    counterexamples: tuple[str, ...] = ()


def signature_of(name: str, family: str, entry: Mapping[str, Any]) -> FaultSignature:
    """The signature that an entry of a TOML file describes. Raises ValueError that names it and
    what is wrong.
    """
    try:
        role = Role(entry.get("role", "cause"))
        fault = FaultClass(entry.get("class", "clean_exit" if role is Role.END else "unknown"))
        return FaultSignature(
            id=name,
            family=family,
            role=role,
            fault=fault,
            step=NextStep(entry["action"]) if "action" in entry else USUAL_STEP[fault],
            blame=NodeBlame(entry.get("node", "unknown")),
            confidence=float(entry.get("confidence", USUAL_CONFIDENCE.get(role, 0.0))),
            meaning=entry["meaning"],
            source=entry["source"],
            lasting=bool(entry.get("lasting", False)),
            own=bool(entry.get("own", False)),
            ordered=bool(entry.get("ordered", False)),
            restart=bool(entry.get("restart", False)),
            helps=Restart(entry["helps"]) if "helps" in entry else None,
            proof=Proof(entry["proof"]) if "proof" in entry else None,
            examples=tuple(entry["match"]),
            counterexamples=tuple(entry.get("no_match", ())),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


class Rule(Record):
    """A pattern, and the signature that it stands for; by the group `code` where it stands for
    several.

    A code that is not in `codes` means `signature`; where that is None the line does not match.
    Codes are compared in lower case.
    """

    pattern: re.Pattern[str]
    signature: FaultSignature | None
    codes: Mapping[str, FaultSignature] = field(default_factory=dict)

    def of(self, match: re.Match[str]) -> FaultSignature | None:
        """The signature that a match of the pattern means."""
        if not self.codes:
            return self.signature
        return self.codes.get(match["code"].lower(), self.signature)
