"""What a worker's error says of its node, by the signatures of `tr11 diagnose`. Pure.

The catalogue's rules are asked one by one: a single line needs no search of blocks, and a relaunch
no native library.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tr11ops.diagnose.catalogue import rules
from tr11ops.diagnose.signature import FaultClass, FaultSignature, NextStep, NodeBlame, Role
from trainer.contract.record import Record

ANY_EXCEPTION = "python-exception"  # the signature of whatever has no better one
PORT_TAKEN = "c10d-port-taken"
CHARACTERS = 4096  # of an error; what is beyond repeats itself

_FOLLOWS = frozenset({Role.SYMPTOM, Role.CONSEQUENCE, Role.SUMMARY})
_NETWORK = frozenset({FaultClass.NCCL_NETWORK, FaultClass.NCCL_TIMEOUT, FaultClass.RENDEZVOUS})
# what one node alone may have, and the program too
_OF_ONE_NODE = frozenset(
    {FaultClass.GPU_HARDWARE, FaultClass.CUDA_OOM, FaultClass.HOST_OOM, FaultClass.DATALOADER}
)
_WAITED = re.compile(r"timed? ?out|timeout|lost (?:a|the) rank|lost each other", re.IGNORECASE)
# places that each node has for itself
_NODES_OWN = re.compile(r"['\" ](?:/tmp|/dev/shm|/var/tmp|/run)/")
# Exceptions that every launch of the same program and card meets again.
_PROGRAMS_OWN = frozenset(
    {
        "CardError",
        "DataError",
        "CheckpointError",
        "ImportError",
        "ModuleNotFoundError",
        "SyntaxError",
        "NameError",
        "TypeError",
        "AttributeError",
        "KeyError",
        "ValueError",
        "IndexError",
        "AssertionError",
        "NotImplementedError",
        "FileNotFoundError",
        "PermissionError",
        "UnicodeDecodeError",
    }
)


# What the trainer says of its input whatever was in the way: where the text tells that, it counts
# before the name.
_WRAPPERS = frozenset({"DataError", "LostWorkerError", "CheckpointError"})
_OF_THE_SITE = _OF_ONE_NODE | {FaultClass.STORAGE}


class ErrorText(Record):
    """An error and the signatures that it matches, the generic one of any exception left out."""

    text: str
    signatures: tuple[FaultSignature, ...]

    @property
    def best(self) -> FaultSignature | None:
        """The signature that says most: a cause before all else, the surest first."""
        return min(
            self.signatures,
            key=lambda one: (one.role is not Role.CAUSE, -one.confidence),
            default=None,
        )

    @property
    def is_programs_own(self) -> bool:
        """Whether it is an exception that the same program would raise again anywhere."""
        name = self.text.partition(":")[0].rpartition(".")[2]
        if name in _WRAPPERS and self.best is not None and self.best.fault in _OF_THE_SITE:
            return False
        return name in _PROGRAMS_OWN

    @property
    def is_consequence(self) -> bool:
        """Whether it only tells of another rank that was lost or waited for."""
        best = self.best
        if best is None or best.blame is NodeBlame.NODE:
            return best is None and _WAITED.search(self.text) is not None
        if best.own:
            return False
        return best.role in _FOLLOWS or best.fault in _NETWORK

    @property
    def tells_of_peer(self) -> bool:
        """Whether it is a text that a lost peer leaves, and nothing else does."""
        return self.best is not None and self.is_consequence

    @property
    def tells_of_waiting(self) -> bool:
        """Whether it tells of a rank that was waited for in vain; what ends then, ends because of
        that.
        """
        return self._is(FaultClass.NCCL_TIMEOUT)

    @property
    def condemns_node(self) -> bool:
        """Whether it is a text of broken hardware, and of nothing else. A link has two ends: it
        condemns neither.
        """
        best = self.best
        if best is not None and best.fault in _NETWORK:
            return False
        is_mixed = any(one.role in _FOLLOWS for one in self.signatures)
        return best is not None and best.blame is NodeBlame.NODE and not is_mixed

    @property
    def is_storage(self) -> bool:
        """Whether the storage that all nodes share is full or gone."""
        return (
            self._is(FaultClass.STORAGE)
            and not self.is_programs_own
            and not _NODES_OWN.search(self.text)
        )

    @property
    def is_port_taken(self) -> bool:
        """Whether the process could not listen, because another one does."""
        return self.best is not None and self.best.id == PORT_TAKEN

    @property
    def is_memory(self) -> bool:
        """Whether it tells that a node had no memory left, or may mean that."""
        return self._is(FaultClass.HOST_OOM) or self._is(FaultClass.DATALOADER)

    @property
    def is_numerics(self) -> bool:
        return self._is(FaultClass.NUMERICS)

    @property
    def may_be_nodes_own(self) -> bool:
        """Whether a node may be at fault where it met this alone: a GPU's error, memory, a place of
        its own.
        """
        best = self.best
        if best is None or self.is_programs_own:
            return False
        if best.blame is NodeBlame.NODE or best.fault in _OF_ONE_NODE or best.family == "cuda":
            return True
        return best.fault is FaultClass.STORAGE and _NODES_OWN.search(self.text) is not None

    @property
    def is_configuration(self) -> bool:
        """Where several nodes met it alike: whether the program or its card is at fault."""
        best = self.best
        if best is not None and best.fault in _NETWORK and best.step is NextStep.FIX_CONFIG:
            return True
        return self.is_programs_own or (
            self._is(FaultClass.CUDA_OOM) and "out of memory" in self.text.lower()
        )

    def _is(self, fault: FaultClass) -> bool:
        return self.best is not None and self.best.fault is fault


@lru_cache(maxsize=1024)  # each attributor asks for the same few
def read_error(error: str) -> ErrorText:
    """What an error says; whatever it holds, this does not fail."""
    text = error[:CHARACTERS]
    found: dict[str, FaultSignature] = {}
    for rule in rules():
        match = rule.pattern.search(text)
        signature = None
        if match is not None:
            signature = rule.of(match)
        if signature is not None and signature.id != ANY_EXCEPTION:
            found.setdefault(signature.id, signature)
    return ErrorText(text, tuple(found.values()))


def without_speaker(said: str) -> str:
    """The words of a worker without `rank 3 on n2: ` or `n2: `; what srun says is left as it is."""
    who, colon, words = said.partition(": ")
    is_speaker = (
        colon and (" on " in who or " " not in who) and who not in {"srun", "slurmstepd", "tr11"}
    )
    if is_speaker:
        return words
    return said
