"""The page: one file, every conclusion and figure, sliders; and what else draws or traces outcomes."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from math import prod

import pytest

pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")

from nearflash.abi.errors import CommandError
from nearflash.explore.outcome import Outcome
from nearflash.explore.studies import report
from nearflash.explore.studies.check import conclusions, figures
from nearflash.explore.studies.dse import kvnand_grid
from nearflash.explore.studies.plots import bars, curves, heat_map, save, svg
from nearflash.explore.studies.report import report_page
from nearflash.explore.studies.sweeps import compare_systems, endor_rows, instinfer_rows, smart_infinity_rows
from nearflash.explore.systems.ifc import Arrangement, Decode
from nearflash.explore.systems.kvnand import decode_step
from nearflash.explore.systems.layered import Placement
from nearflash.explore.text import text_table
from nearflash.explore.trace import trace_events

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCHEMES = {"light": [], "dark": ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]}
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Elements, and whether they close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.ids, self._open = [], [], set(), []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids |= {value for name, value in attrs if name == "id"}
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


@pytest.fixture(scope="module")
def text():
    return report_page()


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


@pytest.mark.full
def test_the_page_closes_what_it_opens(page):
    assert page.tags[0] == "html"
    assert page.tags.count("svg") == page.tags.count("figure") >= 9


def test_the_page_needs_nothing_else(text, page):
    """Scripts are in the page; none of them loads anything."""
    assert not {"iframe", "object", "img"} & set(page.tags)
    assert page.tags.count("script") == 2
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|@import|url\((?!#)", text)
    assert len(text.encode()) <= 2_000_000
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert links
    assert all(value.startswith(("#", "data:")) for value in links)


def test_every_figure_is_there_with_its_error(text, page):
    for row in figures():
        assert row["id"] in page.ids
        assert f"<td>{row['error']:+.1%}</td>" in text
        assert f'<td class="number">{row["value"]:.4g}</td>' in text


def test_conclusions_come_first_disagreements_second_and_figures_after(text, page):
    order = [
        text.index(f"<h2>{title}</h2>") for title in ("Conclusions of the papers", "Where ours disagrees", "Figures")
    ]
    assert order == sorted(order)
    first_picture = text.index("<svg")
    assert all(place < first_picture for place in order)
    for row in conclusions():
        assert row["id"] in page.ids
        assert row["verdict"] == "true" or text.index(html.escape(row["reason"])) > order[1]
    assert "decided a term or a constant (given)" in text


def test_the_page_is_written_to_a_file(tmp_path, text, monkeypatch):
    monkeypatch.setattr(report, "report_page", lambda: text)
    report.write_report(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == text


def test_dark_and_light(text):
    assert "color-scheme: light dark" in text and "@media (prefers-color-scheme: dark)" in text


@pytest.fixture(scope="module")
def studies(text):
    begin = text.index('id="studies">') + len('id="studies">')
    return json.loads(text[begin : text.index("</script>", begin)])


def test_the_sliders_have_every_combination(studies):
    assert list(studies) == ["kvnand", "instinfer", "training"]
    for study in studies.values():
        assert len(study["cells"]) == prod(len(axis["values"]) for axis in study["axes"])
        assert {len(cell) for cell in study["cells"]} == {len(study["names"])}
        assert all(0 <= axis["start"] < len(axis["values"]) for axis in study["axes"])


def test_a_cell_of_the_sliders_is_a_step(studies):
    """Axes in order: LLaMA3.1-70B, W4A16, 8 dies, 100,000 tokens."""
    study = studies["kvnand"]
    index = 0
    for axis, value in zip(study["axes"], ("llama3.1-70b", "w4a16", 8, 100_000), strict=True):
        index = index * len(axis["values"]) + axis["values"].index(value)
    cell = dict(zip(study["names"], study["cells"][index], strict=True))
    seconds = decode_step(Decode("llama3.1-70b", 100_000, "w4a16"), Arrangement("D", 4, 4)).seconds
    assert cell["D-(4+4)"] == pytest.approx(1e3 * seconds, rel=1e-3)
    assert cell["Base-1"] is None and cell["C-16"] is None


def test_systems_and_assumptions_are_there(text):
    for title, outcomes in compare_systems().items():
        assert title[1:] in text
        for found in outcomes:
            assert found.system.partition(",")[0] in text
            assert found.assumptions


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_headless_browser_opens_it(tmp_path, scheme, text, studies):
    """No errors on the console; the sliders stand where the address puts them, and draw."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: the page was parsed, not rendered")
    file = tmp_path / "report.html"
    file.write_text(text)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--enable-logging=stderr", "--v=0", *SCHEMES[scheme], "--dump-dom",
               f"{file.as_uri()}#kvnand=0,2,1,11&instinfer=6,0"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr
    rendered = Page(done.stdout)
    assert {row["id"] for row in figures()} <= rendered.ids
    assert rendered.tags.count("svg") >= 9
    sliders = {name: done.stdout[done.stdout.index(f'id="explore-{name}"') :] for name in studies}
    best = re.search(r'<tr class="best"><td>([^<]*)</td>', sliders["kvnand"])
    assert best and best[1] == "D-(4+4)"
    assert "<output>100,000</output>" in sliders["kvnand"] and "does not fit" in sliders["kvnand"]
    assert "<output>256</output>" in sliders["instinfer"]
    assert '<div class="bar"' in sliders["training"]


def outcomes():
    return [Outcome("a", "m", {"read": 2.0, "compute": 1.0, "nothing": 0.0}, hidden={"write": 0.5}),
            Outcome("b", "m", {"read": 1.0})]  # fmt: skip


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures_are_written(tmp_path, ending):
    file = tmp_path / f"bars.{ending}"
    save(bars(outcomes(), "phases"), file)
    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_pictures_of_other_kinds(tmp_path):
    with pytest.raises(CommandError, match=r"picture must end with .png, .svg or .pdf, not 'bars.bmp'"):
        save(bars(outcomes(), "phases"), tmp_path / "bars.bmp")
    assert not list(tmp_path.iterdir())


def test_pictures_are_the_same_every_time():
    one, two = (svg(curves({"line": ([1, 2], [3.0, 4.0])}, "title", "x", "y")) for _ in range(2))
    assert one == two
    assert one.startswith("<svg") and "title" in one


def test_a_heat_map_leaves_cells_empty():
    rows = list(kvnand_grid(["llama3.1-70b"], [128, 100_000], ["w4a16"], 8))
    axes = heat_map(rows, "grid").axes[0]
    shown = [each.get_text() for each in axes.texts]
    assert len(shown) == sum(row["fits"] for row in rows) < len(rows)
    assert len(axes.patches) == 2, "a frame for each context"


def test_bars_show_phases_that_take_time():
    axes = bars(outcomes(), "phases").axes[0]
    assert [each.get_text() for each in axes.get_legend().get_texts()] == ["read", "compute"]


def test_a_trace_has_every_phase():
    events = list(trace_events(outcomes()))
    complete = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("read", 0.0, 2e6), ("compute", 2e6, 1e6), ("write", 0.0, 5e5), ("read", 0.0, 1e6)]  # fmt: skip
    assert {event["pid"] for event in events} == {1, 2}


def test_tables_of_text():
    rows = [{"name": "a", "value": 1.5, "fits": True, "parts": {}}, {"name": "long", "value": None, "fits": False}]
    lines = text_table(rows).splitlines()
    assert lines[0].split() == ["name", "value", "fits"]
    assert lines[2] == "a       1.5  yes"
    assert lines[3] == "long         no"
    assert text_table(rows, ("value",)).splitlines()[2] == "  1.5"
    assert text_table([]) == "no rows"


def test_rows_of_every_system():
    rows = list(instinfer_rows([4, 256], [1, 2]))
    assert len(rows) == 2 * 2 * 6
    assert {row["drives"] for row in rows} == {1, 2}
    training = list(smart_infinity_rows([], [1, 6]))
    assert len(training) == 5 * 2 * 6
    assert all(row["speed_up"] == 1 for row in training if row["method"] == "ZeRO-Infinity")
    weights = list(endor_rows("opt-66b", Placement(5, 8, 51)))
    assert [row["format"] for row in weights] == ["dense", "bitmap", "bitmap, direct", "coded bitmap (ours), direct"]
    assert [row["speed_up"] for row in weights] == sorted(row["speed_up"] for row in weights)
    assert len(list(endor_rows("opt-66b", Placement(ssd=1), bits=8))) == 3
    for row in (*rows, *training, *weights):
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"])
        json.dumps(row)
