"""`inspect PLACE`: what a checkpoint holds: facts, files, tensors and their numbers."""

from __future__ import annotations

import math
import time
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

from trainer.checkpoint.fingerprint import EMPTY, fingerprint
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.rewrite import blocks_of
from trainer.checkpoint.source import PARTS, CheckpointFacts, TensorSource, dtype_name
from trainer.contract.checkpoint_formats import MANIFEST_FILE, RNG
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import Manifest, file_digest, manifest_faults
from trainer.contract.paths import RunPaths, read_attempt_label
from trainer.contract.record import JsonObject
from trainer.data.progress import progress_bar

PIECE_ELEMENTS = 1 << 24
_EXIT_UNOBSERVED = 3


def run(options: SimpleNamespace) -> JsonObject:
    """Look at the folder. A fault of a file is part of the result; tensors are then not looked at."""
    place = Path(options.place)
    if not place.is_dir():
        raise CheckpointError(
            f"{place} is not a folder; give the folder of a checkpoint (global_stepN)"
        )
    manifest = manifest_of(place)
    faults = _faults(place, manifest, options.verify)
    if manifest is None:
        verified = "no manifest"
    else:
        verified = "digests" if options.verify else "sizes"
    result: JsonObject = {
        "place": str(place),
        "files": _files(place, manifest),
        "faults": faults,
        "verified": verified,
        "verify_asked": options.verify,
        "manifest": None if manifest is None else _manifest_facts(manifest),
        "random_state_ranks": sum(1 for _ in (place / RNG).glob("rank_*.pt")),
    }
    if faults:
        return {**result, "tensors": [], "remarks": []}
    source = open_checkpoint(place)
    tensors = _tensors(source, options.tensors)
    return {
        **result,
        **_facts(source.facts),
        "tensors": tensors,
        "remarks": list(getattr(source, "remarks", ())),
    }


def exit_code(result: JsonObject) -> int:
    """0 sound, 1 a fault, 3 digests were asked for and nothing says what they should be."""
    if result["faults"]:
        return 1
    if result["verify_asked"] and result["manifest"] is None:
        return _EXIT_UNOBSERVED
    return 0


def manifest_of(place: Path) -> Manifest | None:
    """The manifest of the checkpoint at `place`, None where it has none. Raises CheckpointError."""
    try:
        return Manifest.read(place)
    except ValueError as error:
        raise CheckpointError(" ".join(str(error).split())) from None


def _manifest_facts(manifest: Manifest) -> JsonObject:
    return {
        "created": manifest.created,
        "run_card_hash": manifest.run_card_hash,
        "job_id": manifest.job_id,
        "versions": dict(manifest.versions),
        "consumed_samples": manifest.consumed_samples,
        "consumed_tokens": manifest.consumed_tokens,
    }


def _files(place: Path, manifest: Manifest | None) -> list[JsonObject]:
    """Files as the manifest lists them; without one, as they lie there."""
    if manifest is not None:
        return [{"path": entry.path, "bytes": entry.bytes} for entry in manifest.files]
    found = sorted(path for path in place.rglob("*") if path.is_file())
    return [{"path": str(path.relative_to(place)), "bytes": path.stat().st_size} for path in found]


def _faults(place: Path, manifest: Manifest | None, verify: bool) -> list[str]:
    if manifest is None:
        return []
    faults = manifest_faults(place, manifest, read_digests=False)
    if not verify:
        return faults
    short = {fault.partition(": ")[0] for fault in faults}
    with progress_bar() as bar:
        task = bar.add_task("verifying", total=manifest.total_bytes)
        for entry in manifest.files:
            if entry.path not in short and file_digest(place / entry.path) != entry.digest:
                faults.append(f"{entry.path}: its digest differs from the manifest's")
            bar.advance(task, entry.bytes)
    return faults


def _facts(facts: CheckpointFacts) -> JsonObject:
    return {
        "step": facts.step,
        "layout": facts.layout,
        "topology": dict(facts.topology),
        "model": dict(facts.model),
        "cursor": {
            key: value
            for key, value in facts.cursor.items()
            if isinstance(value, (int, float, str, bool))
        },
        "optimizer_step": facts.optimizer_step,
    }


def _tensors(source: TensorSource, pattern: str | None) -> list[JsonObject]:
    """All tensors with shape and dtype; with a pattern those that fit, and their numbers, read
    piece by piece.
    """
    held = [(part, key, facts) for part in PARTS for key, facts in source.tensors(part).items()]
    if pattern is not None:
        held = [item for item in held if fnmatchcase(item[1], pattern)]
        if not held:
            raise CheckpointError(
                f"--tensors {pattern!r}: no tensor of this checkpoint has such a name"
            )
    shown = [
        {
            "part": part,
            "name": key,
            "shape": list(facts.shape),
            "dtype": dtype_name(facts.dtype),
        }
        for part, key, facts in held
    ]
    if pattern is None:
        return shown
    with progress_bar("{task.completed:,.0f} numbers") as bar:
        task = bar.add_task("reading", total=sum(math.prod(facts.shape) for _, _, facts in held))
        for entry, (part, key, facts) in zip(shown, held, strict=True):
            numbers = EMPTY
            for offsets, sizes in blocks_of(facts.shape, PIECE_ELEMENTS):
                piece = source.read(part, key, offsets, sizes)
                numbers = numbers.joined(fingerprint(piece, facts.shape, offsets))
                bar.update(task, advance=math.prod(sizes))
            entry.update(numbers.document())
    return shown


# ----------------------------------------------------------------------------- for people
def describe(result: JsonObject) -> str:
    """The result as text; tables of tensors may be wider than 80 columns, as their names are."""
    total = sum(entry["bytes"] for entry in result["files"])
    lines = [
        result["place"],
        f"  files      {len(result['files'])}, {total:,} bytes; {_checked(result)}",
    ]
    if result["faults"]:
        return "\n".join([*lines, *(f"  FAULT      {fault}" for fault in result["faults"])])
    lines += [
        f"  step       {result['step']}, {result['optimizer_step']} updates of the optimizer",
        f"  layout     {result['layout']}, written on {_pairs(result['topology'], ' x ')}",
        f"  cursor     {_pairs(result['cursor'])}",
        f"  random     state of {result['random_state_ranks']} rank(s)",
    ]
    lines += [f"  {key:<10} {value}" for key, value in _manifest_lines(result)]
    lines += [f"  {key} = {value}" for key, value in result["model"].items()]
    lines += [f"  note: {remark}" for remark in result["remarks"]]
    return "\n".join([*lines, "", *_table(result["tensors"])])


def _checked(result: JsonObject) -> str:
    return {
        "no manifest": f"no {MANIFEST_FILE}, so digests are not known",
        "digests": "sizes and digests compared",
        "sizes": "sizes compared",
    }[result["verified"]]


def _manifest_lines(result: JsonObject) -> list[tuple[str, str]]:
    manifest = result["manifest"]
    if manifest is None:
        return []
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest["created"]))
    job = manifest["job_id"]
    paths = RunPaths.of_checkpoints(Path(result["place"]).parent)
    if job and paths is not None:
        job = read_attempt_label(paths, job)
    if job:
        written += f" by job {job}"
    return [
        ("written", written),
        ("versions", _pairs(manifest["versions"]) or "not recorded"),
        ("card", manifest["run_card_hash"] or "not recorded"),
    ]


def _pairs(values: JsonObject, between: str = ", ") -> str:
    return between.join(f"{key} {value}" for key, value in values.items())


def _table(tensors: list[JsonObject]) -> list[str]:
    """One line a tensor; numbers first where they were read, as in the fingerprint dumps."""
    lines = []
    if tensors and "digest" in tensors[0]:
        lines.append(f"{'min':^13} {'max':^13} {'mean':^13} {'l2 norm':^12} tensor")
    for entry in tensors:
        numbers = ""
        if "digest" in entry:
            least, most, mean = (_shown(entry[key]) for key in ("min", "max", "mean"))
            numbers = f"{least} {most} {mean} {_shown(entry['l2_norm'], 12)} "
        odd = ""
        if entry.get("non_finite"):
            odd = f", {entry['non_finite']} NOT FINITE"
        lines.append(f"{numbers}{entry['name']} {entry['shape']} {entry['dtype']}{odd}")
    return lines


def _shown(value: float | None, width: int = 13) -> str:
    if value is None:
        return f"{'nan':>{width}}"
    return f"{value:{width}.6e}"
