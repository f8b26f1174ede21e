"""Launch scripts are read as a shell would read them, and nothing in them is run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.shell_script import read_script


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a b", ["run", "a", "b"]),
        ("run a \\\n    b \\\n    c", ["run", "a", "b", "c"]),
        ("run a\\\nb", ["run", "ab"]),
        ("run 'a b' \"c d\" e\\ f", ["run", "a b", "c d", "e f"]),
        ("run '' \"\"", ["run", "", ""]),
        ("# no\nrun a # b\n", ["run", "a"]),
        ("run a#b '#c'", ["run", "a#b", "#c"]),
        ("X=1\nrun a=$X b=${X}2 'c=$X' \"d=$X\"", ["run", "a=1", "b=12", "c=$X", "d=1"]),
        ("X=${X:-y}\nrun $X", ["run", "y"]),
        ("X=${X:-${Y:-z}}\nrun $X", ["run", "z"]),
        ("run ${X:-a b}", ["run", "a", "b"]),
        ('run "${X:-a b}"', ["run", "a b"]),
        ("X=q\nrun ${X:+set} ${Y:+no}", ["run", "set"]),
        ("run ${X:=a}$X", ["run", "aa"]),
        ("X=a/b.sh\nrun ${X##*/} ${X%.sh} ${X%/*} ${X#*/}", ["run", "b.sh", "a/b", "a", "b.sh"]),
        ("X=AbAb\nrun ${X,,} ${X^^} ${X/b/c} ${X//b/c}", ["run", "abab", "ABAB", "AcAb", "AcAc"]),
        ("A=(x 'y z' \"$B\")\nrun \"${A[@]}\"", ["run", "x", "y z", ""]),
        ("A=(\n  a=1  # one\n  b=2\n)\nA+=(c=3)\nrun \"${A[@]}\" d", ["run", "a=1", "b=2", "c=3", "d"]),
        ("A=(x y z)\nrun ${A[1]} ${#A[@]} $A", ["run", "y", "3", "x"]),
        ("A=(x y)\nrun pre\"${A[@]}\"post", ["run", "prex", "ypost"]),
        ('run "$@"', ["run", "one", "two words"]),
        ('A=()\nrun "${A[@]}" x"${A[@]}" "${B:-}"', ["run", "x", ""]),
        ("run $1 ${2:-d} ${3:-d} $#", ["run", "one", "two", "words", "d", "2"]),
        ("a=1024\nb=$((a * 2 + 1))\nrun n=$((b / 2)) m=$(( (a+1) % 10 ))", ["run", "n=1024", "m=5"]),
        ("run $((-7 / 2)) $((-7 % 2)) $((7 / -2)) $((7 % -2))", ["run", "-3", "-1", "-3", "1"]),
        ("run logger='[\"console\",\"wandb\"]'", ["run", 'logger=["console","wandb"]']),
        ("run files=\"['$HOME/a', '$HOME/b']\"", ["run", "files=['~/a', '~/b']"]),
        ("run a 2>&1 | tee log.txt", ["run", "a"]),
        ("run a > out.txt 2>&1 &", ["run", "a"]),
        ("PYTHONUNBUFFERED=1 run a", ["run", "a"]),
        ("if [ -z \"$X\" ]; then X=b; fi\nrun $X", ["run", "b"]),
        ("X=q\nif [[ $X == r ]]; then Y=1; elif [[ $X == q ]]; then Y=2; else Y=3; fi\nrun $Y", ["run", "2"]),
        ("X=5\nif [ $X -gt 3 ] && [ $X -lt 9 ]; then Y=in; else Y=out; fi\nrun $Y", ["run", "in"]),
        ("if [ ! -n \"$X\" ]; then Y=no; fi\nrun $Y", ["run", "no"]),
        ("X=b\ncase $X in\n a) Y=1;;\n b|c) Y=2;;\n *) Y=3;;\nesac\nrun $Y", ["run", "2"]),
        ("if [ a = b ]; then\n if [ c = c ]; then X=1; fi\nelse\n X=2\nfi\nrun $X", ["run", "2"]),
        ("f() {\n  run $1 \"$@\"\n}\nf x y", ["run", "x", "x", "y"]),
        ("while true; do run loop; done\nrun after", ["run", "after"]),
        ("for i in 1 2; do\n  if [ $i = 1 ]; then X=loop; fi\n  Y=$i\ndone\nrun $X $Y", ["run", "loop", "1"]),
        ("for i in a; do run $i; done", ["run", "a"]),
        ("shift 1\nrun \"$@\"", ["run", "two words"]),
        ("shift 2\nrun a \"$@\"", ["run", "a"]),
        ("run \"${@:2}\" \"${@:3}\" end", ["run", "two words", "end"]),
        ("A=(x 'y z' w)\nB=abcde\nrun \"${A[@]:1:1}\" ${B:1:2} ${B: 3}", ["run", "y z", "bc", "de"]),
        ("A=()\nrun \"${A[@]/a/b}\" end", ["run", "end"]),
        ("cat <<-EOF\n\trun no\n\tEOF\nrun yes", ["run", "yes"]),
        ("cat <<'EOF' | tee a\nrun no\nEOF\nrun yes", ["run", "yes"]),
        ("cat <<EOF\nEOF\nrun yes", ["run", "yes"]),
        ("set -x\nrun a", ["run", "a"]),
        ("run a \\\n  b \\\n  # c \\\n  d", ["run", "a", "b"]),
        ("cat <<EOF\nrun no\nEOF\nrun yes", ["run", "yes"]),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(text: str, words: list[str], tmp_path: Path) -> None:
    script = read_script(text, ["one", "two words"])
    [found] = [command for command in script.commands if command[0] == "run"]
    assert found == words
    # A real shell says the same: `run` writes its arguments, and ~ stands for a home of that name.
    define = 'run() { printf "%s\\0" run "$@" >&9; }\n'
    if "loop" not in text:
        shell = tmp_path / "script.sh"
        shell.write_text(define + text + "\nwait\n")
        with (tmp_path / "out").open("wb") as out:
            subprocess.run(
                ["bash", "-c", 'exec 9>&1 >/dev/null 2>&1; . "$0" "$@"', str(shell), "one", "two words"],
                stdout=out, env={"HOME": "~", "PATH": "/usr/bin:/bin"}, check=False, cwd=tmp_path,
            )  # fmt: skip
        assert (tmp_path / "out").read_text().split("\0")[:-1] == words


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    script = read_script(f'X=$(touch {target})\nY=`touch {target}`\ntouch {target}\nrun $X "$Y"')
    assert not target.exists()
    assert script.commands[-1] == ["run", "$(touch", f"{target})", f"`touch {target}`"]
    assert any("is not run" in remark for remark in script.remarks)


def test_exports_and_what_was_not_understood_are_said() -> None:
    script = read_script("export A=1 B\nC=2\nexport C\nD=3 run ${!X} $Z\nwhile true; do x; done")
    assert script.exports == {"A": "1", "C": "2", "D": "3"}
    assert any("Z is not set in the script" in remark for remark in script.remarks)
    assert any("loop is skipped" in remark for remark in script.remarks)
    assert any("is not understood" in remark for remark in script.remarks)


def test_variables_can_be_given() -> None:
    assert read_script("run ${N:-1}", variables={"N": "4"}).commands == [["run", "4"]]
    assert read_script("N=$(count)\nrun $N", variables={"N": "4"}).commands == [["run", "4"]]
    assert read_script("N=2\nrun $N", variables={"N": "4"}).commands == [["run", "2"]]


def test_a_loop_is_taken_once_and_says_so() -> None:
    script = read_script("for seed in 1 2; do run $seed; done")
    assert script.commands == [["run", "1"]]
    assert script.remarks == ["a loop is taken once, with seed=1 alone of 1 2"]


@pytest.mark.parametrize(
    "text", ["f() { f; }\nf", "f() { g; }\ng() { f; }\nf", "echo $((9**9**9**9))", "echo $((2**99999999))"]
)
def test_what_would_not_end_ends(text: str) -> None:
    read_script(text)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab=$ {}()[]'\"\\\n#;&|<>`-:@+*/%!~1 \t", max_size=60))
def test_any_text_is_read_without_an_error(text: str) -> None:
    read_script(text)


WORDS = st.text(alphabet="abc =$'\"\\[]{},#;&|()~*", max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=5))
def test_what_is_quoted_for_a_shell_comes_back(words: list[str]) -> None:
    import shlex

    assert read_script(shlex.join(["run", *words])).commands == [["run", *words]]
