"""MLflow: a folder or database of its own, or a server at an address."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tr11ops.trackers.destination import TrackedRun
from tr11ops.trackers.points import Point
from trainer.contract.files import make_shared

KEY_TAG = "tr11.run"
PROGRESS = "iteration"  # the metric by which the store is asked how far it is
MOST_METRICS = 1000  # of one request, by MLflow's rule
MOST_SETTINGS = 100
LONGEST_SETTING = 500


def open_run(run: TrackedRun) -> MlflowRun:
    """The run in its experiment, which is named as the run is; both are made where they are not
    there.
    """
    # what only shortens a start or would ask the network; a folder is a store that is kept as it is
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    address = address_of(run.place)
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name(run.name)
    if experiment is None:
        number = client.create_experiment(run.name)
    else:
        number = experiment.experiment_id
    wanted = f"tags.`{KEY_TAG}` = '{run.key}'"
    found = client.search_runs([number], filter_string=wanted, max_results=1)
    if found:
        known_as = found[0].info.run_id
        client.update_run(known_as, status="RUNNING")
    else:
        made = client.create_run(number, run_name=run.variant, tags={KEY_TAG: run.key})
        known_as = made.info.run_id
        for name, value in list(run.settings.items())[:MOST_SETTINGS]:
            client.log_param(known_as, name, str(value)[:LONGEST_SETTING])
    look = address
    if "://" not in run.place:
        look = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {address}"
    return MlflowRun(client, known_as, look)


def address_of(place: str) -> str:
    """Where the store is, as MLflow takes it: a folder holds a database where this MLflow can keep
    one, else files.
    """
    if "://" in place:
        return place
    folder = Path(place).absolute()
    if (folder / "mlflow.db").exists() or (
        importlib.util.find_spec("sqlalchemy") and not (folder / "files").exists()
    ):
        make_shared(folder)
        return f"sqlite:///{folder / 'mlflow.db'}"
    return (folder / "files").as_uri()


class MlflowRun:
    """Raises mlflow's MlflowException, and OSError."""

    def __init__(self, client: Any, known_as: str, look: str) -> None:
        self.known_as, self.look = known_as, look
        self._client = client

    def last(self) -> int | None:
        newest = self._client.get_run(self.known_as).data.metrics.get(PROGRESS)
        if newest is None:
            return -1
        return int(newest)

    def rewind(self, iteration: int) -> None:
        raise NotImplementedError("MLflow takes no point back")

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        waiting: list[Any] = []
        for point in points:
            moment = int(1000 * point.time)
            values = dict(point.values)
            if point.has_step:
                values[PROGRESS] = float(point.iteration)
            if len(waiting) + len(values) > MOST_METRICS:
                self._client.log_batch(self.known_as, metrics=waiting)
                waiting = []
            waiting += [
                Metric(_named(name), value, moment, point.iteration)
                for name, value in values.items()
            ]
        self._client.log_batch(self.known_as, metrics=waiting)

    def close(self) -> None:
        self._client.set_terminated(self.known_as)


def _named(name: str) -> str:
    """A name that MLflow takes: letters, digits, `_-. /`."""
    kept = [letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name]
    return "".join(kept)
