"""The part of tests/bench/rows that is not about building: runs bench_rows and the peer, and makes the page."""

import argparse
import os
import re
import subprocess
import sys

import report

# Stage, its title, what it is measured against: a copy and a socket that move the same bytes.
STAGES = [
    ("append", "append to the queues, drawn in place", "memcpy", "raw_tcp"),
    ("append_copied", "append to the queues, copied", "memcpy", "raw_tcp"),
    ("handoff", "hand-off, queued rows to frames", "memcpy", "raw_tcp"),
    ("emission", "emission, hand-off and frames to a socket", "memcpy", "raw_tcp"),
    ("router", "frames into the router, to the stores of replies", "memcpy", "raw_read"),
    ("json", "JSON text", "memcpy_json", "raw_tcp_json"),
    ("json_sent", "JSON text and the client's socket", "memcpy_json", "raw_tcp_json"),
    ("packed", "packed text", "memcpy_packed", "raw_tcp_packed"),
    ("packed_sent", "packed text and the client's socket", "memcpy_packed", "raw_tcp_packed"),
]
MACHINE = [
    ("memcpy", "memcpy of the rows"),
    ("raw_tcp", "write of the rows to a TCP socket"),
    ("raw_unix", "write of the rows to a Unix socket"),
    ("raw_read", "read of the rows from a TCP socket"),
    ("memcpy_json", "memcpy of the JSON text"),
    ("raw_tcp_json", "write of the JSON text to a TCP socket"),
    ("memcpy_packed", "memcpy of the packed text"),
    ("raw_tcp_packed", "write of the packed text to a TCP socket"),
]
PEER = [
    ("append", "row bookkeeping of the scheduler"),
    ("scheduler", "scheduler: pickle and send"),
    ("detokenizer", "detokenizer: receive and send again"),
    ("manager_receive", "tokenizer manager: receive"),
    ("manager_build", "tokenizer manager: rows for the encoder"),
    ("json", "orjson"),
]
PEER_WIDTH_MAX = 2000  # its objects need 10 GB at 8192
CYCLE = ("append", "emission", "router", "json")

INTRODUCTION = """# Benchmarks of the way of a row

Made by `{command}`; every number here is replaced when it is run again with `--markdown`. One *emission* is {steps} tokens
of each of {batch} sequences in support mode, a step at a time as decode makes them: {steps} steps, each of which appends a
row per sequence, hands what is queued to frames and writes them. All figures are of a whole emission, medians over its
parts and {rounds} rounds. *CPU* is of the one thread that does the work; who drains or feeds a socket is another process.
Beside each stage stands what the machine needs for the same bytes in the same run: a `memcpy` between warm blocks, and
writes of 1 MiB to a TCP socket on loopback that another process drains.

- *append*: `row_queue_reserve` and `row_queue_push` around the draw that fills the room, as decode does, and `row_queue_push`
  of rows that lie elsewhere, as the first one of a handoff. *Emission*: the hand-off and `proto_link` until the kernel has all.
- *frames into the router*: `proto_link`, codec, dispatch, row assembler, control thread's batch, HTTP thread's store; the
  threads' work is done by one thread, so the figure is the sum.
- *text*: `reply_writer` over the stores; *and the client's socket*: through `http_exchange` until the kernel has all.
{peer}
Machine: {machine}.{others}
"""


PEER_NOTE = """
The Python pipeline is a re-creation, leaner than the real ones: numpy arrays that are used again, pickle 5 with buffers
over plain Unix sockets, no message library, nothing else in its processes.
"""


def parse():
    parser = argparse.ArgumentParser(prog="tests/bench/rows")
    parser.add_argument("--binary", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--command", default="tests/bench/rows", help=argparse.SUPPRESS)
    parser.add_argument("--peer-python", default="", help=argparse.SUPPRESS)
    parser.add_argument("--widths", type=lambda text: [int(part) for part in text.split(",")], default=[8, 1000, 8192])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", default="", metavar="FILE")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.widths, options.batch, options.steps, options.rounds = [8, 40000], 4, 3, 1
    return options


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    figures = {}
    for line in done.stdout.splitlines():
        stage, _, *numbers = line.split("\t")
        figures[stage] = tuple(float(number) for number in numbers)
    return figures


def measure(options, width):
    shape = ["--width", str(width), "--batch", str(options.batch), "--steps", str(options.steps)]
    texts = max(1, min(options.batch, 64_000 // width))
    figures = run([options.binary, *shape, "--rounds", str(options.rounds), "--texts", str(texts)])
    if options.peer_python and width <= PEER_WIDTH_MAX:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_pipeline.py")
        for extra in ([], ["--arrays"]):
            figures.update(run([options.peer_python, "-B", script, *shape, "--rounds", str(min(options.rounds, 3)), *extra]))
    return figures


def ms(ns):
    value = ns / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(ours, theirs):
    return "" if theirs is None else f"{ours / theirs:.2f}"


def stage_table(page, figures, options):
    rows = []
    per_row = options.batch * options.steps
    for stage, title, copy, socket in STAGES:
        if stage not in figures:
            continue
        count, wall, cpu = figures[stage]
        beside = [figures.get(name, (0, None, None)) for name in (copy, socket)]
        rows.append([title, f"{count / 1e6:.1f}", ms(wall), ms(cpu), f"{wall / per_row:.0f}"])
        rows[-1] += [ratio(wall, beside[0][1]), ratio(wall, beside[1][1])]
    page.table(["stage", "MB", "ms", "CPU ms", "ns a row", "x memcpy", "x socket"], rows)
    rows = [[title, *(f"{figures[name][0] / 1e6:.1f}", ms(figures[name][1]), ms(figures[name][2]))] for name, title in MACHINE if name in figures]
    page.table(["the machine", "MB", "ms", "CPU ms"], rows)


def peer_table(page, figures, width):
    if "peer_append" not in figures:
        return
    rows = []
    for stage, title in PEER:
        lists, arrays = (figures[f"{name}_{stage}"] for name in ("peer", "peer_arrays"))
        rows.append([title, ms(lists[1]), ms(lists[2]), ms(arrays[1]), ms(arrays[2])])
    ours = sum(figures[stage][2] for stage in CYCLE)
    lists, arrays = (sum(figures[f"{name}_{stage}"][2] for stage, _ in PEER) for name in ("peer", "peer_arrays"))
    rows.append(["**whole cycle**", "", ms(lists), "", ms(arrays)])
    page.table(["the Python pipeline", "lists, ms", "CPU ms", "arrays, ms", "CPU ms"], rows)
    page.lines += [f"The whole cycle (append, emission, router, JSON text) takes {ms(ours)} ms of CPU here: 1/{lists / ours:.1f} of the pipeline's with lists, 1/{arrays / ours:.1f} with arrays.", ""]
    if width == 1000:
        page.goal("the whole cycle at width 1000, of the Python pipeline's CPU with lists", ours / lists, 0.25, True)
        page.goal("the whole cycle at width 1000, of the Python pipeline's CPU with arrays", ours / arrays, 0.25, True)


def make_page(options, results, load):
    page = report.Page({}, options)
    page.lines += INTRODUCTION.format(
        command=re.sub(r" --markdown[ =]\S+", "", options.command),
        steps=options.steps,
        batch=options.batch,
        rounds=options.rounds,
        machine=report.machine(),
        peer=PEER_NOTE if getattr(options, "peer_python", "") else "",
        others=report.others_note(load),
    ).splitlines()
    for width, figures in results.items():
        page.lines += ["", f"## Rows of {width} entries", ""]
        stage_table(page, figures, options)
        peer_table(page, figures, width)
        if width >= 1000:
            page.goal(f"append at width {width}, of memcpy", figures["append"][1] / figures["memcpy"][1], 1.5, True)
            page.goal(f"emission at width {width}, of a raw socket write", figures["emission"][1] / figures["raw_tcp"][1], 1.3, True)
    page.lines += ["## Goals", ""]
    page.lines.append(f"{page.met} of {page.met + len(page.missed)} goals were reached in this run. Not reached:" if page.missed else f"All {page.met} goals were reached in this run.")
    page.lines += ["", *page.missed] if page.missed else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(page.lines)).rstrip() + "\n"


def main():
    options = parse()
    load = os.getloadavg()[0]
    page = make_page(options, {width: measure(options, width) for width in options.widths}, load)
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
