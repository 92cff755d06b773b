"""Turns the figures of masks.py into docs/benchmarks-masks.md, and says which goals they miss."""

import dataclasses
import os
import re
import statistics

from report import Page, machine, others_note, rate

# What issue 4 asks.
GOALS = {"packed": 0.98, "relay": 0.80, "scaling": 0.85}
# Below this share of masks off one thread of the router is what bounds JSON, so that a second one should help.
BOUND = 0.85

INTRODUCTION = """# Benchmarks of sampling masks, end to end

Made by `{command}`; every number here is replaced when it is run again with `--markdown`. {rounds}

A router, a prefill and a decode worker on the sim device ([sim.md](sim.md)): a step takes {step:g} ms and draws a token for
each of {batch} sequences, {ideal:.0f} tokens/s when nothing else costs time. {connections} requests are sent at once over
keep-alive connections by a client that only finds the end of each reply; a connection sends the next one when its reply
is complete. Replies have between half and one and a half times the tokens they have on average (128; 32 in the widest
rows), so that they end all the time. *tokens/s* is what arrived at the client in {window:g} s a row: tokens of
complete replies, or, where a token has more than 4000 bytes, the bytes of bodies over those of one token. *Realistic*
rows have widths of their own: median 2, mean 8, 82 at 99 %. *Whole* replies are sent
when complete, *streams* are incremental, with an event for every token.

*Of off* is the share of the same row with masks off. *Relay* is three bare processes with the same bytes: one has the
bytes of a step's frames ready every {step:g} ms, the next passes on as many as the replies have, the last throws them
away, one socket each; nothing else happens to them. *Of relay* is the share of it. *Reply* and *frame* bytes, to the client
and from decode to the router, are of one token. *Pause* is what decode needs between the end of a step and the start of
the next: rows taken, the batch filled. *CPU* is of whole processes (what the kernel does in their name included), in
seconds for 1000 tokens, without the thread that plays the device. Steps of the device ended {late:.0f} us late on average.

Machine: {machine}.{others}
"""

SCALING = """How many times the tokens/s of {first} router thread, and what could be had: no more than there are threads, than what
the cores that are left allow when everything else grows as well, and than masks off."""

PEERS = """SGLang, which this contract comes from, keeps 85 % of its speed with masks off in support mode at width 1000 and 42 %
at 8192, with its best transport (batch 256, 50-token emissions, an H100 host; 35 % and 4 % before it). Those are rates of
its decode; its replies are complete long after, while here the rate is that of what arrived.
"""


def median(results, row, name):
    values = results.get(row, {}).get(name)
    return statistics.median(values) if values else None


def off_of(rows, row):
    """The row with masks off that this one is to be compared with."""
    return next((other for other in rows if other.mode == "off" and
                 (other.threads, other.reply, other.tokens) == (row.threads, row.reply, row.tokens)), None)


def share(value, whole):
    return None if value is None or not whole else value / whole


def percent(value):
    return "" if value is None else f"{100 * value:.1f} %"


def bytes_text(value):
    for unit in ("", " K", " M"):
        if value < 1000 or unit == " M":
            return f"{value:.0f}{unit}" if value >= 100 or unit == "" else f"{value:.1f}{unit}"
        value /= 1000
    return ""


def without_paths(command):
    return re.sub(r" --(markdown|json)[ =]\S+", "", command)


def write_table(page, results, threads, reply):
    rows = [row for row in results if (row.threads, row.reply) == (threads, reply)]
    if not rows:
        return
    name = {"whole": "Whole replies", "stream": "Streams"}[reply]
    page.lines += [f"### {name}, {threads} router thread{'s' if threads > 1 else ''}", ""]
    table = []
    for row in rows:
        speed, relay = median(results, row, "rate"), median(results, row, "relay")
        cells = [row.title(), rate(speed)]
        cells.append("" if row.mode == "off" else percent(share(speed, median(results, off_of(rows, row), "rate"))))
        cells += [rate(relay), percent(share(speed, relay))]
        cells += [bytes_text(median(results, row, name)) for name in ("reply_bytes", "frame_bytes")]
        cells.append(f"{median(results, row, 'pause_us') / 1000:.2f}")
        cells += [f"{median(results, row, f'cpu {name}'):.4f}" for name in ("router", "decode", "prefill", "client")]
        table.append(cells)
    head = ["masks", "tokens/s", "of off", "relay", "of relay", "reply bytes", "frame bytes"]
    head.append("pause, ms")
    page.table(head + [f"CPU {name}" for name in ("router", "decode", "prefill", "client")], table)


def check_goals(page, results):
    """Says which rows have no goal, because the relay cannot do it either."""
    rows, left_out = list(results), []
    for row in rows:
        if row.mode == "off":
            continue
        speed, relay = median(results, row, "rate"), median(results, row, "relay")
        off = median(results, off_of(rows, row), "rate")
        name = f"{row.title()}, {row.reply}, {row.threads} router thread{'s' if row.threads > 1 else ''}"
        is_widest = row.width == max(other.width for other in rows) and row.width > 1000
        if row.width == 0:
            continue  # realistic: the issue has no goal for them
        if row.format != "json" and is_widest:
            page.goal(f"{name}, of the relay", share(speed, relay), GOALS["relay"])
        elif row.format != "json" and off and relay >= GOALS["packed"] * off:
            page.goal(f"{name}, of masks off", share(speed, off), GOALS["packed"], shown="{:.3f}")
        elif row.format != "json" and off:
            left_out.append(f"- {name}: {percent(share(speed, relay))} of the relay, which has {percent(share(relay, off))} of masks off")
    return left_out


def cores_of(results, row):
    """Cores that were busy: all processes, the device's thread included."""
    spent = sum(median(results, row, f"cpu {name}") for name in ("router", "decode", "prefill", "client", "device"))
    return spent * median(results, row, "rate") / 1000


def scaling_of(results, row, other):
    """How many times faster the row got with the other's threads, and how much the cores allowed."""
    speed, off = median(results, row, "rate"), median(results, off_of(list(results), row), "rate")
    allowed = min(other.threads / row.threads, os.cpu_count() / cores_of(results, row), off / speed)
    return median(results, other, "rate") / speed, max(1.0, allowed)


def write_scaling(page, results):
    """JSON with more threads through JSON with one, where one is what bounds."""
    rows = list(results)
    first = min((row.threads for row in rows), default=0)
    table = []
    for other in rows:
        row = next((r for r in rows if dataclasses.replace(other, threads=first) == r), None)
        if row is None or other.threads == first or row.format != "json" or off_of(rows, row) is None:
            continue
        of_off = share(median(results, row, "rate"), median(results, off_of(rows, row), "rate"))
        ratio, allowed = scaling_of(results, row, other)
        name = f"{row.title()}, {row.reply}"
        table.append([name, percent(of_off), f"{cores_of(results, row):.2f}", str(other.threads), f"{ratio:.2f}", f"{allowed:.2f}"])
        if of_off < BOUND:
            page.goal(f"{name}, {other.threads} router threads through {first}, of what the cores allow", ratio / allowed, GOALS["scaling"])
    if table:
        page.lines += ["### JSON with more router threads", "", SCALING.format(first=first), ""]
        page.table(["masks", f"of off, {first} thread", "cores busy", "threads", "times as fast", "at most"], table)


def make_page(results, options):
    page = Page(results, options)
    connections = options.batch + max(2, options.batch // 8)
    page.lines += INTRODUCTION.format(
        command=without_paths(options.command),
        rounds="One round." if options.rounds == 1 else f"Medians of {options.rounds} rounds.",
        step=options.step_us / 1000,
        batch=options.batch,
        ideal=options.batch * 1e6 / options.step_us,
        connections=connections,
        window=options.window_ms / 1000,
        late=statistics.median(median(results, row, "late_us") for row in results),
        machine=machine(),
        others=others_note(results.load),
    ).splitlines()
    page.lines += ["", *PEERS.splitlines(), ""]
    for name in sorted(results.missing):
        page.lines += [f"**This build has no {name} replies: those rows are missing.**", ""]
    page.lines += ["## Tokens per second", ""]
    for threads in options.threads:
        for reply in options.replies:
            write_table(page, results, threads, reply)
    left_out = check_goals(page, results)
    write_scaling(page, results)
    page.lines += ["## Goals", ""]
    count = page.met + len(page.missed)
    page.lines.append(f"{page.met} of {count} goals were reached in this run. Not reached:" if page.missed else f"All {count} goals were reached in this run.")
    page.lines += ["", *page.missed] if page.missed else []
    if left_out:
        page.lines += ["", "The relay is too slow for a goal here:", "", *left_out]
    return "\n".join(page.lines).rstrip() + "\n"
