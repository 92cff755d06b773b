"""That the benchmark of the row path gives every row it promises, in a small shape, and that the page says what was
missed. How fast anything is does not matter here."""

import os
import pathlib
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import rows  # noqa: E402
from harness import case, check, equal, run_cases  # noqa: E402

BENCH = os.environ.get("BATON_BENCH_BIN", str(ROOT / "build" / "bench"))


def run_rows(*arguments):
    command = [sys.executable, "-B", "tests/bench/rows.py", "--binary", f"{BENCH}/bench_rows", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@case
def every_stage_has_figures():
    done = run_rows("--smoke")
    equal(done.returncode, 0, done.stderr)
    for part in done.stdout.split("\n## Rows of ")[1:]:
        width = part.split(" ", 1)[0]
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
        cells = {line[0]: line[1:] for line in lines}
        for stage, title, _, _ in rows.STAGES:
            check(title in cells, f"{width}: {title}")
            check(all(float(cell) >= 0 for cell in cells[title]), f"{width}: {cells[title]}")
            check(float(cells[title][0]) >= 0 and len(cells[title]) == 6, f"{width}: {cells[title]}")
    check("## Goals" in done.stdout, "goals")


@case
def a_page_says_what_was_missed():
    options = types.SimpleNamespace(command="x --markdown y", steps=50, batch=256, rounds=1)
    figures = {stage: (1e6, 2e6, 1e6) for stage in ("memcpy", "raw_tcp", "append", "handoff", "emission", "router", "json")}
    figures["memcpy"] = (1e6, 1e6, 1e6)
    for stage, _ in rows.PEER:
        figures[f"peer_{stage}"] = figures[f"peer_arrays_{stage}"] = (1e6, 4e6, 3e6)
    page = rows.make_page(options, {1000: figures}, 0.0)
    check("`x`" in page, "the command without paths")
    check("append at width 1000, of memcpy: 2.00 (goal: at most 1.50)" in page, page)
    check("emission at width 1000" not in page.split("## Goals")[1], page)
    check("1/4.5 of the pipeline's with lists" in page, page)
    check("3 of 4 goals were reached" in page, page)


run_cases()
