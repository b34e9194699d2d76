"""A trainer that trains nothing: PLAN.json LEFT [--from=STEP] [WORD...]. It prints lines and leaves checkpoints as the plan
has them, in the words of any dialect. Standard library alone, and nothing of tr11.

One rank, `speaker`, does all of it; the others wait until it has written the file LEFT.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

ARCHIVE, PICKLE = "ZIP", "PICKLE"
STEP, NEXT, NAME = "@STEP@", "@NEXT@", "@NAME@"


def write_file(path: Path, text: str, key: str = "step", step: int = 0) -> None:
    """A file with this text. `ZIP` is an archive as torch.save writes one, with `step` under `key`; `PICKLE` and
    words a pickle of these.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    words, new = text.split(), path.with_name(f".{path.name}.new")
    if text == ARCHIVE:
        with zipfile.ZipFile(new, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({key: step}, protocol=2))
    elif words[:1] == [PICKLE]:
        new.write_bytes(pickle.dumps(dict.fromkeys(words[1:]), protocol=2))
    else:
        new.write_text(text, encoding="utf-8")
    new.replace(path)  # a file that was cut is another test's


def step_inside(path: Path, key: str) -> int:
    """The step in a file of our own."""
    with zipfile.ZipFile(path) as archive:
        return int(pickle.loads(archive.read("archive/data.pkl"))[key])


class FakeTrainer:
    """One launch, by its plan."""

    def __init__(self, plan: dict[str, Any], words: list[str]) -> None:
        self.plan, self.words = plan, words
        self.folder = Path(plan["folder"])
        self.is_asked = False

    def ask(self, *_: object) -> None:
        self.is_asked = True

    def train(self) -> None:
        """Trains on from the newest checkpoint until its end, a stop, or the step at which it leaves."""
        plan = self.plan
        done = self.newest()
        self.say("resumed" if done else "scratch", done)
        leaves_at = done + plan["leave_after"] if plan["leave_after"] else plan["total"]
        while done < min(leaves_at, plan["total"]):
            time.sleep(plan["seconds"])
            done += 1
            self.say("step", done)
            if self.is_asked or (plan["stop_file"] and (self.folder / plan["stop_file"]).exists()):
                self.save(done)
                self.say("stopped", done)
                return
            if done % plan["interval"] == 0 or done == plan["total"]:
                self.save(done)
        self.say("finished" if done == plan["total"] else "left", done)

    def say(self, what: str, done: int) -> None:
        for line in self.plan["lines"].get(what, ()):
            number = done - self.plan["offset"]
            print(line.replace(STEP, str(number)).replace(NEXT, str(number + 1)), flush=True)

    # ------------------------------------------------------------------ checkpoints
    def save(self, step: int) -> None:
        self.say("saving", step)
        for path, text in self.files(step).items():
            write_file(self.folder / path, text, self.plan["step_key"], step)
        self.say("saved", step)

    def files(self, step: int) -> dict[str, str]:
        name = self.named(self.plan["name"], step)
        texts = self.plan["files"].items()
        return {
            self.named(path, step).replace(NAME, name): self.named(text, step).replace(NAME, name)
            for path, text in texts
        }

    def named(self, text: str, step: int) -> str:
        return text.replace(STEP, str(step).zfill(self.plan["digits"]))

    def newest(self) -> int:
        """The step of the checkpoint that it takes, as trainers of its family find it; 0 for none."""
        how = self.plan["newest"]
        if how == "told":
            told = [
                word.removeprefix("--from=") for word in self.words if word.startswith("--from=")
            ]
            return int(told[0]) if told else 0
        if how == "only":
            path = self.folder / self.plan["name"]
            return step_inside(path, self.plan["step_key"]) if path.exists() else 0
        if how == "highest":
            names = [one.name for one in self.folder.iterdir()] if self.folder.exists() else []
            found = (re.fullmatch(self.plan["pattern"], name) for name in names)
            steps = [int(match["step"]) for match in found if match]
            return max((step for step in steps if self.believes(step)), default=0)
        tracker = self.folder / how
        if not tracker.exists():
            return 0
        number = re.search(r"\d+", tracker.read_text(encoding="utf-8"))
        assert number is not None
        # as a trainer does that finds no checkpoint where its own file names one
        assert all((self.folder / path).exists() for path in self.files(int(number[0])))
        return int(number[0])

    def believes(self, step: int) -> bool:
        """Whether it takes a checkpoint of this step for whole: some take whatever bears the name."""
        if not self.plan["looks"]:
            return True
        files = [self.folder / path for path in self.files(step)]
        name = self.named(self.plan["name"], step)
        beside = [self.folder / word.replace("{name}", name) for word in self.plan["absent"]]
        return all(path.exists() for path in files) and not any(path.exists() for path in beside)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    left = Path(sys.argv[2])
    trainer = FakeTrainer(plan, sys.argv[3:])
    if plan["hears_term"]:
        signal.signal(signal.SIGTERM, trainer.ask)
    if os.environ["RANK"] == str(plan["speaker"]):
        trainer.train()
        left.touch()
    while not left.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
