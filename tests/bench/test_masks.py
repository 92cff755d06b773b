"""That tests/bench/masks gives every row it promises, on a small cluster and on made-up figures, and that its client and
its relay count what they should. How fast anything is does not matter here."""

import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import masks  # noqa: E402
import masks_page  # noqa: E402
from harness import case, check, equal, run_cases  # noqa: E402

BENCH = os.environ.get("BATON_BENCH_BIN", str(ROOT / "build" / "bench"))


def tables(text):
    """Every row of every table, as lists of cells, by its heading and its first cell."""
    rows, heading = {}, ""
    for line in text.splitlines():
        if line.startswith("### "):
            heading = line[4:]
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[heading, cells[0]] = cells[1:]
    return rows


@case
def every_row_has_figures():
    command = ["tests/bench/masks", "--smoke", "--batch", "4", "--step-us", "500", "--widths", "5,60,realistic", "--tokens", "6"]
    command += ["--modes", "support", "--warmup-ms", "50", "--window-ms", "100"]
    environment = dict(os.environ, BATON_BENCH_BUILD=str(pathlib.Path(BENCH).parent), BATON_PYTHON=sys.executable)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    equal(done.returncode, 0, done.stderr)
    rows = tables(done.stdout)
    formats = [name for name in ("json", "packed") if f"This build has no {name}" not in done.stdout]
    titles = [f"support {width}, {form}" for width in (5, 60) for form in formats]
    for heading in ("Whole replies, 1 router thread", "Streams, 1 router thread"):
        off = rows[heading, "off (6 tokens a reply)"]
        check(float(off[0]) > 0 and off[1] == "" and float(off[2]) > 0, off)
        for title in titles:
            cells = rows[heading, title]
            check(float(cells[0]) > 0 and cells[1].endswith("%") and cells[3].endswith("%"), f"{title}: {cells}")
            check(all(float(cell) >= 0 for cell in cells[6:]) and len(cells) == 11, f"{title}: {cells}")
        check(("Whole replies, 2 router threads", titles[0]) not in rows, "narrow rows are measured once")
        check(float(rows["Streams, 2 router threads", "support 60, json"][0]) > 0, "wide rows are measured again")
    check(float(rows["Whole replies, 1 router thread", "support 60, safetensors"][0]) > 0, "files")
    check(("Streams, 1 router thread", "support 60, safetensors") not in rows, "files in streams")
    check(float(rows["Streams, 1 router thread", "support realistic, packed"][0]) > 0, "realistic rows")
    check(("Streams, 2 router threads", "support realistic, packed") not in rows, "realistic rows are measured once")
    equal(len([title for heading, title in rows if title.startswith("off ")]), 4)
    check("## Goals" in done.stdout, "goals")
    check(str(ROOT) not in done.stdout and "/tmp" not in done.stdout, "folders on the page")


def figures(rate, relay, reply_bytes=100.0):
    values = {"rate": [rate], "relay": [relay], "reply_bytes": [reply_bytes], "frame_bytes": [50.0],
              "first_byte_ms": [1.0], "late_us": [50.0], "pause_us": [700.0]}
    return {**values, **{f"cpu {name}": [0.02] for name in ("router", "decode", "prefill", "client", "device")}}


@case
def a_page_says_what_was_missed():
    options = types.SimpleNamespace(batch=256, step_us=14000, window_ms=4000, rounds=1, threads=[1, 2],
                                    replies=["whole", "stream"], command="tests/bench/masks --markdown /x/y.md")
    results = masks.Results()
    results.load = 0.0

    def row(threads, reply, mode, width, form, rate, relay, tokens=128):
        results[masks.Row(threads, reply, mode, width, form, tokens)] = figures(rate, relay)

    for threads in (1, 2):
        row(threads, "whole", "off", 0, "", 1000.0, 1100.0)
        row(threads, "whole", "off", 0, "", 900.0, 1100.0, 48)
    row(1, "whole", "support", 20, "packed", 985.0, 1000.0)  # reached
    row(1, "whole", "support", masks.REALISTIC, "packed", 500.0, 1000.0)  # no goal
    row(1, "whole", "selected", 1000, "packed", 975.0, 1000.0)  # missed
    row(1, "whole", "support", 1000, "packed", 500.0, 900.0)  # the relay does not allow it
    row(1, "whole", "support", 8192, "packed", 390.0, 500.0, 48)  # missed: 78 % of the relay
    row(1, "whole", "support", 1000, "json", 400.0, 1000.0)
    row(2, "whole", "support", 1000, "json", 640.0, 1000.0)  # missed: two threads would allow 2
    row(1, "whole", "selected", 1000, "json", 990.0, 1000.0)  # not bound by the thread
    row(2, "whole", "selected", 1000, "json", 990.0, 1000.0)
    page = masks_page.make_page(results, options)
    goals = page[page.index("## Goals") :]
    check("1 of 4 goals" in goals, goals)
    check("- selected 1000, packed, whole, 1 router thread, of masks off: 0.975 (goal: at least 0.980)" in goals, goals)
    check("- support 8192, packed, whole, 1 router thread, of the relay: 0.78 (goal: at least 0.80)" in goals, goals)
    check("- support 1000, packed, whole, 1 router thread: 55.6 % of the relay, which has 90.0 % of masks off" in goals, goals)
    name = "support 1000, json, whole"
    check(f"- {name}, 2 router threads through 1, of what the cores allow: 0.80 (goal: at least 0.85)" in goals, goals)
    rows = tables(page)
    equal(rows["Whole replies, 1 router thread", "support 8192, packed"][:4], ["390", "43.3 %", "500", "78.0 %"])
    equal(rows["Whole replies, 1 router thread", "support realistic, packed"][:2], ["500", "50.0 %"])
    equal(rows["JSON with more router threads", name], ["40.0 %", "0.04", "2", "1.60", "2.00"])
    equal(rows["JSON with more router threads", "selected 1000, json, whole"], ["99.0 %", "0.10", "2", "1.00", "1.01"])
    check("### Streams" not in page, "tables without rows")
    check("`tests/bench/masks`" in page, "the command without its file")
    results.missing.add("packed")
    check("no packed replies" in masks_page.make_page(results, options), "what is missing")


@case
def replies_end_all_the_time():
    """As many tokens of replies end in any stretch of a run as are drawn in it, in the first one as later."""
    for connections, tokens in ((288, 128), (288, 32), (40, 128)):
        lengths = masks.lengths_of(masks.Row(1, "whole", "off", 0, "", tokens), connections)
        later = lengths[connections:]
        equal(len(later), masks.LENGTHS * connections, "lengths")
        for at in range(0, len(later), connections):
            some = later[at : at + connections]
            check(abs(sum(some) / connections - tokens) < 0.5 and len(set(some)) > tokens // 4, "the mean of a stretch")
            check(tokens // 2 <= min(some) and max(some) <= 3 * tokens // 2 + 1, "shortest and longest")
        # What is left of a reply is E[L * L] / (2 E[L]) on average, here 13 / 24 of a mean length.
        first = lengths[:connections]
        check(abs(sum(first) / connections - tokens * 13 / 24) < 1 + tokens / 100, f"{tokens}: what is left of the first ones")
        check(first != sorted(first), "the longest ones would begin last")


class Answers(http.server.BaseHTTPRequestHandler):
    """A whole reply of 1000 bytes, or chunks, or a refusal, as the body says."""

    protocol_version = "HTTP/1.1"
    seen = []

    def do_POST(self):
        kind = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["kind"]
        Answers.seen.append((kind, self.headers["Accept"], self.path))
        if kind == "chunks":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (b"a" * 700, b"\r\n\r\n", b"b" * 70000):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_response(200 if kind != "refusal" else 503)
        self.send_header("CONTENT-LENGTH", "0" if kind == "empty" else "1000")
        self.end_headers()
        self.wfile.write(b"" if kind == "empty" else b"x" * 1000)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """The client goes away in the middle of its last requests."""


def run_client(kinds, *arguments):
    Answers.seen = []
    with Server(("127.0.0.1", 0), Answers) as server, tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bodies = pathlib.Path(folder, "bodies")
        bodies.write_text("".join(f'{tokens}\t{{"kind":"{kind}"}}\n' for tokens, kind in kinds), encoding="ascii")
        command = [f"{BENCH}/load_client", "--address", f"127.0.0.1:{server.server_address[1]}", "--bodies", bodies]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
        server.shutdown()
    return done


@case
def the_client_finds_the_end_of_every_reply():
    kinds = [(1, "whole"), (10, "chunks"), (100, "empty"), (1000, "chunks"), (10000, "whole")]
    done = run_client(kinds, "--replies", "13", "--restart", "3", "--path", "/p", "--accept", "a/b")
    equal(done.returncode, 0, done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    equal([line["event"] for line in lines], ["start", "end"])
    end = lines[1]
    equal((end["replies"], end["failed"], end["chunks"]), (13, 0, 3 * (1 + 5)))
    # Five lines, then the last two again and again; the first reply's tokens are not counted.
    equal(end["reply_tokens"], 10 + 100 + 1000 + 10000 + 4 * 1000 + 4 * 10000)
    equal(end["body_bytes"], 1000 * 6 + (700 + 4 + 70000) * 6)
    check(0 < end["bytes"] - end["body_bytes"] < 13 * 300, end)
    equal([kind for kind, _, _ in Answers.seen][:13], ["whole", "chunks", "empty"] + ["chunks", "whole"] * 5)
    equal({(accept, path) for _, accept, path in Answers.seen}, {("a/b", "/p")})
    check(0 < end["first_byte_ms"][0] <= end["whole_ms"][0] <= end["whole_ms"][1], end)


@case
def the_client_counts_refusals_and_asks_on_many_connections():
    done = run_client([(1, "refusal"), (1, "whole")], "--replies", "40", "--connections", "8")
    equal(done.returncode, 0, done.stderr)
    end = json.loads(done.stdout.splitlines()[1])
    equal(end["replies"], 40)
    check(16 <= end["failed"] <= 24, end)
    check("HTTP/1.1 503" in done.stderr, done.stderr)


@case
def the_client_refuses_what_it_cannot_do():
    done = run_client([(1, "whole")])
    equal(done.returncode, 1)
    check("--window-ms: this or --replies is needed" in done.stderr, done.stderr)
    done = run_client([(1, "whole")], "--replies", "1", "--restart", "1")
    check(done.returncode == 1 and "has too few lines" in done.stderr, done.stderr)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("no tab\n")
        file.flush()
        command = [f"{BENCH}/load_client", "--address", "127.0.0.1:9", "--bodies", file.name, "--replies", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    check(done.returncode == 1 and "does not begin with tokens and a tab" in done.stderr, done.stderr)


@case
def the_relay_carries_what_it_is_told():
    command = [f"{BENCH}/socket_relay", "--step-us", "1000", "--frame-bytes", "5000", "--reply-bytes", "7000",
               "--warmup-ms", "20", "--window-ms", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    equal(done.returncode, 0, done.stderr)
    found = json.loads(done.stdout)
    check(0 < found["steps_per_second"] < 1100, found)
    check(abs(found["bytes_per_second"] - 7000 * found["steps_per_second"]) < 1 + 1e-3 * found["bytes_per_second"], found)
    check(all(found[name] >= 0 for name in ("producer_cpu", "relay_cpu", "client_cpu")), found)
    done = subprocess.run([*command, "--frame-bytes", "0"], capture_output=True, text=True, timeout=60, check=False)
    check(done.returncode == 2 and "--frame-bytes" in done.stderr, done.stderr)


@case
def help_names_every_option():
    text = subprocess.run(["tests/bench/masks", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for option in ("--batch", "--step-us", "--widths", "--threads", "--replies", "--window-ms", "--rounds", "--markdown", "--smoke"):
        check(re.search(rf"^ +.*{option}\b", text, re.MULTILINE), f"{option} is not in {text}")


run_cases()
