"""`nearflash hls new` and `check`: what a user sees of an optimizer that is right, wrong, or does not compile."""

import re

import pytest

from nearflash.abi.errors import CommandError
from nearflash.cli.main import main
from nearflash.sim.hls.build import build_shim
from nearflash.sim.hls.check import load_rule
from nearflash.sim.hls.new import new_rule
from nearflash.support import native
from nearflash.support.native import CompileError


@pytest.fixture
def heavy(tmp_path):
    """A fresh optimizer, `Heavy`, as `new` writes it."""
    new_rule("heavy", tmp_path)
    return tmp_path / "heavy.hpp"


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if new in line)


def check(path, capsys):
    code = main(["hls", "check", str(path), "--params", "4096"])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_what_new_writes_passes_the_check(heavy, capsys):
    code, text = check(heavy, capsys)
    assert code == 0 and "Heavy: 12 cases, 98,304 words compared, 0 mismatches" in text
    assert "nearflash hls check heavy.hpp" in (heavy.parent / "README.md").read_text()


def test_a_wrong_step_is_shown_by_element_in_hex(heavy, capsys):
    change(heavy, "c.momentum * s.m + g;", "c.momentum * s.m + (g + g * F(0));")
    code, text = check(heavy, capsys)
    assert code == 1
    found = re.search(r"parameter \d+: (p|m) is (\w{8}) \(.*\) in C\+\+ and (\w{8}) \(.*\) in Python", text)
    assert found is not None and found[2] != found[3]
    assert re.search(r"from g \w{8} \(.*\)  p \w{8} \(.*\)  m \w{8}", text)
    assert re.search(r"words compared, [1-9][\d,]* mismatches", text)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("c.momentum * s.m + g;", "c.momentun * s.m + g;", "no member named .momentun."),
    ("c.momentum * s.m + g;", "0.9 * s.m + g;", "no match for .operator\\*. .*double"),
    ("c.momentum * s.m + g;", "F(0.9) * s.m + g;", "use of deleted function"),
    ("struct Scalars {", "struct Scalar {", "Scalars"),
])  # fmt: skip
def test_a_struct_that_does_not_compile_is_shown_at_the_users_line(heavy, capsys, old, new, message):
    line = change(heavy, old, new)
    code, text = check(heavy, capsys)
    assert code == 2 and re.search(message, text), text
    shown = int(re.search(rf"{heavy}:(\d+)", text)[1])
    assert shown == line or "Scalars c" in heavy.read_text().splitlines()[shown - 1]


@pytest.mark.parametrize(("old", "new", "message"), [
    ("F p, m;", "double p, m;", "Heavy::State must hold F's alone"),
    ("F lr, momentum;", "F lr; int momentum;", "Heavy::Scalars must hold F's alone"),
    ("static State step", "State step", "non-static member function"),
    ("F g, Scalars c", "F g, F c", "Heavy::step must be static State step(State, F g, Scalars)"),
    ("F p, m;", "F p, m, a, b, c, d, e, f, g;", "Heavy::State must have 8 fields at most"),
])  # fmt: skip
def test_a_struct_of_another_shape_is_refused_where_it_is_declared(heavy, capsys, old, new, message):
    change(heavy, old, new)
    code, text = check(heavy, capsys)
    declared = heavy.read_text().splitlines().index("NEARFLASH_OPTIMIZER(Heavy);") + 1
    assert code == 2 and f"{heavy}:{declared}" in text and message in text, text


@pytest.mark.parametrize(("old", "new", "message"), [
    ("F lr, momentum;", "F lr, momentum, eps;", "fields of Scalars must be lr, momentum, as in the Python definition"),
    ("F p, m;", "F p, m, v;", "fields of State must be p, m, as in the Python definition"),
])  # fmt: skip
def test_names_that_python_does_not_have_are_shown_at_the_struct(heavy, capsys, old, new, message):
    line = change(heavy, old, new)
    code, text = check(heavy, capsys)
    assert code == 2 and f"{heavy}:{line - 1}: {message}" in text, text


def test_files_and_names_that_do_not_fit(heavy, tmp_path):
    with pytest.raises(CommandError, match="must not exist yet"):
        new_rule("heavy", tmp_path)
    with pytest.raises(CommandError, match="name must be lower-case letters and digits, a letter first, not 'No-Name'"):
        new_rule("No-Name", tmp_path)
    with pytest.raises(CommandError, match=r"must be one of a pair nothing.py and nothing.hpp"):
        load_rule(tmp_path / "nothing.hpp")
    change(heavy.with_suffix(".py"), "class Heavy(HlsRule)", "class Heavy")
    with pytest.raises(CommandError, match="must define one subclass of HlsRule, not 0"):
        load_rule(heavy)


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    native.compiler_version.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match=r"a C\+\+17 compiler must be there .* apt install g\+\+"):
        build_shim("nothing", "")
    monkeypatch.undo()
    native.compiler_version.cache_clear()
