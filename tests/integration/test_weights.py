#!/usr/bin/env python3
"""The workers of one machine share packed weights: they map one file, and count its pages once."""
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import (DEMO_MODEL, Cluster, case, check, equal, run_cases, tiny_model, wait_until)

SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def settled(model):
    """Waits until the model's files are old enough to be kept: their times must tell them from what
    could be written next."""
    paths = [model] if pathlib.Path(model).is_file() else list(pathlib.Path(model).iterdir())
    wait_until(lambda: all(time.time() - os.stat(p).st_ctime > 0.2 for p in paths), "settled files")


def mapping_of(pid, folder):
    """Rss, Pss and so on, in KiB, of what a process has mapped from a folder."""
    sums, inside = {}, False
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        parts = line.split()
        if "-" in parts[0] and not parts[0].endswith(":"):
            inside = str(folder) in line and line.endswith(".weights")
            if inside:
                equal(parts[1], "r--s", f"mapped read-only and shared: {line!r}")
        elif inside and len(parts) >= 2 and parts[1].isdigit():
            key = parts[0].rstrip(":")
            sums[key] = sums.get(key, 0) + int(parts[1])
    return sums


def check_shared(model, decode):
    with tempfile.TemporaryDirectory(prefix="baton-weights.") as folder:
        settled(model)
        shared = ["--weights-cache", folder]
        with Cluster(model, prefill=1, decode=decode, shared=shared) as cluster:
            answer = cluster.generate(input_ids=[5, 6, 7], sampling_params=SHORT)
            equal(answer.status, 200, answer.body)
            files = list(pathlib.Path(folder).glob("*.weights"))
            equal(len(files), 1, f"one entry: {files}")
            size = files[0].stat().st_size >> 10
            pids = cluster.pids("prefill") + cluster.pids("decode")
            equal(len(pids), 1 + decode, "workers")
            uses = [mapping_of(pid, folder) for pid in pids]
            for pid, use in zip(pids, uses):
                check(use.get("Size", 0) > 0.9 * size, f"{pid} has not mapped it: {use}")
                equal(use["Private_Dirty"], 0, "nothing of it is a copy")
            # Rss counts a page in every process, Pss a part of it in each.
            check(sum(use["Rss"] for use in uses) > 1.5 * size, f"not shared at all: {uses}")
            check(sum(use["Pss"] for use in uses) < 1.1 * size, f"held more than once: {uses}")
        # What is there is used again, with the same answer.
        before = files[0].stat().st_ino
        with Cluster(model, shared=shared) as cluster:
            again = cluster.generate(input_ids=[5, 6, 7], sampling_params=SHORT)
            equal(again.json["output_ids"], answer.json["output_ids"], "the answer")
        equal([p.stat().st_ino for p in pathlib.Path(folder).glob("*.weights")], [before], "the file")
        equal(list(pathlib.Path(folder).glob("*.partial")), [], "no file is left half-written")


@case
def workers_share_one_file():
    check_shared(tiny_model(), decode=3)


if DEMO_MODEL:
    @case
    def workers_share_the_demo_model():
        check_shared(DEMO_MODEL, decode=1)


if __name__ == "__main__":
    run_cases()
