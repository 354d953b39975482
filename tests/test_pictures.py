"""What is drawn of a timeline: Perfetto's JSON, PNG and SVG, a page in a real browser, text."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import MS, a_record, a_trace, recorded, records, written_by

from stretto.analysis import reports_from
from stretto.chrome import compute_thread, write_chrome
from stretto.clocks import Clock
from stretto.looks import parts_of
from stretto.page import to_html
from stretto.plots import PictureError, save_picture, shortened
from stretto.record import PassRecord, Span, covered
from stretto.sketch import sketch
from stretto.timeline import Timeline, timeline_of

HOSTILE = ("</script><script>document.body.dataset.owned=1</script>", "a\"b'c&d<img src=x>", "$x_1$ \\frac{@TIMELINE@")
TWO = [a_trace(0, 2, [a_record(1), a_record(2)]), a_trace(1, 2, [a_record(1), a_record(2)])]


def hostile() -> Timeline:
    return timeline_of([a_trace(passes=[a_record(names=HOSTILE)], host="<b>", transport="<i>", end="<u>: &amp;")])


def empty_ones() -> list[Timeline]:
    return [timeline_of([]), timeline_of([a_trace(0, 2), a_trace(1, 2, [], end=None)])]


# Chrome's JSON


def spans_of(chrome: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """By process and thread: begin, end (nanoseconds, as Perfetto rounds them) and name."""
    found = defaultdict(list)
    for event in chrome["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            found[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000), event["name"]))
    return found


def enclosing(spans: list[tuple[int, int, str]], time: int) -> str:
    """The innermost that is open then, as viewers find what an arrow belongs to."""
    return min((end - begin, name) for begin, end, name in spans if begin <= time < end)[1]


def test_chrome_json_of_a_run_of_three_ranks(tmp_path: Path) -> None:
    timeline = timeline_of(recorded(tmp_path, 3))
    chrome = written_by(timeline)
    assert set(chrome) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert all(event["ts"] >= 0 for event in chrome["traceEvents"] if event["ph"] != "M")
    spans = spans_of(chrome)
    for several in spans.values():
        assert all(begin <= end for begin, end, _ in several)
        for begin, end, name in several:  # inside of each other or apart: Perfetto drops anything else
            assert not [other for other in several if begin < other[0] < end < other[1]], name
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in chrome["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert set(names.values()) >= {"compute", "local (threads of one process)"} and set(names) >= set(spans)
    assert {
        event["args"]["name"].split(" (")[0] for event in chrome["traceEvents"] if event["name"] == "process_name"
    } == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    compute = [name for _, _, name in sorted(spans[2, 3])]
    assert [name for name in compute if name.startswith("pass")] == ["pass 3", "pass 4", "pass 5"]
    assert [name for name in compute if name.startswith("rungs")] == 3 * [
        "rungs.last.weight",
        "rungs.middle.weight",
        "rungs.first.weight",
    ]


def test_arrows_of_chrome_json_lead_from_span_to_span(tmp_path: Path) -> None:
    chrome = written_by(timeline_of(recorded(tmp_path, 3)))
    spans = spans_of(chrome)
    arrows: dict[int, list[Any]] = defaultdict(list)
    for event in chrome["traceEvents"]:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert len(arrows) == 3 * 3 * 3
    closes = {"bucket 0": "rungs.last.weight", "bucket 1": "rungs.middle.weight", "bucket 2": "rungs.first.weight"}
    for several in arrows.values():
        assert [event["ph"] for event in several] == ["s", "t", "f"]
        assert len({(event["name"], event["cat"]) for event in several}) == 1
        times = [event["ts"] for event in several]
        assert times == sorted(times)
        bucket = several[0]["name"]
        ends = [enclosing(spans[event["pid"], event["tid"]], round(event["ts"] * 1000)) for event in several]
        assert ends == [closes[bucket], f"{bucket} ({closes[bucket]}), until it was seen", f"wait for {bucket}"]


def test_facts_of_a_bucket_in_chrome_json() -> None:
    chrome = written_by(timeline_of([a_trace()]))
    (bucket,) = (event for event in chrome["traceEvents"] if event["name"] == "bucket 1 (b)")
    assert (bucket["ts"], bucket["dur"], bucket["args"]) == (
        40_000.0,
        15_000.0,
        {
            "pass": 1,
            "bucket": 1,
            "bytes": 1024,
            "parameters": ["b"],
            "closed_by": "b",
            "full_us": 40_000.0,
            "launched_us": 40_000.0,
            "handed_over_us": 41_000.0,
            "last_rank_launched_us": None,
            "ended_us": 55_000.0,
            "end_known": True,
            "seen_us": 55_000.0,
            "hidden_us": 10_000.0,
            "exposed_us": 5_000.0,
        },
    )
    assert [event["ts"] for event in chrome["traceEvents"] if event["name"] == "buffers sent"] == [52_000.0]


REQUIRED = {  # by phase, of the Trace Event Format: what an event must have besides name, ph, pid and tid
    "X": {"ts", "dur", "cat", "args"},
    "M": {"args"},
    "i": {"ts", "s"},
    "s": {"ts", "id", "cat"},
    "t": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_format(chrome: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """All that the Trace Event Format asks of such a file, and Perfetto's importer; returns arrows by their id."""
    assert set(chrome) == {"traceEvents", "displayTimeUnit", "otherData"} and chrome["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int, str]] = set()
    compute = compute_thread(chrome["otherData"]["world_size"])
    ranks = {event["pid"] for event in chrome["traceEvents"]}
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    before = 0.0
    for event in chrome["traceEvents"]:
        phase = event["ph"]
        assert phase in REQUIRED, f"phase {phase}; there are no B and E whose balance would be to be looked at"
        assert {"name", "ph", "pid", "tid"} | REQUIRED[phase] <= set(event), event
        assert type(event["name"]) is str and type(event["pid"]) is int and type(event["tid"]) is int
        assert event["tid"] > 0 and event["tid"] not in ranks, "Perfetto's idle thread, and the main one of a process"
        if phase == "M":
            key, kind = METADATA[event["name"]]
            assert set(event["args"]) == {key} and type(event["args"][key]) is kind, event
            assert (event["pid"], event["tid"], event["name"]) not in named, "said twice"
            named.add((event["pid"], event["tid"], event["name"]))
            continue
        assert type(event["ts"]) is float and event["ts"] >= before, "sorted"
        before = event["ts"]
        assert (event["pid"], event["tid"], "thread_name") in named, "a thread is named before it is used"
        assert (event["pid"], compute, "process_name") in named
        assert event.get("dur", 0.0) >= 0 and type(event.get("args", {})) is dict
        assert event.get("s") in (None, "t", "p", "g") and event.get("bp") in (None, "e")
        if phase in "stf":
            assert type(event["id"]) is int, "Perfetto drops arrows with an id that is no number"
            arrows[event["id"]].append(event)
    check_nesting(chrome["traceEvents"])
    spans = spans_of(chrome)
    for several in arrows.values():
        assert [event["ph"] for event in several] in (["s", "f"], ["s", "t", "f"])
        assert len({(event["cat"], event["name"], event["pid"]) for event in several}) == 1
        for event in several:
            assert enclosing(spans[event["pid"], event["tid"]], round(event["ts"] * 1000))
    return arrows


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a thread lie one inside the other or apart, and an enclosing one comes first."""
    open_ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            stack, begin = open_ends[event["pid"], event["tid"]], round(event["ts"] * 1000)
            end = begin + round(event["dur"] * 1000)
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1], event
            stack.append(end)


def test_chrome_json_keeps_to_the_format(tmp_path: Path) -> None:
    timelines = [
        timeline_of(recorded(tmp_path / "local", 3)),
        timeline_of(recorded(tmp_path / "link", 2, link=lambda nbytes: 0.004)),
        timeline_of(TWO),
        hostile(),
        *empty_ones(),
    ]
    for timeline in timelines:
        chrome = written_by(timeline)
        arrows = check_format(chrome)
        assert len(arrows) == sum(len(one.transfers) for one in timeline.passes)
        assert {event["name"] for event in chrome["traceEvents"]} >= {f"pass {number}" for number in timeline.numbers}


@given(st.lists(records(), min_size=1, max_size=3), st.lists(st.integers(-1000, 1000), min_size=3, max_size=3))
def test_chrome_json_of_whatever_was_recorded_keeps_to_the_format(
    several: list[PassRecord], offsets: list[int]
) -> None:
    traces = [
        a_trace(rank, len(several), [one], plans={}, clock=Clock(offset, 5))
        for rank, (one, offset) in enumerate(zip(several, offsets, strict=False))
    ]
    check_format(written_by(timeline_of(traces)))


def test_chrome_json_is_written_pass_by_pass() -> None:
    """Of a trace of hours no more is held than its records."""
    names = [f"p{number}" for number in range(20)]
    timeline = timeline_of([a_trace(passes=[a_record(number, names) for number in range(250)])])

    class Nowhere(io.StringIO):
        written = 0

        def write(self, text: str) -> int:
            self.written += len(text)
            return len(text)

    peaks = []
    for _ in range(3):  # what threads of other tests hold meanwhile is counted too, but not each time
        file = Nowhere()
        tracemalloc.start()
        write_chrome(timeline, file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert file.written > 2_500_000 and min(peaks) < file.written / 20


def test_a_gradient_that_came_again_draws_no_arrow_back_in_time() -> None:
    record = a_record()
    again = replace(record, gradients=(*record.gradients, ("c", record.gradients[-1][1] + MS)))
    (one,) = timeline_of([a_trace(passes=[again], plans={})]).passes
    source = one.arrows[0].source
    assert source is not None and (source.name, source.end) == ("c", one.transfers[0].launch.full)
    arrows = check_format(written_by(timeline_of([a_trace(passes=[again], plans={})])))
    assert [event["ph"] for event in arrows[1]] == ["s", "t", "f"]


def test_all_say_the_same_of_what_is_hidden(tmp_path: Path) -> None:
    """One rank, one pass, in which buckets overlap and are handed over while others are on their way."""
    trace = a_trace(0, 2)
    timeline = timeline_of([trace])
    record = timeline.passes[0].record
    (report,) = reports_from([trace])
    words = "48 % of communication hidden behind backward; 21.0 ms exposed, 30 % of the step"
    assert f"{timeline.percent_hidden:.0f} % " == words[:5] and timeline.percent_hidden == 47.5
    assert report.breakdown.percent_hidden == report.to_dict()["percent_hidden"] == timeline.percent_hidden
    assert report.breakdown.hidden == record.hidden and "backward hides 48 %, 21.0 ms exposed" in str(report)
    assert timeline.headline() == words and written_by(timeline)["otherData"]["summary"] == words
    (span,) = (event for event in written_by(timeline)["traceEvents"] if event["name"] == "pass 1")
    assert (span["args"]["hidden_ms"], span["args"]["exposed_ms"]) == pytest.approx((19.0, 21.0))
    assert words in to_html(timeline) and sketch(timeline).splitlines()[-2].startswith(words)
    save_picture(timeline, tmp_path / "x.svg")
    assert words in words_in(tmp_path / "x.svg")
    green = [
        Span(begin, end)
        for transfer in timeline.passes[0].transfers
        for begin, end, hidden, _ in parts_of(transfer, timeline.passes[0])
        if hidden
    ]
    assert covered(green) == pytest.approx(record.hidden), "what is green"
    assert [sum(one.end - one.begin for one in green)] == [sum(one.hidden for one in timeline.passes[0].transfers)]


@given(records())
def test_what_is_green_is_what_is_hidden(record: PassRecord) -> None:
    (one,) = timeline_of([a_trace(passes=[record], plans={})]).passes
    green = [Span(a, b) for transfer in one.transfers for a, b, hidden, _ in parts_of(transfer, one) if hidden]
    assert covered(green) == pytest.approx(one.record.hidden)
    assert sum(b.end - b.begin for b in green) == sum(transfer.hidden for transfer in one.transfers)


def test_a_bar_in_which_very_much_is_handed_over_is_not_cut() -> None:
    names = [f"p{number}" for number in range(400)]
    (one,) = timeline_of([a_trace(passes=[a_record(names=names)])]).passes
    assert max(len(parts_of(transfer, one)) for transfer in one.transfers) <= 3 + 2 * 100


def test_buckets_that_are_on_their_way_at_once_have_threads_of_their_own() -> None:
    spans = spans_of(written_by(timeline_of(TWO)))
    assert [name for _, _, name in spans[0, 3]] == ["bucket 0 (c)", "bucket 2 (a)"] * 2
    assert [name for _, _, name in spans[0, 4]] == ["bucket 1 (b)"] * 2
    assert set(spans) == {(rank, thread) for rank in (0, 1) for thread in (2, 3, 4)}


def test_nothing_as_chrome_json() -> None:
    for timeline in empty_ones():
        written_by(timeline)
    assert written_by(timeline_of([]))["traceEvents"] == []


# Matplotlib


@pytest.mark.parametrize("kind, begins", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_pictures_are_written(tmp_path: Path, kind: str, begins: bytes) -> None:
    for number, timeline in enumerate([timeline_of(TWO), hostile(), *empty_ones()]):
        path = tmp_path / f"{number}.{kind}"
        save_picture(timeline, path)
        assert path.read_bytes().startswith(begins)


def words_in(path: Path) -> str:
    return " ".join("".join(one.itertext()) for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))


def test_what_a_picture_says(tmp_path: Path) -> None:
    timeline = timeline_of([TWO[0], a_trace(1, 2, [a_record(2)], clock=Clock(0, 500_000))])
    save_picture(timeline, tmp_path / "x.svg")
    words = words_in(tmp_path / "x.svg")
    for text in (
        timeline.headline(),
        "pass 2 of a run on 2 ranks over local",
        "rank 0",
        "rank 1",
        "bucket 2, 1.0 KB",
        "closed by b",
        "waiting 18.0 ms",
        "backward ends",
        "hidden, costs no time",
        "exposed, costs time",
        "full, and waits for its turn",
        "rank 1: times are accurate to 0.50 ms relative to rank 0",
    ):
        assert text in words
    save_picture(timeline, tmp_path / "y.svg", passes=[1])
    assert "pass 1 of a run" in words_in(tmp_path / "y.svg")


def test_names_are_text_in_a_picture(tmp_path: Path) -> None:
    save_picture(hostile(), tmp_path / "x.svg")
    tree = ElementTree.parse(tmp_path / "x.svg")
    assert not [one for one in tree.iter() if one.tag.endswith(("script", "img"))]
    assert "closed by $x_1$ \\frac{@TIMELINE@" in words_in(tmp_path / "x.svg")


def test_characters_that_files_cannot_hold_are_escaped(tmp_path: Path) -> None:
    """Colours of a terminal in the text of an exception, half a character in a name, letters that the font lacks."""
    end = "RuntimeError: \x1b[31mno file\x1b[0m \udcff"
    shown = timeline_of([a_trace(end=end, passes=[a_record(names=("a\x1b\udcff", "\u5c42", "b"))])])
    for kind in ("png", "svg"):
        save_picture(shown, tmp_path / f"x.{kind}")
    words = words_in(tmp_path / "x.svg")
    assert "closed by a\\x1b\\udcff" in words and "closed by \u5c42" in words
    assert "rank 0: ended with RuntimeError: \\x1b[31mno file\\x1b[0m \\udcff" in words
    (tmp_path / "x.html").write_text(to_html(shown), encoding="utf-8")
    assert "\x1b" not in sketch(shown)


def widths_in(path: Path) -> dict[str, float]:
    """Of all boxes of a colour, added up. What is filled with one colour is one path of many boxes."""
    widths: dict[str, float] = defaultdict(float)
    for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}path"):
        colour = re.search(r"fill: (#\w+)", one.get("style", ""))
        for box in one.get("d", "").split("M")[1:] if colour else ():
            xs = [float(x) for x in re.findall(r"(?:^|L) (\S+) ", box)]
            widths[colour[1]] += max(xs) - min(xs)
    return widths


def test_hidden_and_exposed_lie_where_they_belong(tmp_path: Path) -> None:
    """The widths of the bars are to each other as the times are; each colour is in the legend once more."""
    save_picture(timeline_of([a_trace()]), tmp_path / "x.svg")
    widths = widths_in(tmp_path / "x.svg")
    other, optimizer, hidden, exposed = (widths[colour] for colour in ("#ececec", "#bdbdbd", "#2f9e6e", "#d55e00"))
    a_millisecond, in_legend = (other - optimizer) / 6, widths["#acd8c5"] + widths["#eebf99"]  # halves of a swatch
    assert (optimizer - in_legend) / a_millisecond == pytest.approx(2, rel=1e-3)
    assert (hidden - in_legend) / a_millisecond == pytest.approx(13 + 10 + 1, rel=1e-3)
    assert (exposed - in_legend) / a_millisecond > 3 + 18 + 2 + 5 + 14


def test_a_picture_of_many_buckets_is_small_and_leaves_nothing_out(tmp_path: Path) -> None:
    """24 buckets, of which most are on their way at once: each is cut where others are handed over."""
    record = a_record(names=[f"p{number}" for number in range(24)])
    quickly = tuple(replace(one, handed_over=one.begin + MS // 4) for one in record.launches)
    timeline = timeline_of([a_trace(rank, 2, [replace(record, launches=quickly)]) for rank in range(2)])
    parts = [part for one in timeline.passes for transfer in one.transfers for part in parts_of(transfer, one)]
    assert len(parts) > 900
    path = tmp_path / "x.svg"
    save_picture(timeline, path)
    assert path.stat().st_size < 180 * len(parts), "a path each would need 260"
    widths = widths_in(path)
    optimizer, hidden = (widths[colour] - widths["#acd8c5"] - widths["#eebf99"] for colour in ("#bdbdbd", "#2f9e6e"))
    seconds = sum(end - begin for begin, end, green, _ in parts if green)
    assert hidden / optimizer == pytest.approx(seconds / (2 * 2 * MS), rel=1e-3)


def passes_of_two_plans() -> Timeline:
    """In the second pass bucket 1 is not sent, and bucket 2 is larger."""
    second = a_record(2)
    first, _, last = second.launches
    second = replace(second, launches=(first, replace(last, nbytes=2048)))
    return timeline_of([a_trace(passes=[a_record(1), second])])


def test_a_row_is_of_one_bucket_in_all_passes(tmp_path: Path) -> None:
    save_picture(passes_of_two_plans(), tmp_path / "x.svg", passes=[1, 2])
    assert re.findall(r"bucket \d\S*(?: \S+ KB)?", words_in(tmp_path / "x.svg")) == [
        "bucket 0, 1.0 KB",
        "bucket 1, 1.0 KB",
        "bucket 2",
    ]


def test_a_name_is_written_over_nothing_else(tmp_path: Path) -> None:
    """Where the passes before and behind leave no room there is none, and it stands before the dotted line."""
    long = "x" * 34
    three = timeline_of([a_trace(passes=[a_record(number, names=(long, "b", "a")) for number in (1, 2, 3)])])
    save_picture(three, tmp_path / "x.svg", passes=[1, 2, 3])
    words = words_in(tmp_path / "x.svg")
    assert words.count("closed by b") == words.count("closed by a") == 3 and long not in words
    save_picture(three, tmp_path / "x.svg", passes=[1])
    assert long in words_in(tmp_path / "x.svg")
    record = a_record()
    held = replace(record.launches[2], full=record.launches[0].full)
    held = replace(record, launches=(*record.launches[:2], held))
    save_picture(timeline_of([a_trace(passes=[held])]), tmp_path / "y.svg")
    svg = (tmp_path / "y.svg").read_text()
    (name,) = re.findall(r'text-anchor: end[^>]* x="([\d.]+)"[^>]*>closed by a<', svg)
    dotted = re.findall(r'd="M ([\d.]+) [^"]*" clip-path="[^"]*" style="[^"]*stroke-dasharray: 1,1.65', svg)
    assert float(name) < float(dotted[0])


@pytest.mark.parametrize("name, shown", [
    ("0.weight", "0.weight"),
    ("encoder.transformer_layers.11.self_attention.keys.bias", "encod….trans….11.self_….keys.bias"),
    ("x" * 50, "x" * 33 + "…"),
    (".".join("abcdefghijklmnopqrstuvwxyz"), "…j.k.l.m.n.o.p.q.r.s.t.u.v.w.x.y.z"),
])  # fmt: skip
def test_long_names_keep_something_of_each_part(name: str, shown: str) -> None:
    assert shortened(name, 34) == shown and len(shown) <= 34


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PictureError) as caught:
        save_picture(timeline_of(TWO), "overlap.gif")
    assert str(caught.value) == "overlap.gif: a picture ends in .png or .svg"
    with pytest.raises(PictureError) as caught:
        save_picture(timeline_of(TWO), tmp_path / "nowhere" / "x.png")
    assert str(caught.value) == (
        f"the picture cannot be written: [Errno 2] No such file or directory: '{tmp_path}/nowhere/x.png'"
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PictureError) as caught:
        save_picture(timeline_of(TWO), tmp_path / "x.png")
    assert str(caught.value) == "pictures need matplotlib, which is not installed: pip install matplotlib"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    monkeypatch.setattr("importlib.import_module", _broken)
    with pytest.raises(PictureError) as caught:
        save_picture(timeline_of(TWO), tmp_path / "x.png")
    assert str(caught.value) == "pictures need matplotlib, which cannot be imported: numpy.core failed to import"


def _broken(name: str) -> Any:
    raise ImportError("numpy.core\nfailed to import")


# The page


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script id="timeline" type="application/json">(.*?)</script>', page)
    return json.loads(text)


def test_the_page_holds_all_and_loads_nothing() -> None:
    page = to_html(timeline_of(TWO))
    assert not re.search(r"(?:src|href)=|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page and not re.search(r"@[A-Z]+@", page)
    data = data_of(page)
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1] and data["end"] == 70_000.0
    (one,) = data["ranks"][0]["passes"]
    assert data["ranks"][0]["rows"] == [f"bucket {number}, 1.0 KB" for number in range(3)]
    assert one["buckets"][1]["parts"] == [
        {"begin": 40_000.0, "end": 41_000.0, "colour": "#d55e00"},
        {"begin": 41_000.0, "end": 50_000.0, "colour": "#2f9e6e"},
        {"begin": 50_000.0, "end": 51_000.0, "colour": "#d55e00"},
        {"begin": 51_000.0, "end": 52_000.0, "colour": "#2f9e6e"},
        {"begin": 52_000.0, "end": 55_000.0, "colour": "#d55e00"},
    ]
    assert one["buckets"][1]["tip"] == (
        "bucket 1, 1.0 KB, 1 parameter\nfull at 40.000 ms, closed by b\n"
        "launched at 40.000 ms, handed over at 41.000 ms\nresult there at 55.000 ms, seen at 55.000 ms\n"
        "10.0 ms hidden, 5.00 ms exposed\n\nb"
    )


def test_a_row_of_the_page_is_of_one_bucket_in_all_passes() -> None:
    (rank,) = data_of(to_html(passes_of_two_plans(), passes=[1, 2]))["ranks"]
    assert rank["rows"] == ["bucket 0, 1.0 KB", "bucket 1, 1.0 KB", "bucket 2"]
    assert [[bucket["row"] for bucket in one["buckets"]] for one in rank["passes"]] == [[0, 1, 2], [0, 2]]


def test_pale_is_the_same_colour_in_the_legend_and_in_all_pictures(tmp_path: Path) -> None:
    late = timeline_of([TWO[0], a_trace(1, 2, [a_record(2).moved(18 * MS)])])
    data = data_of(to_html(late))
    (one,) = data["ranks"][0]["passes"]
    pale = {part["colour"] for bucket in one["buckets"] for part in bucket["parts"]} - {"#2f9e6e", "#d55e00"}
    (swatch,) = (colours for colours, text in data["legend"] if text.startswith("pale"))
    assert pale == {"#acd8c5", "#eebf99"} == set(swatch)
    save_picture(late, tmp_path / "x.svg")
    assert all((tmp_path / "x.svg").read_text().count(colour) > 1 for colour in pale)


def test_names_are_text_on_the_page() -> None:
    page = to_html(hostile())
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page and "<b>" not in page and "<i>" not in page and "<u>" not in page
    tips = [activity["tip"] for activity in data_of(page)["ranks"][0]["passes"][0]["activities"]]
    assert all(any(name in tip for tip in tips) for name in HOSTILE)
    assert html.escape("<u>: &amp;") in page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def in_chromium(page: str, folder: Path, then: str, width: int = 1400) -> str:
    """The page as it is after it was drawn and ``then`` was run."""
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{then}</script></body>"), encoding="utf-8")
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *quiet,
         f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """It draws a bar an activity and a part, tells of what one points at, and looks closer when the wheel is turned."""
    page = to_html(timeline_of(TWO))
    point = """
        document.body.dataset.bars = document.querySelectorAll("rect[data-tip]").length;
        const find = () => document.querySelector("rect[data-tip^='bucket 1,']");
        const old = find();
        old.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: 400, clientY: 200}));
        document.body.dataset.before = old.getAttribute("width");
        document.getElementById("picture").dispatchEvent(new WheelEvent("wheel", {deltaY: -1, clientX: 700}));
        document.body.dataset.after = find().getAttribute("width");
        """
    dom = in_chromium(page, tmp_path, point)
    assert re.findall(r'data-bars="(\d+)"', dom) == [str(2 * (15 + 12))]
    (tip,) = re.findall(r'<div id="tip"[^>]*>(.*?)</div>', dom, re.DOTALL)
    assert html.unescape(tip).startswith("bucket 1, 1.0 KB, 1 parameter\nfull at 40.000 ms, closed by b\n")
    assert re.search(r'<div id="tip" style="display: block;', dom)
    before, after = (float(re.findall(rf'data-{when}="([\d.]+)"', dom)[0]) for when in ("before", "after"))
    assert after == pytest.approx(before * 1.25)
    assert dom.count("<li>") == 8 and "rank 1</text>" in dom and "0 ms</text>" in dom


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_in_a_narrow_window(tmp_path: Path) -> None:
    """As large as in a wide one, so that the wheel finds what is under it, and a tip at the edge keeps its width."""
    look = """{
        const svg = document.querySelector("svg"), tip = document.getElementById("tip"), frame = svg.viewBox.baseVal;
        document.body.dataset.same = [frame.width, frame.height].join() === [svg.clientWidth, svg.clientHeight].join();
        document.body.dataset.columns = new Set([...document.querySelectorAll("li")].map(one => one.offsetLeft)).size;
        const point = start => {
            const at = {bubbles: true, clientX: innerWidth - 30, clientY: 200};
            document.querySelector(`rect[data-tip^='${start}']`).dispatchEvent(new MouseEvent("mousemove", at));
            return tip.offsetWidth;
        };
        const wide = point("bucket 1,");
        document.body.dataset.kept = point("forward") < wide && point("bucket 1,") === wide;
        }"""
    dom = in_chromium(to_html(timeline_of(TWO)), tmp_path, look, width=460)
    assert [re.findall(rf'data-{what}="(\w+)"', dom) for what in ("same", "columns", "kept")] == [
        ["true"],
        ["1"],
        ["true"],
    ]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_row_has_one_name_in_a_browser(tmp_path: Path) -> None:
    dom = in_chromium(to_html(passes_of_two_plans(), passes=[1, 2]), tmp_path, "")
    assert re.findall(r">(bucket [^<]*)</text>", dom) == ["bucket 0, 1.0 KB", "bucket 1, 1.0 KB", "bucket 2"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_hostile_names_and_empty_timelines_in_a_browser(tmp_path: Path) -> None:
    dom = in_chromium(to_html(hostile()), tmp_path, "")
    assert "data-owned" not in dom and int(re.findall(r'data-drawn="(\d+)"', dom)[0]) > 20
    dom = in_chromium(to_html(empty_ones()[0]), tmp_path, "")
    assert 'data-drawn="0"' in dom and "no pass was recorded" in dom


# Text


def test_a_sketch() -> None:
    late = a_record().moved(0)
    late = type(late)(**{**vars(late), "backward_ended": 162 * MS})
    assert sketch(timeline_of([a_trace(0, 2), a_trace(1, 2, [late])]), width=60) == (
        "backward  ================================\n"
        "bucket 0            ---------------\n"
        "bucket 1                      ------------###\n"
        "bucket 2                                --#############\n"
        "exposed                                   ##################\n"
        "rank 1    ==========================================########\n"
        "48 % of communication hidden behind backward; 21.0 ms exposed, 30 % of the step (rank 0, pass 1)"
    )


def test_a_wait_amid_backward_is_drawn_as_exposed_and_lies_in_backward() -> None:
    waits = (Span(131 * MS, 139 * MS), Span(145 * MS, 145 * MS + 1000))
    traces = [a_trace(0, 2, [a_record(waits=waits)]), a_trace(1, 2, [a_record(waits=waits[:1])])]
    assert sketch(timeline_of(traces), width=60) == (
        "backward  ===========        =============\n"
        "bucket 0            ---------------\n"
        "bucket 1                      ------------###\n"
        "bucket 2                                --#############\n"
        "exposed              ########      #      ##################\n"
        "rank 1    ===========########=============##################\n"
        "27 % of communication hidden behind backward; 29.0 ms exposed, 41 % of the step (rank 0, pass 1)"
    )
    events = written_by(timeline_of(traces[:1]))["traceEvents"]
    waited = [event for event in events if event["name"] == "wait for other ranks"]
    (backward,) = (event for event in events if event["name"] == "backward")
    assert [(event["ts"], event["dur"]) for event in waited] == [(31_000, 8_000), (45_000, 1)]
    assert backward["ts"] <= 20_000 and backward["ts"] + backward["dur"] == 52_000
    assert "nothing to compute: waits for other ranks" in to_html(timeline_of(traces))


def test_a_sketch_of_many_buckets_and_of_nothing() -> None:
    names = [f"p{number}" for number in range(30)]
    lines = sketch(timeline_of([a_trace(passes=[a_record(names=names)])])).splitlines()
    assert len(lines) == 1 + 10 + 1 + 1 and lines[1].startswith("0 .. 2 ") and lines[10].startswith("27 .. 29 ")
    assert all(len(line) <= 72 for line in lines[:-1])
    many = sketch(
        timeline_of([a_trace(passes=[a_record(names=[f"p{number}" for number in range(1300)])])])
    ).splitlines()
    assert many[12].startswith("1199 .. 1299 ") and all(len(line) <= 72 for line in many[:-1])
    assert {line.index("#") for line in many[6:-1]} == {len(many[0])}, "a long name moves no bar to the right"
    assert sketch(timeline_of([])) == "no pass was recorded"
    assert sketch(empty_ones()[1]).splitlines()[-2:] == [
        "rank 1: none of these passes was recorded",
        "rank 1: its trace was cut off, the process may have been killed",
    ]
    assert "(rank 0, pass 2)" in sketch(timeline_of(TWO), passes=[2])
    assert sketch(timeline_of([a_trace()])).endswith(" 30 % of the step (pass 1)")
