"""One rank refuses its input in a step while the others wait for it: people read the refusal, and
no traceback.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tr11ops.diagnose.diagnose_logs import of_text
from tests.trainer.cases import VOCABULARY
from tests.trainer.control.trainers import card
from tests.trainer.courses import worker_of
from tests.trainer.spawn import fork_server
from tr11ops.twin.machine import claimed_ports
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.end_marker import EXIT_ERROR, EXIT_REFUSED, EndMarker
from trainer.contract.errors import DataError
from trainer.contract.files import host_name
from trainer.contract.state_file import read_json
from trainer.control.exits import refusal_elsewhere
from trainer.control.lifecycle import write_failure
from trainer.data.groups import split_groups
from trainer.data.indexed_write import IndexedWriter
from trainer.data.sources import ReadOptions, plan_groups

SAMPLES, SEED = 16 * 20, 1234


def write_foreign(folder: Path, foreign: int) -> None:
    """Documents of 40 tokens in the order of the training, of which the sample `foreign` holds a
    token too many.
    """
    folder.mkdir(exist_ok=True)
    tokens = np.full(60 * 40, 3, dtype=np.uint16)
    ends = np.full(60, 40, dtype=np.int32)
    with IndexedWriter(folder / "numbered", "uint16") as writer:
        writer.add_documents(np.arange(60 * 40, dtype=np.uint16), ends)
    (plan,) = plan_groups(
        split_groups([(1.0, folder / "numbered")], "1", {"train": SAMPLES}), ReadOptions(16, SEED)
    ).values()
    tokens[plan.open()[foreign][8]] = VOCABULARY
    with IndexedWriter(folder / "tokens", "uint16") as writer:
        writer.add_documents(tokens, ends)


def _train(rank: int, world: int, port: int, card_path: Path, output: Path) -> None:
    """What `torchrun ... -m trainer CARD` starts, but that the look at the start sees only the
    first token.
    """
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from trainer.data import sources

    sources.FULL_TOKEN_CHECK_BYTES, sources.TOKEN_CHECK_PARTS, sources.TOKEN_CHECK_PART = 0, 1, 1
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TR11_JOB_ID="1",
    )  # fmt: skip
    from trainer.__main__ import main

    main([str(card_path)])


def run_two(folder: Path, **changes: Any) -> tuple[list[str], list[int | None], TrainerConfig]:
    """What two ranks said, how they ended, and their card."""
    batch = {"train_samples": SAMPLES, "micro_batch_size": 8}
    config = card(folder, batch=batch, run={"seed": SEED}, **changes)
    path = folder / "card.json"
    path.write_text(config.model_dump_json())
    outputs = [folder / f"{rank}.out" for rank in range(2)]
    with claimed_ports(1, beside_twins=True) as port:
        started = [
            fork_server().Process(target=_train, args=(rank, 2, port, path, outputs[rank]))
            for rank in range(2)
        ]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join(300)
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()
    return (
        [output.read_text() for output in outputs],
        [process.exitcode for process in started],
        config,
    )


@pytest.mark.parametrize(
    ("pipeline", "workers", "foreign"),
    [
        pytest.param(1, 0, 3, id="the first replica"),
        pytest.param(1, 0, 11, id="the second replica, in a step"),
        pytest.param(1, 1, 11, id="the second replica, reading ahead"),
        pytest.param(2, 0, 3, id="the first stage"),
    ],
)
def test_the_others_say_that_one_has_refused(
    tmp_path: Path, pipeline: int, workers: int, foreign: int
) -> None:
    write_foreign(tmp_path, foreign)
    data = {"order": "single", "workers": workers}
    said, codes, config = run_two(tmp_path, data=data, parallel={"pipeline": pipeline})
    refuser = foreign // 8
    other = 1 - refuser
    refused = [line for line in said[refuser].splitlines() if line.startswith("tr11: refused: ")]
    assert len(refused) == 1 and f"holds token {VOCABULARY} at its place" in refused[0], said[
        refuser
    ]
    assert (
        f"tr11: ended with rank {refuser} on {host_name()}, which refused: its own line says why"
        in said[other]
    )
    for text in said:
        assert "Traceback" not in text and "Error" not in text and "gloo" not in text, text
    assert codes == [EXIT_REFUSED, EXIT_REFUSED]
    marker = EndMarker.read(config.paths.end_marker("1"))
    assert marker is not None and (marker.reason, marker.restart) == ("refused", False)
    assert f"holds token {VOCABULARY}" in marker.message
    kept = read_json(config.paths.attempt("1") / "failures" / f"rank-{other}.json")
    assert kept is not None and "peer" in kept["error"], "for who asks which connection broke"


def test_after_steps_it_is_a_failure_in_one_line_all_the_same(tmp_path: Path) -> None:
    write_foreign(tmp_path, 16 + 11)
    said, codes, config = run_two(tmp_path, data={"order": "single", "workers": 0})
    assert " iteration        1/" in said[1]
    stopped = [
        line for line in said[1].splitlines() if line.startswith("tr11: stopped: DataError: ")
    ]
    assert len(stopped) == 1 and f"holds token {VOCABULARY} at its place" in stopped[0], said[1]
    assert (
        f"tr11: ended with rank 1 on {host_name()}, which stopped: its own line says why" in said[0]
    )
    for text in said:
        assert "Traceback" not in text and "gloo" not in text, text
    assert codes == [EXIT_ERROR, EXIT_ERROR]
    assert of_text(tmp_path, said[1]).fault.value == "user_code", (
        "what stopped it is known without a traceback"
    )
    assert EndMarker.read(config.paths.end_marker("1")) is None, "the next task may train on"


def test_only_a_refusal_of_this_launch_and_of_another_rank_excuses(tmp_path: Path) -> None:
    """An error that only looks like a lost rank keeps its traceback: no one else has left a word
    for it.
    """
    config = card(tmp_path)
    paths = config.paths
    now, before = (AttemptIdentity("7", launch, paths.stop_request("7")) for launch in (2, 1))
    write_failure(paths, before, 1, DataError("of the launch before"), 0, refusal="refused")
    write_failure(paths, now, 2, RuntimeError("a fault with a place"), 0)
    write_failure(paths, now, 3, DataError("its own"), 0, refusal="refused")
    (paths.attempt("7") / "failures" / "rank-4.json").write_text("half a rec")
    assert refusal_elsewhere(worker_of(config, "7", rank=3, launch=2)) is None
    found = refusal_elsewhere(worker_of(config, "7", rank=2, launch=2))
    assert found is not None and found[0] == "refused" and "rank 3" in found[1]
