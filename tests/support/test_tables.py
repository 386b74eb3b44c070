"""The reader of tables: what a dataclass may ask for, and that an error names the place of the fault."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from nearflash.abi.errors import PlanError, StateError
from nearflash.support.tables import TableReader, check_fields, check_integers, read_json, read_toml


@dataclass(frozen=True)
class Inner:
    count: int
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    is_open: bool
    inner: Inner
    sizes: tuple[float, ...] = ()
    others: Mapping[str, Inner] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def rule(key, hint, value):
    return "at most 9" if hint in (int, float) and value > 9 else ""


def parse(body, **options):
    return TableReader(PlanError, rule, **options).parse(Outer, body, "table")


BODY = {"name": "a", "is_open": True, "inner": {"count": 1}}
FULL = BODY | {"inner": {"count": 1, "share": 2}, "sizes": [1, 2.5], "others": {"b": {"count": 3}}, "seconds": {"c": 1}}


def test_a_table_is_read_to_the_last_key():
    assert parse(BODY) == Outer("a", True, Inner(1))
    assert parse(FULL) == Outer("a", True, Inner(1, 2), (1, 2.5), {"b": Inner(3)}, {"c": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, "table.name must be text, not 3"),
        ({"is_open": 1}, "table.is_open must be true or false, not 1"),
        ({"inner": []}, "table.inner must be a table, not []"),
        ({"inner": {}}, "table.inner must have count"),
        ({"inner": {"count": 1, "more": 2}}, "table.inner must have only count, share, not more"),
        ({"inner": {"count": True}}, "table.inner.count must be a whole number, not True"),
        ({"inner": {"count": 1.0}}, "table.inner.count must be a whole number, not 1.0"),
        ({"inner": {"count": 10}}, "table.inner.count must be at most 9, not 10"),
        ({"inner": {"count": 1, "share": None}}, "table.inner.share must be a number, not None"),
        ({"inner": {"count": 1, "share": 9.5}}, "table.inner.share must be at most 9, not 9.5"),
        ({"inner": {"count": 1 << 30000}},
         "table.inner.count must be at most 9, not one of type int that is too long to show"),
        ({"sizes": 1}, "table.sizes must be a list, not 1"),
        ({"sizes": [1, "2"]}, "table.sizes[1] must be a number, not '2'"),
        ({"others": {"b": 3}}, "table.others.b must be a table, not 3"),
        ({"seconds": {"c": "1"}}, "table.seconds.c must be a number, not '1'"),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(changes, message):
    with pytest.raises(PlanError) as caught:
        parse(BODY | changes)
    assert str(caught.value) == message


def test_a_complete_table_has_the_fields_with_defaults_too_inside_as_well():
    whole = FULL | {"others": {"b": {"count": 3, "share": 1}}}
    assert parse(whole, complete=True) == parse(whole)
    with pytest.raises(PlanError, match="table must have sizes, others, seconds"):
        parse(BODY, complete=True)
    with pytest.raises(PlanError, match=r"table\.others\.b must have share"):
        parse(FULL, complete=True)


@pytest.mark.parametrize(("read", "form"), [(read_json, "JSON"), (read_toml, "TOML")])
def test_a_file_that_cannot_be_read_is_named_with_the_advice(tmp_path, read, form):
    file = tmp_path / "file"
    for text in (None, b"\xff\xfe", b"{", b"[" * 100_000, b"a = 1" + b"0" * 5000):
        if text is not None:
            file.write_bytes(text)
        with pytest.raises(StateError, match=rf"file must be a readable {form} file \(.*\): remove it"):
            read(file, StateError, "remove it")
    file.write_bytes(b"1")
    with pytest.raises(StateError, match="more than 0 bytes"):
        read(file, StateError, max_bytes=0)


def test_fields_are_exactly_of_their_kinds():
    assert check_fields("it", {"a": 1, "b": 0.5}, a=int, b=float) == (1, 0.5)
    for body in (
        {"a": 1},
        {"a": 1, "b": 1},
        {"a": -1, "b": 0.5},
        {"a": True, "b": 0.5},
        [],
        {"a": 1, "b": 0.5, "c": 1},
    ):
        with pytest.raises(StateError, match=r"it must (have|be an object of a, b)"):
            check_fields("it", body, a=int, b=float)
    assert check_integers("they", [0, 1]) == [0, 1]
    for values in ([True], [-1], ["0"], {}, None):
        with pytest.raises(StateError, match="they must be a list of integers of at least 0"):
            check_integers("they", values)
