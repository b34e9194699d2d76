"""`idrquota`: project quotas of Jean Zay, told as two shares: of the bytes, then of the inodes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.base.errors import SourceError
from tr11ops.filesystems.reading import CommandOutput, UsageReading, UsageSource, answered
from tr11ops.runcard.watching import FilesystemSection

_SHARE = re.compile(r" \((\d+(?:\.\d+)?)%\)")


def commands(filesystem: FilesystemSection) -> tuple[tuple[str, ...], ...]:
    return (("idrquota", *filesystem.arguments),)


def parse(outputs: Sequence[CommandOutput]) -> UsageReading:
    """Exactly two figures like ` (85.3%)`; anything else is not understood, and raises SourceError."""
    text = answered(outputs[0])
    shares = [float(share) / 100 for share in _SHARE.findall(text)]
    if len(shares) != 2:
        raise SourceError(
            f"{len(shares)} figures like (12.3%) where two are expected, of the bytes and of the inodes"
        )
    return UsageReading(bytes_share=shares[0], inodes_share=shares[1], report=text.strip())


SOURCE = UsageSource("idrquota", commands, parse)
