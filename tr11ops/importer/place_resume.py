"""What makes a script's training go on from its newest checkpoint: the words of its command, those that
its family adds, or the program itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.family import WordUse, last_use, uses_of
from tr11ops.importer.options import LeftReason
from tr11ops.importer.place_settings import CommandSettings, card_word
from tr11ops.importer.traced import Traced
from tr11ops.trainers.resuming import Knows, knows_words

_RESUME_UNKNOWN = (
    "what makes it go on from its newest checkpoint is not known: give --set trainer.resume=..., "
    "or =[] where it does so by itself"
)


def place_resume(files: CommandSettings) -> None:
    """What the command says of resuming goes from it into `first` and `resume`."""
    dialect = files.dialect
    found = list(uses_of(files.words, dialect.command.resume))
    for use in reversed(found):
        del files.words[use.place : use.place + use.count]
    first = [word for use in found for word in use.option.words if not _is_resume(files, use)]
    line = found[0].option.line if found else files.training.line
    if first or (dialect.first and not found):
        note = "" if first else "the command says nothing of where to begin"
        texts = [_safe_word(files, word) for word in first]
        files.builder.put("trainer.first", texts, "the command", line, note=note)
    tool = next((one for one in dialect.command.tools if re.search(one.sign, files.text)), None)
    has_own_words = last_use(files.words, dialect.command.folder) is not None
    takes_words = files.own is not None and not files.own.content.get("strict")
    if tool is not None and takes_words and not _is_passed_on(files.words):
        assert files.own is not None
        name = files.own.name
        note = f"beside {name}, of which the command's words go first"
        files.builder.put("trainer.resume", list(tool.resume), "the program", line, note=note)
        return
    if dialect.resume and files.own is not None and not has_own_words:
        file = files.own.name[:60]
        option = dialect.resume[0]
        why = f"its settings are in {file}: whether it takes {option} beside them is not known"
        files.builder.ask("resume", "", line=line, why=why, key="trainer.resume")
        return
    if dialect.resume:
        _place_added_words(files, bool(found), line)
        return
    if found:
        option = found[-1].option.spelled
        files.builder.put("trainer.resume", [option, "{path}"], option, line)
        return
    by_itself = dialect.command.resumes_if
    if by_itself and re.search(by_itself, files.text):
        return
    why = _RESUME_UNKNOWN
    files.builder.ask("resume", "", line=line, why=why, key="trainer.resume")


def _place_added_words(files: CommandSettings, is_used: bool, line: int) -> None:
    """The words of the family that a resume adds, unless the script shows that it needs none.
    `is_used`: the command has had them.
    """
    dialect = files.dialect
    key = "trainer.resume"
    words = list(dialect.resume)
    script = next((word for word in files.words if word.text.endswith(".py")), Traced())
    knows: Knows = "yes"
    if not is_used:
        knows = knows_words(_script_text(files, script), words)
    name = script.text or "the program"
    if knows == "by itself":
        note = f"a resume adds nothing, as it finds its newest checkpoint itself and knows no {words[0]}"
        files.builder.put(key, [], name, line, note=note)
        return
    if knows == "no":
        why = (
            f"{name} knows no {words[0]}, which {dialect.name} is given to go on: {_RESUME_UNKNOWN}"
        )
        files.builder.ask("resume", "", line=line, why=why, key=key)
        return
    note = "added where there is a checkpoint to go on from; [] where the script finds it itself"
    files.builder.put(key, words, "", line, note=note)
    if knows == "not known":
        why = (
            f"whether {name} takes {words[0]}, which each resume adds, is not known: "
            "--set trainer.resume=[] where it finds its newest checkpoint itself"
        )
        files.builder.leave("resume", "", line, reason=LeftReason.UNKNOWN, why=why, key=key)


def _script_text(files: CommandSettings, script: Traced) -> str | None:
    """None where it is not at hand, or is no text."""
    try:
        if script:
            return files.text_at(script.text)
        return None
    except ConversionProblem:
        return None


def _is_resume(files: CommandSettings, use: WordUse) -> bool:
    """Whether these words already say to go on from its own checkpoints."""
    dialect = files.dialect
    words = [word.text for word in use.option.words]
    folder = files.builder.value("trainer.folder", "")
    value = use.value.text
    if not value or value.lower() in {"true", "auto", "last", "latest", "{folder}"}:
        return True
    own = files.builder.placed.get("trainer.folder")
    if folder and own is not None:
        said = last_use(files.training.program, dialect.command.folder)
        if said is not None and value.startswith(said.value.text.rstrip("/")):
            return True
    return "=".join(words) in {" ".join(dialect.resume), "=".join(dialect.resume)}


def _safe_word(files: CommandSettings, word: Traced) -> str:
    try:
        return card_word(word)
    except ConversionProblem as problem:
        files.builder.ask(
            "first", word.for_shell(), line=word.line, why=str(problem), key="trainer.first"
        )
        return word.for_card()


def _is_passed_on(words: Sequence[Traced]) -> bool:
    """Whether what is added at the end of a command would be another program's: it holds `--`."""
    return any(word.text == "--" for word in words)
