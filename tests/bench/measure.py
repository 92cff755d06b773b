"""What tests/bench/run measures: rows, each asked of Baton and of the peers in turn, round after round."""

import json
import os
import re
import subprocess
import sys

MODES = ("off", "selected", "support")
FEW_ROWS = "q8_0"  # in the name of a model: the rows that masks and long prompts do not change
STEPS = {1: 16, 4: 16, 16: 8, 64: 8}


def say(text):
    print(f"    {text}", file=sys.stderr, flush=True)


def prompts_of(model, options):
    return [min(options.prompts)] if FEW_ROWS in model else options.prompts


def modes_of(model):
    return MODES[:1] if FEW_ROWS in model else MODES


def is_contended(model, options):
    """One model is enough, for the peer may take minutes with a core less."""
    return "contended" in options.parts and model == next(iter(options.models))


class Baton:
    """bench_model with one model, waiting for commands."""

    name = "Baton"

    def __init__(self, binary, model, options):
        arguments = [binary, model, "--threads", str(options.threads), "--context", str(options.context)]
        arguments += ["--batch", str(max(options.batches)), "--ceiling-mib", str(options.ceiling_mib)]
        if options.isa:
            arguments += ["--isa", options.isa]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.card = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench_model ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def prompt(self, tokens):
        return tokens / self.ask(f"prompt {tokens}")["seconds"]

    def generate(self, batch):
        return batch / self.ask(f"generate {batch} off {STEPS[batch]}")["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Peer:
    """llama.cpp's llama-batched-bench, a process for each figure."""

    def __init__(self, name, folder, model, options):
        self.name = name
        self.model = model
        self.threads = options.threads
        self.context = options.context
        self.binary = next(
            (
                path
                for path in (os.path.join(folder, *parts, "llama-batched-bench") for parts in ((), ("bin",)))
                if os.path.exists(path)
            ),
            None,
        )
        if self.binary is None:
            sys.exit(f"no llama-batched-bench in {folder}")

    def figure(self, what, context, prompt, steps, batch):
        command = [self.binary, "-m", self.model, "-t", str(self.threads), "-tb", str(self.threads)]
        command += ["-c", str(context), "-b", "2048", "-ub", "512", "-pps", "--output-format", "jsonl"]
        command += ["-npp", str(prompt), "-ntg", str(steps), "-npl", str(batch)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        found = re.search(rf'"{what}": ([0-9.]+)', done.stdout)
        if done.returncode != 0 or not found:
            sys.exit(f"{' '.join(command)}: no figure\n{done.stderr[-2000:]}")
        return float(found.group(1))

    def prompt(self, tokens):
        return self.figure("speed_pp", tokens + 256, tokens, 1, 1)

    def generate(self, batch):
        # Every sequence has its own cache, of a multiple of 256 tokens.
        return self.figure("speed_tg", batch * (self.context + 256), self.context, STEPS[batch], batch)


class Busy:
    """Another program that takes one core."""

    def __init__(self, core):
        self.core = core

    def __enter__(self):
        code = f"import os\nos.sched_setaffinity(0, [{self.core}])\nprint(1, flush=True)\nwhile True: pass"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self.process.stdout.readline()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Results(dict):
    """(model, row, who) -> one figure a round, None where it could not be."""

    def add(self, model, row, who, value):
        self.setdefault((model, row, who), []).append(value)
        say(f"{model} {row} {who}: {value:.4g}")


def measure_prompts(results, model, baton, peers, options, top):
    for tokens in prompts_of(model, options):
        row = f"prompt {tokens}"
        answer = baton.ask(row)
        results.add(model, row, "Baton", tokens / answer["seconds"])
        results.add(model, row, "of FMA", answer["flops"] / answer["seconds"] / top["fma"])
        for peer in peers:
            results.add(model, row, peer.name, peer.prompt(tokens))
    rows = min(512, max(options.prompts))
    answer = baton.ask(f"linear {rows}")
    results.add(model, "linear", "Baton", rows / answer["seconds"])
    results.add(model, "linear", "of FMA", answer["flops"] / answer["seconds"] / top["fma"])


def measure_generation(results, model, baton, peers, options, top):
    for batch in options.batches:
        for mode in modes_of(model):
            row = f"batch {batch} {mode}"
            answer = baton.ask(f"generate {batch} {mode} {STEPS[batch]}")
            seconds = answer["seconds"]
            results.add(model, row, "Baton", batch / seconds)
            results.add(model, row, "of FMA", answer["flops"] / seconds / top["fma"])
            results.add(model, row, "of read", answer["weight_bytes"] / seconds / top["read"])
            if mode == "off":
                for peer in peers:
                    results.add(model, row, peer.name, peer.generate(batch))


def measure_capture(results, model, baton, options):
    batch = max(options.batches)
    answer = baton.ask(f"capture {batch} {STEPS[batch]}")
    results.add(model, "capture", "step", answer["off"])
    results.add(model, "capture", "difference", answer["difference"] / answer["off"])
    results.add(model, "capture", "inside", answer["inside"])


def measure_contended(results, model, baton, peers, options):
    tokens = min(options.prompts)
    for who in [baton, *peers]:
        for row, ask in ((f"prompt {tokens}", lambda w: w.prompt(tokens)), ("batch 1", lambda w: w.generate(1))):
            free = ask(who)
            with Busy(options.busy_core):
                taken = ask(who)
            results.add(model, f"contended {row}", who.name, free / taken)


def measure_round(results, model, baton, peers, options):
    top = baton.ask("ceilings")
    for name in ("read", "fma"):
        results.add(model, "ceiling", name, top[name])
    if "prompts" in options.parts:
        measure_prompts(results, model, baton, peers, options, top)
    if "generation" in options.parts:
        measure_generation(results, model, baton, peers, options, top)
    if "capture" in options.parts and FEW_ROWS not in model:
        measure_capture(results, model, baton, options)
    if is_contended(model, options):
        measure_contended(results, model, baton, peers, options)


def measure(options):
    """Round after round through all models, so that no model has the quiet hour for itself."""
    results = Results(load=os.getloadavg()[0])
    batons = {name: Baton(options.binary, path, options) for name, path in options.models.items()}
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}")
        for name, path in options.models.items():
            peers = [Peer(label, folder, path, options) for label, folder in options.peers.items()]
            measure_round(results, name, batons[name], peers, options)
    for baton in batons.values():
        results.setdefault("isa", baton.card["isa"])
        baton.close()
    return results
