"""What tests/bench/masks measures, see there: decode tokens/s of a whole cluster on the sim device, with and without
masks, and what a bare relay of the same bytes would carry. The page is masks_page.py's."""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "integration"))

import masks_page  # noqa: E402
from harness import Cluster, tiny_model  # noqa: E402

BENCH = pathlib.Path(os.environ.get("BATON_BENCH_BIN", "build/bench"))
PROMPT_TOKENS = 16
LENGTHS = 8  # replies of each connection, before lengths are used again
# Of tokens with so many bytes the bytes tell how many there were, finer than complete replies do; below, the text and
# how many tokens an event has make a difference.
BYTES_COUNT = 4000
# Of a row in the stream from decode (proto/row_stream.h), and about what the frame around it takes.
RECORD_BYTES = 40
FRAME_BYTES = 50
WIDE = 1000  # from here on rows are measured with every number of router threads
# A width of its own for every row, as kernels/sim_rows.h has them: what they are on average, and at most.
REALISTIC, REALISTIC_MEAN, REALISTIC_MAX = 0, 8, 256
# What the sim device logs of its steps: how many, how late they ended, after which pause the next one followed.
STEPS = re.compile(r"sim: (\d+) steps, .* ended (\d+) us late .* followed after (\d+) us")
DEVICE = "sim-device"  # the thread of the sim device, which is no part of the pipeline


def numbers(text):
    return [int(part) for part in text.split(",")]


def widths(text):
    return [REALISTIC if part == "realistic" else int(part) for part in text.split(",")]


def words(text):
    return text.split(",")


def parse():
    parser = argparse.ArgumentParser(prog="tests/bench/masks")
    parser.add_argument("--tokenizer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--command", default="tests/bench/masks", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--step-us", type=int, default=14000)
    parser.add_argument("--widths", type=widths, default=[20, 1000, 8192, REALISTIC])
    parser.add_argument("--modes", type=words, default=["selected", "support"])
    parser.add_argument("--formats", type=words, default=["json", "packed", "safetensors"])
    parser.add_argument("--replies", type=words, default=["whole", "stream"])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=0, help="of a reply on average; 0: 128, and 32 of the widest rows")
    parser.add_argument("--warmup-ms", type=int, default=2800)
    parser.add_argument("--window-ms", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--markdown", default="", metavar="FILE", help="write the page there, not to standard output")
    return parser.parse_args()


def say(text):
    print(f"    {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the tables."""

    threads: int
    reply: str  # whole, stream
    mode: str  # off, selected, support
    width: int  # 0 with masks off; REALISTIC
    format: str  # json, packed, safetensors; "" with masks off
    tokens: int  # of a reply, on average

    def title(self):
        if self.mode == "off":
            return f"off ({self.tokens} tokens a reply)"
        return f"{self.mode} {self.width or 'realistic'}, {self.format}"

    def frame_bytes(self):
        """From decode to the router, for each token."""
        numbers = {"off": 0, "selected": 1, "support": 2}[self.mode]
        return FRAME_BYTES + RECORD_BYTES + 4 * numbers * (self.width or REALISTIC_MEAN)

    def body(self):
        """The fields of a request, but its prompt and its length."""
        fields = {"stream": self.reply == "stream"}
        if self.mode != "off":
            fields |= {"return_sampling_mask": True, "sampling_logprobs_mode": self.mode}
        if self.format == "packed":
            fields["sampling_mask_format"] = "packed"
        return fields


def rows_of(options, threads):
    """Rows of all kinds for the first number of threads; for the others those where the router is what bounds."""
    is_first = threads == options.threads[0]
    rows = []
    for reply in options.replies:
        fixed = fixed_widths(options)
        lengths = {width: options.tokens or (128 if width <= WIDE else 32) for width in fixed}
        widths = [width for width in fixed if is_first or width >= min(WIDE, max(fixed))]
        for tokens in sorted({lengths[width] for width in widths}, reverse=True):
            rows.append(Row(threads, reply, "off", 0, "", tokens))
        for width in widths:
            for mode in options.modes:
                rows += [Row(threads, reply, mode, width, format, lengths[width]) for format in options.formats
                         if format != "safetensors" or is_a_file(reply, mode, threads == options.threads[0])]
    return rows


def fixed_widths(options):
    return [width for width in options.widths if width != REALISTIC]


def realistic_rows(options):
    """Of one mode, for the first number of threads; masks off only where no other row has them at that length."""
    rows, tokens = [], options.tokens or 128
    for reply in options.replies:
        if not any(width <= WIDE for width in fixed_widths(options)):
            rows.append(Row(options.threads[0], reply, "off", 0, "", tokens))
        rows += [Row(options.threads[0], reply, options.modes[-1], REALISTIC, format, tokens) for format in options.formats if format != "safetensors"]
    return rows


def is_a_file(reply, mode, is_first):
    """Whether there is a row of files: a stream is none, and one kind is enough."""
    return reply == "whole" and mode == "support" and is_first


# ---- processes


class Process:
    """CPU seconds of a process from the scheduler's own counts, the sim device's thread apart."""

    def __init__(self, pid):
        self.pid = pid

    def cpu(self):
        own = device = 0
        for task in os.listdir(f"/proc/{self.pid}/task"):
            folder = f"/proc/{self.pid}/task/{task}"
            with open(f"{folder}/comm", encoding="ascii") as file:
                is_device = file.read().strip() == DEVICE
            with open(f"{folder}/schedstat", encoding="ascii") as file:
                spent = int(file.read().split()[0]) * 1e-9
            own, device = own + spent * (not is_device), device + spent * is_device
        return own, device


def start_cluster(options, threads, is_realistic):
    widest = REALISTIC_MAX if is_realistic else max(fixed_widths(options))
    support = "realistic" if is_realistic else str(widest)
    connections = connections_of(options)
    router = f"--http-threads {threads} --sampling-mask-max-tokens {widest + 1024} --incremental-streaming-output "
    router += "--reply-memory 6G --requests-max 4096"
    prefill = "--sim-step-us 1000 --prompts-max 16 --sequences-max 128 --prefix-cache off --kv-pages 4096"
    decode = f"--sim-step-us {options.step_us} --sim-report-ms {max(10, options.window_ms // 8)} --sequences-max {options.batch} --kv-pages {64 * options.batch}"
    return Cluster(options.tokenizer or tiny_model("llama"), shared=["--sim-support", support], options=[
        "--device", "sim", "--router-options", router, "--prefill-options", prefill, "--decode-options", decode])


def connections_of(options):
    """Some more than the batch, so that decode is full although some requests are on their way."""
    return options.batch + max(2, options.batch // 8)


# ---- measuring


def request_of(row, prompt, tokens):
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    if row.mode != "off":
        sampling["top_k"] = row.width or REALISTIC_MAX
    return {"input_ids": prompt, "sampling_params": sampling, **row.body()}


def left_of(share, tokens):
    """What is left of a reply that is found at a moment when replies end all the time, where lengths are spread evenly
    from half of `tokens` to one and a half: the length that a share of the replies has less than. (The integral
    of the share of replies that are longer, over the mean.)"""
    return tokens * (share if share < 0.5 else 1.5 - math.sqrt(2 * (1 - share)))


def lengths_of(row, connections):
    """Tokens of each reply: first for each connection what is left of a reply that began before, so that as many end in
    any time from the beginning; then, for each of them, every length from half to one and a half times what they
    have on average once, in a drawn order. Replies of one length would end together before long, and what ends in a
    window would be a matter of its phase."""
    draw = random.Random(2)
    lengths = [math.ceil(left_of((number + 0.5) / connections, row.tokens)) for number in range(connections)]
    draw.shuffle(lengths)
    spread = [round(row.tokens * (0.5 + (number + 0.5) / connections)) for number in range(connections)]
    for _ in range(LENGTHS):
        draw.shuffle(spread)
        lengths += spread
    return lengths


def write_bodies(options, row, path):
    draw = random.Random(1)
    connections = connections_of(options)
    with open(path, "w", encoding="ascii") as file:
        for tokens in lengths_of(row, connections):
            prompt = [draw.randrange(200) for _ in range(PROMPT_TOKENS)]
            file.write(f"{tokens}\t{json.dumps(request_of(row, prompt, tokens), separators=(',', ':'))}\n")
    return connections


def accepted(row):
    return "application/x-safetensors" if row.format == "safetensors" else "application/json"


def check_reply(row, reply):
    """One reply by itself, looked at: whether this build knows the format, and that rows are as wide as they should."""
    if reply.status != 200:
        sys.exit(f"{row}: {reply.status} {reply.body[:300]!r}")
    if row.format == "safetensors":
        return reply.headers.get("Content-Type", "") == accepted(row)
    metas = [event["meta_info"] for event in reply.events] if row.reply == "stream" else [reply.json["meta_info"]]
    keys = set().union(*metas)
    if row.mode == "off":
        if any("sampling_mask" in key or "sampling_packed" in key for key in keys):
            sys.exit(f"{row}: masks that nobody asked for")
        return True
    if row.format == "packed":
        return "output_token_sampling_packed" in keys
    widths = [len(ids) for meta in metas for ids in meta["output_token_sampling_mask"]]
    if row.width == REALISTIC:
        is_good = len(widths) == row.tokens and len(set(widths)) > 1 and 1 <= min(widths) and max(widths) <= REALISTIC_MAX
    else:
        is_good = widths == [row.width] * row.tokens
    if not is_good:
        sys.exit(f"{row}: rows of {sorted(set(widths))}, {len(widths)} of them")
    return True


def probe(cluster, row):
    """Bytes of a reply per token, with nothing else going on: of its body alone, and with the head. None: no such format."""
    cluster.wait_at_rest()
    body = request_of(row, list(range(PROMPT_TOKENS)), row.tokens)
    reply = cluster.request("POST", "/generate", body, {"Accept": accepted(row)})
    if not check_reply(row, reply):
        return None
    head = sum(len(name) + len(value) + 4 for name, value in reply.headers.items())
    return len(reply.body) / row.tokens, (len(reply.body) + head) / row.tokens


def relay(options, row, reply_bytes):
    """Tokens/s of the bare relay."""
    command = [BENCH / "socket_relay", "--step-us", str(options.step_us), "--window-ms", str(max(200, options.window_ms // 4))]
    command += ["--frame-bytes", str(row.frame_bytes() * options.batch)]
    command += ["--reply-bytes", str(max(1, round(reply_bytes * options.batch)))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["steps_per_second"] * options.batch


def replies_of(row, connections, reply_bytes):
    """At least so many belong to the window. When whole replies are large, decode runs ahead until the router has all
    of them and then waits: nothing shorter than a reply of each connection says what goes through on average."""
    if reply_bytes < BYTES_COUNT:
        return 2
    return connections if row.reply == "whole" and row.width > WIDE else 0


class Steps:
    """What the decode worker's device logs from now on."""

    def __init__(self, cluster):
        self.path = pathlib.Path(cluster.folder.name, "decode0.log")
        self.start = self.path.stat().st_size

    def means(self):
        """Microseconds that a step ended late, and of the pause behind it."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            found = [[int(word) for word in match] for match in STEPS.findall(file.read().decode())]
        steps = sum(line[0] for line in found)
        return [sum(line[0] * line[at] for line in found) / max(1, steps) for at in (1, 2)]


def load(options, cluster, row, reply_bytes):
    """The row under load, for the window: what the client counted, and CPU seconds by name."""
    processes = {name: Process(cluster.pids(name)[0]) for name in ("router", "prefill", "decode")}
    with tempfile.NamedTemporaryFile("w", prefix="baton-bench.") as bodies:
        connections = write_bodies(options, row, bodies.name)
        command = [BENCH / "load_client", "--address", f"{cluster.host}:{cluster.port}", "--bodies", bodies.name]
        command += ["--connections", connections, "--restart", connections, "--accept", accepted(row)]
        command += ["--warmup-ms", options.warmup_ms, "--window-ms", options.window_ms]
        command += ["--replies", replies_of(row, connections, reply_bytes)]
        with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as client:
            client.stdout.readline()
            steps = Steps(cluster)
            before = {name: process.cpu() for name, process in processes.items()}
            line = client.stdout.readline()
            after = {name: process.cpu() for name, process in processes.items()}
            answer_steps = steps.means()
        if client.returncode != 0 or not line:
            sys.exit(f"{row}: the client ended with status {client.returncode}")
    answer = json.loads(line)
    if answer["failed"]:
        sys.exit(f"{row}: {answer['failed']} requests failed")
    cpu = {name: after[name][0] - before[name][0] for name in processes}
    cpu["device"] = after["decode"][1] - before["decode"][1]
    cpu["client"] = answer["cpu_seconds"]
    answer["late_us"], answer["pause_us"] = answer_steps
    return answer, cpu


def rate_of(answer, body_bytes):
    if body_bytes >= BYTES_COUNT:
        return answer["body_bytes"] / body_bytes / answer["seconds"]
    return answer["reply_tokens"] / max(1e-6, answer["reply_seconds"])


def measure_row(options, cluster, row, results):
    probed = probe(cluster, row)
    if probed is None:
        results.missing.add(row.format)
        return
    body_bytes, reply_bytes = probed
    answer, cpu = load(options, cluster, row, body_bytes)
    rate = rate_of(answer, body_bytes)
    figures = {
        "rate": rate,
        "relay": relay(options, row, reply_bytes),
        "reply_bytes": reply_bytes,
        "frame_bytes": row.frame_bytes(),
        "first_byte_ms": answer["first_byte_ms"][0],
        "late_us": answer["late_us"],
        "pause_us": answer["pause_us"],
        **{f"cpu {name}": 1000 * spent / (rate * answer["seconds"]) for name, spent in cpu.items()},
    }
    results.add(row, figures)


class Results(dict):
    """Row -> figure -> one value a round."""

    def __init__(self):
        super().__init__()
        self.missing = set()  # formats that this build does not have
        self.load = os.getloadavg()[0]

    def add(self, row, figures):
        kept = self.setdefault(row, {})
        for name, value in figures.items():
            kept.setdefault(name, []).append(value)
        say(f"{row.threads} thread(s), {row.reply}, {row.title()}: {figures['rate']:.0f} tokens/s, relay {figures['relay']:.0f}")


def measure(options):
    results = Results()
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}")
        for threads in options.threads if fixed_widths(options) else []:
            with start_cluster(options, threads, False) as cluster:
                for row in rows_of(options, threads):
                    measure_row(options, cluster, row, results)
        if REALISTIC in options.widths:
            with start_cluster(options, options.threads[0], True) as cluster:
                for row in realistic_rows(options):
                    measure_row(options, cluster, row, results)
    return results


def main():
    options = parse()
    started = time.monotonic()
    results = measure(options)
    say(f"took {time.monotonic() - started:.0f} s")
    if options.json:
        with open(options.json, "w", encoding="ascii") as file:
            json.dump([{**dataclasses.asdict(row), **figures} for row, figures in results.items()], file, indent=1)
    page = masks_page.make_page(results, options)
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
