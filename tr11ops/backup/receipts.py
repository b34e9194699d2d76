"""The receipt that lies beside each copy at the destination: written last, so what has none is no
copy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import get_args

from tr11ops.backup.base import Archive
from tr11ops.base.errors import ArchivePermanentError
from tr11ops.rundir.copies import FOLDERS, RECEIPT_SUFFIX, SCHEMA, CopiedFile, Kind, Receipt
from trainer.contract.documents import document, record_of_text

MOST_BYTES = 64 << 20  # 100,000 files with long names have 20 MB
TAR_SUFFIX = ".tar"


def receipt_path(location: str) -> str:
    """Where the receipt of the copy at `location` (a folder or a tar) lies."""
    return location.removesuffix(TAR_SUFFIX) + RECEIPT_SUFFIX


def file_path(receipt: Receipt, file: CopiedFile) -> str:
    """The file of the archive that holds a file of the copy: itself, or the tar."""
    if receipt.format == "tar":
        return receipt.location
    return f"{receipt.location}/{file.path}"


def read_receipt(archive: Archive, location: str) -> Receipt | None:
    """The receipt of one copy, or None when there is none. Raises ArchiveError; ValueError when it
    is damaged.
    """
    path = receipt_path(location)
    if archive.look(path) is None:
        return None
    return _read(archive, path)


def list_receipts(
    archive: Archive, variant: str, kinds: Sequence[Kind] = get_args(Kind)
) -> tuple[Receipt, ...]:
    """Receipts of all copies of these kinds, by step, but those that cannot be read. Raises
    ArchiveUnavailable.
    """
    found = []
    for kind in kinds:
        folder = f"{FOLDERS[kind]}/{variant}"
        for file in archive.list(folder):
            name = file.path.removeprefix(f"{folder}/")
            if "/" not in name and name.endswith(RECEIPT_SUFFIX):
                with suppress(ValueError, RecursionError, ArchivePermanentError):
                    found.append(_read(archive, file.path))
    return tuple(sorted(found, key=lambda receipt: (receipt.step, receipt.kind, receipt.location)))


def write_receipt(archive: Archive, receipt: Receipt) -> None:
    """Put the receipt beside its copy; from then on the copy counts. Raises ArchiveError."""
    archive.put(receipt_path(receipt.location), format_receipt(receipt))


def format_receipt(receipt: Receipt) -> bytes:
    """The receipt's file: JSON, one line for each file of the copy."""
    value = document(receipt)
    files = ",\n".join(f"  {json.dumps(file, sort_keys=True)}" for file in value.pop("files"))
    rest = json.dumps(value, sort_keys=True)
    return f'{rest[:-1]}, "files": [\n{files}\n]}}\n'.encode()


def parse_receipt(content: bytes, where: str) -> Receipt:
    """The receipt in these bytes. Raises ValueError, which names `where`, when they are none or of
    a newer tr11.
    """
    try:
        receipt = record_of_text(Receipt, content)
        if receipt.schema > SCHEMA:
            raise ValueError("written by a newer tr11")
    except ValueError as error:
        raise ValueError(
            f"{where} is not the receipt of a copy ({' '.join(str(error).split())})"
        ) from None
    return receipt


def _read(archive: Archive, path: str) -> Receipt:
    content = bytearray()
    for piece in archive.read(path):
        content += piece
        if len(content) > MOST_BYTES:
            raise ValueError(
                f"{path} is not the receipt of a copy (it has more than {MOST_BYTES} bytes)"
            )
    where = f"{archive.address}/{path}"
    receipt = parse_receipt(bytes(content), where)
    if receipt_path(receipt.location) != path:
        raise ValueError(
            f"{where} is the receipt of {receipt.location}: it was renamed; give its name back"
        )
    return receipt
