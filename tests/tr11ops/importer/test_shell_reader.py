"""The shell reader against bash itself, on generated scripts of the subset it claims; and bounds on
hostile text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tr11ops.base.errors import ArithmeticProblem, ScriptError
from tr11ops.importer.expansion import evaluate
from tr11ops.importer.reader import read_shell
from tr11ops.importer.traced import Traced

BASH = shutil.which("bash") or "bash"
NAMES = ("A", "B", "C", "D")
SLOW = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

# No globs, braces or tildes: those the reader leaves as they stand, and says so in docs/how-to/import.md.
PLAIN = st.text("abcxyz019_./:-+,%@=", min_size=1, max_size=6)
QUOTED = st.text("abc019 _./:-#;|&()<>'", max_size=8)


def expansion(in_quotes: bool) -> st.SearchStrategy[str]:
    """One `$...` of the subset."""
    name = st.sampled_from(NAMES)
    default = st.text("abc019 _./:-#;", max_size=6) if in_quotes else PLAIN
    return st.one_of(
        name.map("${}/".format),  # a letter behind it would be of the name
        name.map("${{{}}}".format),
        st.builds("${{{}:-{}}}".format, name, default),
        st.builds("${{{}-{}}}".format, name, default),
        st.builds("${{{}:+{}}}".format, name, default),
        st.builds("${{E:-{}}}".format, default),
        st.builds(
            "$(({} {} {}))".format, st.integers(0, 99), st.sampled_from("+-*"), st.integers(0, 99)
        ),
        st.just("$((N * 2 + ${M}))"),
    )


INSIDE = st.lists(
    st.one_of(
        QUOTED,
        expansion(True),
        st.sampled_from(['\\"', "\\\\", "\\$", "\\`", "\\\n", "\\q", "\n", "\t"]),
    ),
    max_size=5,
).map("".join)
WORD = st.lists(
    st.one_of(
        PLAIN,
        expansion(False),
        INSIDE.map('"{}"'.format),
        QUOTED.map(lambda text: "'" + text.replace("'", "") + "'"),
        st.sampled_from(["\\ ", "\\$", "\\;", "$'a\\tb'", "\\\n"]),
    ),
    min_size=1,
    max_size=4,
).map("".join)
STATEMENT = st.one_of(
    st.builds("{}={}".format, st.sampled_from(NAMES), WORD),
    st.builds("export {}={}".format, st.sampled_from(NAMES), WORD),
    st.builds("{}+={}".format, st.sampled_from(NAMES), WORD),
    st.builds("LIST=({} {} {})".format, WORD, WORD, PLAIN),
    st.builds('{}="${{LIST[*]}}"'.format, st.sampled_from(NAMES)),
    st.builds("{}=${{LIST[1]}}".format, st.sampled_from(NAMES)),
    st.builds("LIST+=({})".format, WORD),
    st.builds("{}={} # a remark with 'quotes".format, st.sampled_from(NAMES), WORD),
    st.builds("read -r -d '' {} <<EOT\n{}\nEOT".format, st.sampled_from(NAMES), QUOTED),
    st.builds("unset E; {}=${{E:-x}}".format, st.sampled_from(NAMES)),
)
PROBE = st.lists(
    st.one_of(WORD, st.just('"${LIST[@]}"'), st.just("${LIST[@]}"), st.just("$A"), st.just('"$B"')),
    min_size=1,
    max_size=4,
)


@SLOW
@given(st.lists(STATEMENT, max_size=6), PROBE)
def test_the_reader_expands_as_bash_does(statements: list[str], probe: list[str]) -> None:
    start = ["A=one", "B='two  three'", "C=", "D=/d/e", "N=7", "M=3", "LIST=(p 'q r')"]
    body = "\n".join([*start, *statements, "probe " + " ".join(probe)])
    shell = "probe() { printf '%s\\0' \"$@\"; }\nset -f\n" + body
    done = subprocess.run(
        [BASH, "--norc", "-c", shell],
        capture_output=True,
        env={"PATH": os.environ["PATH"]},
        check=False,
    )
    assert done.stderr == b"", done.stderr
    words = read_shell(body).commands[-1].words
    assert words[0].text == "probe"
    # printf prints one empty record when it is given nothing
    expected = done.stdout.decode().split("\0")[:-1]
    assert [word.text for word in words[1:]] == expected or (len(words) == 1 and expected == [""])
    assert all(word.is_known for word in words)


NUMBER = st.one_of(st.integers(0, 9), st.integers(0, 2**40), st.sampled_from([2**63 - 1])).map(str)
EXPRESSION = st.recursive(
    st.one_of(NUMBER, st.integers(1, 63).map(hex), st.integers(1, 63).map("0{:o}".format)),
    lambda inner: st.one_of(
        st.builds(
            "{} {} {}".format,
            inner,
            st.sampled_from(
                [
                    "+",
                    "-",
                    "*",
                    "/",
                    "%",
                    "<",
                    "<=",
                    ">",
                    ">=",
                    "==",
                    "!=",
                    "&&",
                    "||",
                    "&",
                    "|",
                    "^",
                    "<<",
                    ">>",
                ]
            ),
            inner,
        ),
        st.builds("({})".format, inner),
        st.builds("({}) ** {}".format, inner, st.integers(0, 5)),
        st.builds("- {}".format, inner),
        st.builds("! {}".format, inner),
        st.builds("~{}".format, inner),
        st.builds("{} ? {} : {}".format, inner, inner, inner),
    ),
    max_leaves=8,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(st.lists(EXPRESSION, min_size=20, max_size=40))
def test_arithmetic_is_bash_s(expressions: list[str]) -> None:
    shell = "\n".join(f"( echo $(( {text} )) ) 2>/dev/null || echo refused" for text in expressions)
    done = subprocess.run(
        [BASH, "--norc", "-c", shell], capture_output=True, text=True, check=False
    )
    for text, expected in zip(expressions, done.stdout.splitlines(), strict=True):
        try:
            found = str(evaluate(text))
        except ArithmeticProblem:
            # what is refused here but computed there: shifts outside 0..63, and what the untaken
            # side divides by zero
            assert expected == "refused" or any(sign in text for sign in ("<<", ">>", "/", "%")), (
                text
            )
        else:
            assert found == expected, text


# ----------------------------------------------------------------------------- what it keeps
def test_what_no_one_sets_stays_unknown_and_keeps_its_name() -> None:
    word = read_shell("OUT=$SCRATCH/x\nuse $OUT/${NAME}y '$NOT' \"\\$NOR\"").commands[-1].words
    assert word[1].unknowns == ("${SCRATCH}", "${NAME}")
    assert word[1].for_card() == "$SCRATCH/x/${NAME}y"
    assert word[2].text == "$NOT" and word[2].is_known and word[2].for_card() == "$$NOT"
    assert word[3].for_card() == "$$NOR"


def test_lines_are_those_of_the_characters() -> None:
    words = read_shell('A=1\nB="x \\\n  --one $A \\\n  --two"\nrun $B').commands[-1].words
    assert [(word.text, word.line) for word in words] == [
        ("run", 5),
        ("x", 2),
        ("--one", 3),
        ("1", 1),
        ("--two", 4),
    ]


def test_nested_quotes_survive_a_second_shell() -> None:
    text = """X=" --m 'type:a|b' --n 2"\nsrun bash -c "go --rank \\$SLURM_PROCID $X" 2>&1 | tee -a log"""
    script = read_shell(text)
    inner = script.commands[1]
    assert [word.text for word in inner.words] == [
        "go",
        "--rank",
        "${SLURM_PROCID}",
        "--m",
        "type:a|b",
        "--n",
        "2",
    ]
    assert script.commands[0].piped_into == ("tee",) and inner.outer == script.commands[0].words


def test_here_documents_and_written_files() -> None:
    text = "M=4\ncat <<EOT > $F\n{\"a\": $M}\nEOT\ncat > 'g' <<'END'\n$M\nEND\necho \"x $M\" >> h\ncat <<-E > i\n\t\ttabs\n\tE\n"
    files = read_shell(text).files
    assert [(file.path.text, file.content.text) for file in files] == [
        ("${F}", '{"a": 4}\n'), ("g", "$M\n"), ("h", "x 4"), ("i", "tabs\n"),
    ]  # fmt: skip
    assert files[0].content.line == 3


def test_conditions_are_not_decided() -> None:
    script = read_shell(
        "A=1\nif test x; then A=2; B=3; fi\n[ -n x ] && A=4\nfor i in 1 2; do A=5; done\nuse $A $B"
    )
    assert [word.text for word in script.commands[-1].words] == ["use", "1", "3"]
    assert [(item.name, item.applied) for item in script.assignments if item.conditional] == [
        ("A", False), ("B", True), ("A", False), ("A", False),
    ]  # fmt: skip


def test_one_branch_of_a_condition_gives_a_value() -> None:
    """Both branches' options were taken one after the other, and the second's silently won."""
    text = "A=(x)\nif test y; then A+=(--one); B=1; elif test z; then A+=(--two); else A+=(--three); B=2; fi\nuse ${A[@]} $B"
    script = read_shell(text)
    assert [word.text for word in script.commands[-1].words] == ["use", "x", "--one", "1"]
    case = "case $1 in\n a) A+=one;;\n b) A+=two;;\nesac\nif test y; then A+=3; A+=4; fi\nuse $A"
    assert [word.text for word in read_shell(case).commands[-1].words] == ["use", "one34"]


def test_functions_and_what_follows_an_exit_are_not_run() -> None:
    script = read_shell("A=1\nf() {\n A=2\n}\nuse $A\nexit 0\nuse never\n")
    assert [
        [word.text for word in command.words]
        for command in script.commands
        if command.name == "use"
    ] == [["use", "1"]]


def test_commands_inside_values_are_kept_as_text_and_told() -> None:
    script = read_shell("A=$(date +%s)\nB=`hostname`\nC=${A%x}\nuse $A $B $C")
    assert [word.unknowns for word in script.commands[-1].words[1:]] == [
        ("$(date +%s)",),
        ("`hostname`",),
        ("${A%x}",),
    ]
    assert set(script.variables.unread) == {("$(date +%s)", 1), ("`hostname`", 2), ("${A%x}", 3)}


def test_options_of_the_shell() -> None:
    assert read_shell("set -x -e").shell_options == {"errexit"}
    assert read_shell("set -euo pipefail").shell_options == {"errexit", "pipefail"}
    assert read_shell("set -o errexit -o pipefail").shell_options == {"errexit", "pipefail"}


# ----------------------------------------------------------------------------- hostile text
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=x\n" + "A=$A$A\n" * 64, "beyond all measure"),
        (
            "A=x\n"
            + "".join(f"A{i + 1}=$A{i}$A{i}$A{i}$A{i}\n" for i in range(40)).replace("$A0", "$A"),
            "beyond all measure",
        ),
        ("A=" + "${B:-" * 5000 + "x" + "}" * 5000, "nested too deeply"),
        ('A="' + '${B:-"' * 500, "nested too deeply"),
        ("A=(" * 100, "nested too deeply"),
        ("cat <<EOT > f\n{}\n", "line 1: the here-document that should end with 'EOT' has no end"),
        ("A=1\nB='x\n", "line 2: a single quote is not closed"),
        ('\n\nA="x\n', "line 3: a quote"),
        ("A=$(x", "line 1: a command substitution is not closed"),
        ("A=`x", "line 1: a backquote is not closed"),
        ("A=${x", "line 1: a quote or brace"),
        ("A=(x\n", "line 1: the list is not closed"),
        ("true\n" * 6000, "has more than 5000 commands"),
        ("eval eval eval eval eval eval x", "shells are nested too deeply"),
        ("f() " * 5000, "nested too deeply"),
        ("{ " * 5000, "nested too deeply"),
    ],
)
def test_hostile_text_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ScriptError) as caught:
        read_shell(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_shells_inside_shells_end() -> None:
    text = "true"
    for _ in range(8):
        text = "bash -c " + "'" + text.replace("'", "'\\''") + "'"
    with pytest.raises(ScriptError, match="shells are nested too deeply"):
        read_shell(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("aA=$(){}[]'\"`\\\n \t;&|<>#-+*/0123:@!?%~,.", max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        script = read_shell(text)
    except ScriptError as error:
        assert "\n" not in str(error)
    else:
        lines = text.count("\n") + 1
        assert all(1 <= command.line <= lines for command in script.commands)


def test_a_long_ordinary_script_is_read() -> None:
    text = "".join(
        f'V{i}="--option-{i} {i} \\\n   --other $V{i - 1}"\n'.replace("$V-1", "")
        if i % 50
        else f"V{i}=x\n"
        for i in range(2000)
    )
    assert len(read_shell(text).assignments) == 2000


def test_traced_text_keeps_its_parts() -> None:
    text = Traced.join(
        [Traced.of("a$", 1), Traced.of("${X}", 2, unknown=True), Traced.of("b", 3)], " "
    )
    assert text.text == "a$ ${X} b" and (text.line, text.last_line) == (1, 3)
    assert text.unknowns == ("${X}",) and text.for_card() == "a$$ $X b"


# ----------------------------------------------------------------------------- conditions
def used(text: str) -> list[str]:
    """The words of `use`, as a shell that runs the text would give them."""
    (command,) = [one for one in read_shell(text).commands if one.name == "use"]
    return [word.text for word in command.words[1:]]


LADDER = (
    "SIZE={size}\nif   [[ ${{SIZE}} == 7 ]]; then WIDE=4096; LAYERS=36\n"
    "elif [[ ${{SIZE}} == 52 ]]; then WIDE=8192; LAYERS=64\nelse WIDE=1\nfi\nuse $WIDE ${{LAYERS:-none}}"
)


@pytest.mark.parametrize(
    ("size", "expected"), [("7", ["4096", "36"]), ("52", ["8192", "64"]), ("9", ["1", "none"])]
)
def test_a_condition_of_the_script_s_own_values_is_decided(size: str, expected: list[str]) -> None:
    """The first branch's model was taken, whatever SIZE was."""
    text = LADDER.format(size=size)
    assert used(text) == expected
    done = subprocess.run(
        ["bash", "-c", f"use() {{ echo $*; }}\n{text}"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == expected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$A" = "true" ]', True),
        ('[[ "$A" != true ]]', False),
        ("[[ ! $A == true ]]", False),
        ("[ $N -gt 1 ]", True),
        ("[[ $N -le 1 ]]", False),
        ("test $N -eq 4", True),
        ('[[ -z "$A" ]]', False),
        ('[ -n "$E" ]', False),
        ("[ -n $E ]", True),
        ("[ -z $E ]", True),
        ("[[ -n $E ]]", False),
        ("[[ $A ]]", True),
    ],
)
def test_what_is_compared(condition: str, holds: bool) -> None:
    text = f"A=true\nN=$((2 * 2))\nE=\nB=(no)\nif {condition}; then B+=(yes); else B+=(other); fi\n"
    assert used(text + "use ${B[@]}") == ["no", "yes" if holds else "other"]
    script = read_shell(text)
    assert not any(one.conditional for one in script.assignments)


@pytest.mark.parametrize(
    "text",
    [
        "use x 2>&1 | tee log",
        "f() { use x; }\nf 2>&1 | tee log",
        "f() { use x; }\ng() { f; }\nif true; then g; fi | tee -a log",
        "{ echo a; use x; } |& tee log",
        "(use x) | tee log",
        "for i in 1; do use x; done 2>&1 | tee log",
        "bash -c 'use x' | tee log",
    ],
)
def test_a_pipe_behind_anything_is_the_command_s(text: str) -> None:
    """The exit status of what it holds is lost as that of a command alone is."""
    found = {one.piped_into for one in read_shell(f"{text}\nuse y").commands if one.name == "use"}
    assert found == {("tee",), ()}


@pytest.mark.parametrize(
    "text",
    [
        'A=${A:-}\nif [ -z "$A" ]; then B=1; exit 1; fi\nuse x',  # of the environment
        "if [ $1 = x ]; then B=1; fi\nuse x",
        "A=$(date)\nif [ $A = x ]; then B=1; fi\nuse x",
        "if test y; then A=1; fi\nif [ $A = 2 ]; then B=1; fi\nuse x",  # of another condition
        "A=1\nfor i in 1 2; do if [ $A = 2 ]; then B=1; fi; A=2; done\nuse x",
        "A=1\nif [ $A = 2 ] || grep -q x y; then B=1; fi\nuse x",
        "A=ab\nif [[ $A == a* ]]; then B=1; fi\nuse x",
        "A=1\nif [[ -d $A ]]; then B=1; fi\nuse x",
        "A=1\nread A < f\nif [ $A = 2 ]; then B=1; fi\nuse x",
        "if test y; then A=2; fi\nif (( A == 2 )); then B=1; fi\nuse x",
        "A=1\nif [ $A = 1 ] && test y; then B=1; fi\nuse x",
        "A=ab\ncase $A in [a-c]b) B=1;; esac\nuse x",
        "A=ab\ncase $A in @(ab|c)) B=1;; esac\nuse x",
        "A=ab\ncase $A in $C) B=1;; esac\nuse x",
        "case $C in a) B=1;; esac\nuse x",
        "A=1\nf() { if test y; then return; fi; B=1; }\nf\nuse x",
        "A=1\nif test y; then f() { A=2; }; fi\nf\nif [ $A = 2 ]; then B=1; fi\nuse x",
        "A=1\nprintf -v A 2\nif [ $A = 2 ]; then B=1; fi\nuse x",
        "A=1\nfor A in 2; do :; done\nif [ $A = 2 ]; then B=1; fi\nuse x",
    ],
)
def test_any_other_condition_stays_open(text: str) -> None:
    script = read_shell(text)
    assert [(one.name, one.conditional) for one in script.assignments if one.name == "B"] == [
        ("B", True)
    ]
    assert used(text) == ["x"]


def test_conditions_in_conditions_and_what_an_open_one_leaves_open() -> None:
    inner = (
        "if [ $A = 1 ]; then if [ $B = 1 ]; then C=both; else C=one; fi; else C=none; fi\nuse $C"
    )
    assert used(f"A=1\nB=1\n{inner}") == ["both"]
    assert used(f"A=1\nB=2\n{inner}") == ["one"]
    assert used(f"A=2\nB=1\n{inner}") == ["none"]
    # what a shell takes is not known: the first that may be is kept, and told
    script = read_shell(f"A=1\n{inner}")
    assert [one.value.text for one in script.assignments if one.name == "C"] == ["both", "one"]
    after = "A=1\nif test y; then C=0; elif [ $A = 1 ]; then C=1; else C=2; fi\nuse $C"
    assert [(one.value.text, one.applied) for one in read_shell(after).assignments][1:] == [
        ("0", True), ("1", False), ("2", False),
    ]  # fmt: skip


@pytest.mark.parametrize("default", ["<Specify path>", "<Specify path>_text_document", "/x/<path>"])
def test_a_placeholder_for_what_is_not_given_is_one_value(default: str) -> None:
    """It fell apart at its blank, and the rest was a word that belongs to no option."""
    command = read_shell(f"A=${{A:-{default}}}\nuse --save $A --split 1").commands[-1]
    assert [word.text for word in command.words] == ["use", "--save", default, "--split", "1"]
    assert not command.words[2].is_known


# ----------------------------------------------------------------------------- control flow
COMPARED = st.one_of(
    st.builds("[ ${} {} {} ]".format, st.sampled_from("AB"), st.sampled_from(["=", "!=", "-gt"]), st.integers(0, 3)),
    st.builds("[[ ${} == {} ]]".format, st.sampled_from("AB"), st.integers(0, 3)),
    st.builds("[[ $A == {} {} $B != {} ]]".format, st.integers(0, 3), st.sampled_from(["&&", "||"]), st.integers(0, 3)),
    st.builds("(( {} {} {} ))".format, st.sampled_from("AB"), st.sampled_from(["<", ">=", "=="]), st.integers(0, 3)),
    st.builds("! [ $A = {} ]".format, st.integers(0, 3)),
    st.just("true"),
    st.just("false"),
)  # fmt: skip
CHANGED = st.one_of(
    st.builds("{}={}".format, st.sampled_from("AB"), st.integers(0, 3)),
    st.builds("(( {} {} {} ))".format, st.sampled_from("AB"), st.sampled_from(["=", "+=", "*="]), st.integers(0, 3)),
    st.sampled_from(["((A++))", "(( ++B ))", "let A=B+1", 'let "B = A * 2" A=1', "f", "g 2", "B=$A", "A=${B}0"]),
)  # fmt: skip
FLOW = st.recursive(
    CHANGED,
    lambda inner: st.one_of(
        st.builds("{} && {}".format, COMPARED, inner),
        st.builds("{} || {}".format, COMPARED, inner),
        st.builds("if {}; then {}; else\n{}\nfi".format, COMPARED, inner, inner),
        st.builds("if {}; then {}; elif {}; then {}; fi".format, COMPARED, inner, COMPARED, inner),
        st.builds("case $A in\n0|1) {};;\n(2*) {} ;;\n*) {}\nesac".format, inner, inner, inner),
        st.builds('case "$B" in "1") {};; ??*) {};; esac'.format, inner, inner),
        st.builds("{{ {}; {}; }}".format, inner, inner),
        st.builds("( {}\n {} )".format, inner, inner),
        st.builds("{}\n{}".format, inner, inner),
    ),
    max_leaves=8,
)


@SLOW
@given(FLOW, FLOW, FLOW)
def test_the_way_through_a_script_is_bash_s(first: str, second: str, body: str) -> None:
    """What is decided is decided as bash decides it; functions count where they are called."""
    body = body.replace("f\n", ":\n").replace("f;", ":;").replace("g 2", "B=$1")
    body = re.sub(r"\bf\b(?!i)", "true", body)
    text = (
        f"A=1; B=2\nf() {{ local B=3; {body}\n}}\nfunction g {{\n A=$1; [ $A = 3 ] && return\n B=$#x$A\n}}\n"
        f"function never() {{ A=9; B=9; }}\n{first}\n{second}\nuse $A $B"
    ).replace("$#x", "")
    shell = f"use() {{ echo $*; }}\n{text}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert used(text) == done.stdout.split(), text


def test_what_a_function_sets_counts_where_it_is_called() -> None:
    """One that nothing calls had its values taken."""
    body = "{\n A=2\n B=1\n}\nuse $A ${B:-none}"
    for head in ("f()", "function f", "function f()", "f ()\n"):
        assert used(f"A=1\n{head} {body}") == ["1", "none"]
        assert used(f"A=1\n{head} {body.replace('use', 'f; use')}") == ["2", "1"]
    assert used('f() { use "$@" $2; }\nf --one "a b"') == ["--one", "a b", "a", "b"]
    assert used("f() { shift; use $1; }\nf x y") == ["${1}"]
    assert used("f() { f; }\nf\nuse x") == ["x"]


def test_a_shell_of_its_own_changes_nothing_outside() -> None:
    assert used("A=1\n(A=2; B=3)\necho x | read A\nbash -c 'A=4'\nuse $A ${B:-none}") == [
        "1",
        "none",
    ]
    assert used("A=1\neval 'A=2'\nuse $A") == ["2"]


def test_a_here_document_is_a_shell_s_text() -> None:
    assert used("export A=1\nbash -s x y <<'END'\nuse $A\nEND") == ["1"]
    assert used("A=1\nssh host bash <<END\nuse $A '$A'\nEND") == ["1", "1"]
    assert not [
        one for one in read_shell("bash run.sh <<E\nuse x\nE").commands if one.name == "use"
    ]


def test_what_a_command_or_a_loop_gives_is_not_known() -> None:
    """The value before it was taken."""
    assert used("A=1\nread A < f\nuse $A") == ["${A}"]
    assert used("A=1\nfor A in 2 3; do :; done\nuse $A") == ["${A}"]
    assert used("A=1\n(( A = $(date) ))\nuse $A") == ["${A}"]
    assert used("A=1\n(( A = B + 1 ))\nlet C=B\nuse $A $C") == ["$((B + 1))", "$((B))"]
    assert used("FLAG=1\nA=0\nif (( FLAG )); then A=2; fi\nuse $FLAG $A") == ["1", "2"]
    # a word of a text is no name
    assert used("A=1\nprintf 'with A %s' A\nuse $A") == ["1"]
    assert used("A=1\nread -p 'which A' B\nuse $A") == ["1"]
    assert used("A=1\nprintf -v A x\nuse $A") == ["${A}"]


def test_two_parentheses_are_two_shells_where_bash_takes_them_so() -> None:
    assert used("A=1\n((A=2); (use $A x))") == ["1", "x"]


def test_a_sourced_file_is_read_where_it_is_at_hand() -> None:
    files = {
        "env.sh": "A=1\nif [ $A = 1 ]; then return; fi\nA=2\n",
        "own.sh": ". own.sh\nB=$A",
        "bad.sh": "'",
    }
    text = "source env.sh\n. own.sh\n[ -f x ] && source bad.sh\n\nsource $C\nuse $A $B"
    script = read_shell(text, file_at=lambda path: files.get(path.text))
    assert [word.text for word in script.commands[-1].words] == ["use", "1", "1"]
    assert script.not_read == [("own.sh", 2), ("bad.sh", 3), ("${C}", 5)]
    assert {one.line for one in script.assignments} == {1, 2}
