"""Turns the figures of measure.py into a page of tables, and says which goals they miss."""

import os
import re
import statistics

# What issue 3 asks of bf16 weights.
GOALS = {"read": 0.85, "linear": 0.70, "prompt": 0.50, "capture": 0.01, "contended": 2.5}
PEER_GOALS = {"prompt": 1.3, "batch 1": 1.2, "batch": 1.5}


class Page:
    def __init__(self, results, options):
        self.results = results
        self.options = options
        self.lines = []
        self.missed = []
        self.met = 0

    def median(self, model, row, who):
        values = self.results.get((model, row, who))
        return statistics.median(values) if values else None

    def ratio(self, model, row, peer):
        """The median over the rounds of Baton's figure through the peer's."""
        ours = self.results.get((model, row, "Baton"))
        theirs = self.results.get((model, row, peer))
        if not ours or not theirs:
            return None
        return statistics.median(a / b for a, b in zip(ours, theirs))

    def table(self, head, rows):
        self.lines.append("| " + " | ".join(head) + " |")
        self.lines.append("|" + " --- |" * len(head))
        self.lines += ["| " + " | ".join(row) + " |" for row in rows]
        self.lines.append("")

    def goal(self, text, value, limit, is_most=False, shown="{:.2f}"):
        if value is None:
            return
        if (value <= limit) if is_most else (value >= limit):
            self.met += 1
            return
        sign = "at most" if is_most else "at least"
        self.missed.append(f"- {text}: {shown.format(value)} (goal: {sign} {shown.format(limit)})")


def percent(value):
    return "" if value is None else f"{100 * value:.0f} %"


def rate(value):
    return "" if value is None else (f"{value:.0f}" if value >= 100 else f"{value:.1f}")


def machine():
    fields = {}
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = [f for f in ("avx2", "avx512f", "avx512_bf16", "asimd") if f in fields.get("flags", fields.get("Features", "")).split()]
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = int(re.search(r"MemTotal: *(\d+)", file.read()).group(1)) >> 20
    return (
        f"{fields.get('model name', 'processor of ' + os.uname().machine)} (family {fields.get('cpu family', '?')}, "
        f"model {fields.get('model', '?')}; {', '.join(flags)}), {os.cpu_count()} cores, {memory} GiB"
    )


def model_rows(options):
    rows = []
    if "prompts" in options.parts:
        rows += [(f"prompt {n}", f"prompt of {n}") for n in options.prompts]
        rows.append(("linear", f"its linear layers ({min(512, max(options.prompts))} tokens)"))
    if "generation" in options.parts:
        for batch in options.batches:
            for mode in ("off", "selected", "support"):
                rows.append((f"batch {batch} {mode}", f"generation, batch {batch}, masks {mode}"))
    return rows


def write_model(page, model):
    peers = list(page.options.peers)
    read, fma = (page.median(model, "ceiling", name) for name in ("read", "fma"))
    page.lines += [f"### {model}", "", f"Ceilings: {read / 1e9:.1f} GB/s read, {fma / 1e9:.0f} GFLOP/s FMA.", ""]
    head = ["", "tokens/s", "of read", "of FMA"]
    for peer in peers:
        head += [peer, "ratio"]
    rows = []
    for row, title in model_rows(page.options):
        if page.median(model, row, "Baton") is None:
            continue
        line = [title, rate(page.median(model, row, "Baton"))]
        line += [percent(page.median(model, row, who)) for who in ("of read", "of FMA")]
        for peer in peers:
            value = page.ratio(model, row, peer)
            line += [rate(page.median(model, row, peer)), "" if value is None else f"{value:.2f}"]
        rows.append(line)
    page.table(head, rows)


def write_capture(page):
    page.lines += ["## Cost of capture", ""]
    rows = []
    for model in page.options.models:
        step = page.median(model, "capture", "step")
        if step is None:
            continue
        inside = page.median(model, "capture", "inside")
        difference = page.median(model, "capture", "difference")
        rows.append([
            model,
            f"{step * 1e3:.0f} ms",
            "" if inside is None else f"{100 * inside:.2f} %",
            f"{100 * difference:+.2f} %",
        ])
        if model == "qwen3-bf16":
            page.goal("capture, of a step of qwen3-bf16 at batch 64 (%)", inside and 100 * inside, 1, True)
    page.table(["", f"step, batch {max(page.options.batches)}, masks off", "inside the capture code", "support - off, paired"], rows)


def write_contended(page):
    page.lines += [
        "## With one core taken by another program",
        "",
        "How many times slower than with the machine to itself:",
        "",
    ]
    names = ["Baton", *page.options.peers]
    rows = []
    for model in page.options.models:
        for row in (f"prompt {min(page.options.prompts)}", "batch 1"):
            values = [page.median(model, f"contended {row}", name) for name in names]
            if values[0] is None:
                continue
            rows.append([f"{model}, {row}", *(f"{value:.1f}" for value in values)])
            page.goal(f"{model}, {row} with one core taken, times slower", values[0], GOALS["contended"], True)
    page.table(["", *names], rows)


def check_goals(page, model):
    if not model.endswith("bf16"):
        return
    page.goal(f"{model}, batch 1, of read bandwidth", page.median(model, "batch 1 off", "of read"), GOALS["read"])
    page.goal(f"{model}, linear layers of a prompt, of FMA peak", page.median(model, "linear", "of FMA"), GOALS["linear"])
    page.goal(f"{model}, prompt of 512, of FMA peak", page.median(model, "prompt 512", "of FMA"), GOALS["prompt"])
    for peer in page.options.peers:
        for tokens in page.options.prompts:
            page.goal(f"{model}, prompt of {tokens}, through {peer}", page.ratio(model, f"prompt {tokens}", peer), PEER_GOALS["prompt"])
        for batch in page.options.batches:
            limit = PEER_GOALS["batch 1" if batch == 1 else "batch"]
            page.goal(f"{model}, batch {batch}, through {peer}", page.ratio(model, f"batch {batch} off", peer), limit)


INTRODUCTION = """# Benchmarks of the host engine

Made by `{command}`; every number here is replaced when it is run again with `--markdown`. {rounds} rounds, in each of
which every row is asked of Baton and of the peers in turn; medians of the rounds, and ratios are medians of each
round's ratio. Shares are of what the same machine gave in the same round with the same threads: *read* is memory read
bandwidth over the bytes of the weights, *FMA* is float32 FMA on registers over all multiplications and additions, those
of attention included. Prompts are one sequence in steps of 512; generation is of so many sequences together, each after
{context} tokens, with temperature 1 and top_k 1000 for Baton (the peer's program draws nothing); tokens/s is of all
sequences together. KV is {kv}.

Machine: {machine}. {threads} threads, {isa} kernels.{others}
"""

PEER_NOTE = """The peer is llama.cpp, as `llama-batched-bench -pps` on the same files. Built natively for a processor with
AVX512-BF16 it rounds activations to bf16 and multiplies in pairs, twice the multiplications of an FMA on float32;
Baton's numerics keep activations in float32 and give the same bits on every instruction set. A build with that
instruction off (`GGML_AVX512_BF16=OFF`) compares the same arithmetic.
"""


def others_note(load):
    """Nobody should take figures of a busy machine for what it can do."""
    if load < 0.5:
        return ""
    return f" **Other programs ran meanwhile (load {load:.1f} before the run): absolute figures are worse than the machine's own.**"


def make_page(results, options):
    page = Page(results, options)
    page.lines += INTRODUCTION.format(
        command=options.command,
        rounds=options.rounds,
        context=options.context,
        kv="bf16 (f16 in the peer)" if options.peers else "bf16",
        machine=machine(),
        threads=options.threads,
        isa=results.get("isa"),
        others=others_note(results.get("load", 0.0)),
    ).splitlines()
    if options.peers:
        page.lines += ["", *PEER_NOTE.splitlines()]
    page.lines += ["", "## Speed", ""]
    for model in options.models:
        write_model(page, model)
        check_goals(page, model)
    if "capture" in options.parts:
        write_capture(page)
    if "contended" in options.parts:
        write_contended(page)
    page.lines += ["## Goals", ""]
    page.lines.append(f"{page.met} of {page.met + len(page.missed)} goals were reached in this run. Not reached:" if page.missed else f"All {page.met} goals were reached in this run.")
    page.lines += ["", *page.missed] if page.missed else []
    return "\n".join(page.lines).rstrip() + "\n"
