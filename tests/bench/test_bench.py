"""That the benchmarks give every row they promise: on a tiny model, and on made-up figures. How fast anything is
does not matter here."""

import os
import pathlib
import subprocess
import sys
import tempfile
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import report  # noqa: E402
from harness import TEST_BIN, case, check, equal, run_cases  # noqa: E402

BENCH = os.environ.get("BATON_BENCH_BIN", str(ROOT / "build" / "bench"))

# Speaks as llama-batched-bench does: 1000 tokens/s of a prompt, 10 of each sequence.
FAKE_PEER = """#!/usr/bin/env python3
import sys
batch = int(sys.argv[sys.argv.index("-npl") + 1])
print('{"pp": 1, "speed_pp": 1000.000000, "speed_tg": %d.000000}' % (10 * batch))
"""


def tables(text):
    """Every row of every table, as lists of cells by their first one."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def run_main(folder, *arguments):
    command = [sys.executable, "-B", "tests/bench/main.py", "--binary", f"{BENCH}/bench_model", "--folder", str(folder)]
    command += ["--rounds", "1", "--prompts", "16,40", "--batches", "1,3", "--context", "20", "--ceiling-mib", "16"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def tiny_model(folder):
    subprocess.run([TEST_BIN / "tiny-model", "qwen3", folder], check=True, stdout=subprocess.DEVNULL)
    return f"tiny-bf16={folder}"


def fake_peer(folder):
    os.makedirs(f"{folder}/bin")
    path = f"{folder}/bin/llama-batched-bench"
    pathlib.Path(path).write_text(FAKE_PEER, encoding="ascii")
    os.chmod(path, 0o755)
    return f"other={folder}"


@case
def every_row_has_figures():
    with tempfile.TemporaryDirectory() as folder:
        done = run_main(
            folder, "--models", tiny_model(f"{folder}/tiny"), "--peer", fake_peer(f"{folder}/peer")
        )
    equal(done.returncode, 0, done.stderr)
    rows = tables(done.stdout)
    for title in ("prompt of 16", "prompt of 40", "generation, batch 1, masks off", "generation, batch 3, masks off"):
        cells = rows[title]
        check(float(cells[0]) > 0 and cells[2].endswith("%"), f"{title}: {cells}")
        expected = 1000 if "prompt" in title else 30 if "batch 3" in title else 10
        equal(float(cells[3]), expected, title)
        check(float(cells[4]) > 0, f"{title}: {cells}")
    for title in ("its linear layers (40 tokens)", "generation, batch 3, masks selected", "generation, batch 3, masks support"):
        check(float(rows[title][0]) > 0, f"{title}: {rows[title]}")
    for title in ("tiny-bf16, prompt 16", "tiny-bf16, batch 1"):
        equal(len([float(cell) for cell in rows[title]]), 2, title)
    check(rows["tiny-bf16"][1].endswith("%") and rows["tiny-bf16"][2].endswith("%"), f"capture: {rows['tiny-bf16']}")
    check("## Goals" in done.stdout, "goals")


@case
def a_page_says_what_was_missed():
    options = types.SimpleNamespace(
        models={"m-bf16": ""},
        peers={"p": ""},
        parts=["prompts", "generation"],
        prompts=[512],
        batches=[1, 4],
        rounds=3,
        context=256,
        threads=2,
        command="tests/bench/run",
    )
    results = {"isa": "avx2", ("m-bf16", "ceiling", "read"): [1e9], ("m-bf16", "ceiling", "fma"): [1e11]}
    results["m-bf16", "prompt 512", "Baton"] = [100.0, 300.0, 200.0]
    results["m-bf16", "prompt 512", "p"] = [100.0, 100.0, 1000.0]  # the median of the ratios is 1
    results["m-bf16", "prompt 512", "of FMA"] = [0.4, 0.6, 0.55]
    results["m-bf16", "linear", "of FMA"] = [0.6]
    results["m-bf16", "batch 1 off", "Baton"] = [12.1]
    results["m-bf16", "batch 1 off", "p"] = [10.0]
    results["m-bf16", "batch 1 off", "of read"] = [0.86]
    results["m-bf16", "batch 4 off", "Baton"] = [14.0]
    results["m-bf16", "batch 4 off", "p"] = [10.0]
    page = report.make_page(results, options)
    goals = page[page.index("## Goals") :]
    check("3 of 6 goals" in goals, goals)
    check("- m-bf16, prompt of 512, through p: 1.00 (goal: at least 1.30)" in goals, goals)
    check("- m-bf16, linear layers of a prompt, of FMA peak: 0.60 (goal: at least 0.70)" in goals, goals)
    check("- m-bf16, batch 4, through p: 1.40 (goal: at least 1.50)" in goals, goals)
    equal(tables(page)["prompt of 512"], ["200", "", "55 %", "100", "1.00"])
    check("Other programs ran" not in page, page)
    check("(load 3.0 before the run)" in report.make_page({**results, "load": 3.0}, options), "the note on the load")


@case
def a_page_names_no_folder():
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(f"{folder}/tiny")
        page = f"{folder}/page.md"
        command = f"tests/bench/run --models {model} --markdown {page}"
        done = run_main(folder, "--models", model, "--parts", "prompts", "--command", command, "--markdown", page)
        equal(done.returncode, 0, done.stderr)
        text = pathlib.Path(page).read_text(encoding="utf-8")
    check("`tests/bench/run --models tiny-bf16=FOLDER`" in text, text[:400])
    check(folder not in text, text[:400])


@case
def bad_options_are_refused_by_name():
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(f"{folder}/tiny")
        done = run_main(folder, "--models", model, "--parts", "prompts,sleep")
        check(done.returncode != 0 and "no part 'sleep'" in done.stderr, done.stderr)
        done = run_main(folder, "--models", model, "--peer", f"other={folder}")
        check(done.returncode != 0 and "no llama-batched-bench in" in done.stderr, done.stderr)
        done = run_main(folder, "--models", f"none={folder}/none.gguf")
        check(done.returncode != 0 and "none.gguf" in done.stderr, done.stderr)


@case
def bench_model_refuses_what_it_does_not_know():
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(f"{folder}/tiny").split("=")[1]
        command = [f"{BENCH}/bench_model", model, "--ceiling-mib", "1", "--batch", "2", "--context", "8"]
        for line in ("generate 3 off 1", "generate 1 some 1", "generate 1 off 65", "linear 513", "prompt 0", "sing"):
            done = subprocess.run(command, input=line + "\n", capture_output=True, text=True, timeout=120, check=False)
            equal(done.returncode, 2, line)
            check(f"not a command: {line}" in done.stderr, done.stderr)
        done = subprocess.run([*command, "--threads", "0"], capture_output=True, text=True, timeout=120, check=False)
        equal(done.returncode, 2, done.stderr)


run_cases()
