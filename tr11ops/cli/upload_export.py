"""What `tr11 upload` publishes: an export by `python -m trainer.checkpoint`, as a child, or an earlier one's."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import say
from tr11ops.cli.progress import ByteProgress
from tr11ops.cli.trainer_child import ask_checkpoint_module
from tr11ops.hub.upload import ROOM
from tr11ops.runcard.card import resolved

if TYPE_CHECKING:
    from tr11ops.cli.upload_job import UploadJob
    from trainer.contract.manifest import FileEntry


def export(job: UploadJob, as_json: bool) -> tuple[FileEntry, ...]:
    """The exported files: of an earlier try where they are as they were, else made now."""
    work = job.work
    recorded = work.recorded()
    if recorded is not None:
        with ByteProgress("checking", sum(entry.bytes for entry in recorded), is_quiet=as_json) as bar:
            found = work.finished(bar.advance)
        if found is not None:
            return found
        say(f"{work.folder}: the export of an earlier try is damaged and is made again")
    work.record.unlink(missing_ok=True)
    work.make(int(job.bytes * ROOM))
    return work.record_export(_run_export(job))


def _run_export(job: UploadJob) -> dict[str, Any]:
    """Run the export as a child with this terminal's stderr; its result. Raises Refusal where it fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="tr11-card-", encoding="utf-8") as stream:
        stream.write(json.dumps(resolved(job.card)))
        stream.flush()
        command = [
            *("export", "--json", "--force", "--dtype", job.dtype),
            *("--output", str(job.work.model), "--card", stream.name),
            *([] if job.tokenizer is None else ["--tokenizer", str(job.tokenizer.expanduser().absolute())]),
            *("--", str(job.place)),
        ]
        value = ask_checkpoint_module(command)
    if value is None or "error" in value:
        raise Refusal("the export failed (see above); nothing was published")
    return value
