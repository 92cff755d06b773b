"""Workers as processes, driven by baton-pd-run (a router without HTTP): a cluster's rows equal those
of one process to the bit, over tcp and shared memory, alone and batched; and what the two programs do
at their edges: refusals, models that cannot be used, routers that go and come back, signals."""

import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integration"))
from harness import (BIN, DEMO_MODEL, IS_FEW, TEST_BIN, Skip, case, check, equal, is_alive, run_cases,
                     tiny_model, wait_until)

CAP = 400
cached_tokens = retractions = 0  # of the last cluster, over all its samples


class Router:
    """baton-pd-run with its cases; the workers dial it."""

    def __init__(self, model, cases, *options, port=0):
        self.folder = tempfile.TemporaryDirectory()
        self.port_file = pathlib.Path(self.folder.name) / "port"
        self.process = subprocess.Popen(
            [TEST_BIN / "baton-pd-run", "--model", model, "--control", f"127.0.0.1:{port}",
             "--port-file", self.port_file, "--sampling-mask-max-tokens", str(CAP), *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.process.stdin.write(cases)
        self.process.stdin.close()
        self.process.stdin = None
        self.port = int(wait_until(self._read_port, "the port file"))

    def _read_port(self):
        return self.port_file.exists() and self.port_file.read_text().strip()

    def result(self, timeout=300):
        out, err = self.process.communicate(timeout=timeout)
        check(self.process.returncode == 0, f"pd-run ended with {self.process.returncode}: {err}")
        told = re.search(r"(\d+) cached tokens, (\d+) retractions", err)
        global cached_tokens, retractions
        cached_tokens, retractions = int(told[1]), int(told[2])
        return out

    def stop(self):
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


class Worker:
    def __init__(self, role, model, port, *options):
        self.log = tempfile.NamedTemporaryFile(mode="r", suffix=f"-{role}.log")
        self.process = subprocess.Popen(
            [BIN / f"baton-{role}", "--model", model, "--router", f"127.0.0.1:{port}",
             "--threads", "1", "--kv-bytes", "32M", *options],
            stdout=subprocess.DEVNULL, stderr=open(self.log.name, "w"))

    def text(self):
        return pathlib.Path(self.log.name).read_text()

    def wait(self, seconds=60):
        return self.process.wait(timeout=seconds)

    def stop(self):
        """SIGTERM must be a clean end, whatever the worker does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=120)
        finally:
            self.process.kill()
        check(status == 0, f"a worker ended with {status}:\n{self.text()}")


def make_cases(vocabulary, count=8, most=40, prompt=90, seed=1):
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        ids = ",".join(str(draw.randrange(vocabulary)) for _ in range(draw.randrange(1, prompt)))
        mask = ("off", "selected", "support")[number % 3]
        top_k = draw.choice((1, 5, 50, 200))
        lines.append(
            f"name=c{number} ids={ids} max_new_tokens={draw.randrange(1, most)} mask={mask} "
            f"temperature={draw.choice((0.7, 1, 1.4))} top_p={draw.choice((1, 0.9))} "
            f"top_k={top_k} logprob={number % 2} seed={draw.randrange(2**63)} "
            f"stop={draw.randrange(vocabulary)}\n")
    return "".join(lines)


def make_wide_cases(vocabulary, count=12, most=30, prompt=90, seed=7, prefixes=2):
    """Every sampling parameter, n > 1, scored prompts; the prompts share a few beginnings."""
    draw = random.Random(seed)
    starts = [[draw.randrange(vocabulary) for _ in range(70)] for _ in range(prefixes)]
    ids = lambda most: draw.sample(range(vocabulary), draw.randrange(1, most))
    lines = []
    for number in range(count):
        start = starts[number % prefixes][:draw.randrange(0, 71)]
        tail = [draw.randrange(vocabulary) for _ in range(draw.randrange(1, prompt))]
        new = draw.randrange(1, most)
        words = [f"name=w{number}", "ids=" + ",".join(map(str, start + tail)),
                 f"max_new_tokens={new}", f"mask={('off', 'selected', 'support')[number % 3]}",
                 f"n={(1, 1, 2, 5)[number % 4]}", f"seed={draw.randrange(2**63)}",
                 f"temperature={draw.choice((0.7, 1, 1.4))}", f"top_k={draw.choice((1, 7, 50, 200))}",
                 f"top_p={draw.choice((1, 0.9))}", f"min_p={draw.choice((0, 0, 0.02, 0.3))}",
                 f"filter={draw.choice(('joint', 'rank'))}",
                 f"frequency_penalty={draw.choice((0, 0.7, -0.3))}",
                 f"presence_penalty={draw.choice((0, 0.4))}",
                 f"repetition_penalty={draw.choice((1, 1.3))}",
                 "stop=" + ",".join(map(str, ids(5)))]
        if number % 3 == 1:
            words.append("bias=" + ",".join(f"{i}:{draw.uniform(-4, 4):.3f}" for i in ids(9)))
        if number % 5 == 2:
            words.append(f"min_new_tokens={draw.randrange(0, new + 1)}")
            words.append(f"ignore_stop={draw.randrange(2)}")
        if number % 2 == 0:
            words += ["logprob=1", f"top={draw.choice((0, 1, 20))}",
                      "logprob_ids=" + ",".join(map(str, ids(6)))]
            if number % 4 == 0:
                words.append(f"prompt_logprobs_from={draw.randrange(0, len(start + tail))}")
        lines.append(" ".join(words) + "\n")
    return "".join(lines)


def oracle(model, cases, *options):
    done = subprocess.run([TEST_BIN / "baton-oracle", "--model", model, "--sampling-mask-max-tokens",
                           str(CAP), *options], input=cases, capture_output=True, text=True,
                          timeout=300)
    check(done.returncode == 0, f"the oracle failed: {done.stderr}")
    return done.stdout


def cluster(model, cases, prefill, decode, worker_options=(), router_options=(), prefill_options=(),
            look=None):
    """The results of a cluster's run; look, if given, is called with the workers behind it."""
    router = Router(model, cases, "--prefill", str(prefill), "--decode", str(decode),
                    *router_options)
    workers = []
    try:
        for _ in range(prefill):
            workers.append(Worker("prefill", model, router.port, *worker_options, *prefill_options))
        for _ in range(decode):
            workers.append(Worker("decode", model, router.port, *worker_options))
        try:
            result = router.result()
            if look is not None:
                look(workers)
            return result
        except BaseException:
            for worker in workers:
                print(f"# {worker.text()}"[-2000:].replace("\n", "\n# "), file=sys.stderr)
            raise
    finally:
        router.stop()
        for worker in workers:
            worker.stop()


def same(actual, expected, what):
    for one, other in zip(actual.splitlines(), expected.splitlines()):
        equal(one[:500], other[:500], what)
    equal(len(actual.splitlines()), len(expected.splitlines()), what)


def compare(model, cases, prefill, decode, **options):
    same(cluster(model, cases, prefill, decode, **options), oracle(model, cases),
         f"{prefill}x{decode} {options}")


# ---- equal to one process ----------------------------------------------------------------------

@case
def the_oracle_does_not_depend_on_batch_chunks_threads_or_pages():
    for family in ("llama", "qwen2", "qwen3"):
        model = tiny_model(family)
        cases = make_cases(256)
        alone = oracle(model, cases)
        same(oracle(model, cases, "--batch", "8"), alone, "batch")
        same(oracle(model, cases, "--chunk-tokens", "7"), alone, "chunks")
        same(oracle(model, cases, "--threads", "3"), alone, "threads")
        same(oracle(model, cases, "--page-tokens", "16", "--batch", "3"), alone, "pages")


@case
def one_pair_over_tcp_equals_one_process():
    for family in ("llama", "qwen2", "qwen3"):
        compare(tiny_model(family), make_cases(256), 1, 1)


@case
def one_pair_over_shared_memory_equals_one_process():
    compare(tiny_model("qwen3"), make_cases(256), 1, 1, worker_options=("--ucx-tls", "shm"))


@case
def two_by_two_equals_one_process_over_both():
    model = tiny_model("llama")
    for tls in ("tcp", "shm"):
        compare(model, make_cases(256, count=24), 2, 2, worker_options=("--ucx-tls", tls))


@case
def one_after_the_other_and_in_small_chunks_equals_one_process():
    compare(tiny_model("qwen2"), make_cases(256, count=5), 1, 1, router_options=("--serial",),
            prefill_options=("--chunk-tokens", "5"))


def cases_that_begin_alike(vocabulary, count, seed=1, extra=""):
    """Prompts of up to three parts, each one of two: prefixes of many lengths come again."""
    draw = random.Random(seed)
    parts = [[[draw.randrange(vocabulary) for _ in range(length)] for _ in range(2)]
             for length in (70, 33, 40)]
    lines = []
    for number in range(count):
        ids = draw.choice(parts[0])[:draw.choice((31, 32, 33, 64, 70))]
        if len(ids) == 70:
            ids = ids + draw.choice(parts[1]) + draw.choice(parts[2])[:draw.randrange(40)]
        lines.append(f"name=c{number} ids={','.join(map(str, ids))} max_new_tokens=4 mask=support "
                     f"top_k=50 logprob=1 seed={draw.randrange(2**63)} {extra}\n")
    return "".join(lines)


def cached_tokens_of(workers):
    text = "".join(worker.text() for worker in workers)
    return sum(int(tokens) for tokens in re.findall(r"(\d+) cached tokens", text))


@case
def prompts_that_begin_alike_get_the_rows_of_one_process():
    for family in ("llama", "qwen2", "qwen3"):
        model, cases = tiny_model(family), cases_that_begin_alike(256, 24)
        expected = oracle(model, cases)
        for cache, router_options in (("on", ()), ("on", ("--serial",)), ("off", ())):
            seen = []
            result = cluster(model, cases, 1, 1, worker_options=("--log-level", "debug"),
                             router_options=router_options,
                             prefill_options=("--prefix-cache", cache, "--chunk-tokens", "50"),
                             look=lambda workers: seen.append(cached_tokens_of(workers)))
            same(result, expected, f"{family}, cache {cache} {router_options}")
            check((seen[0] > 500) == (cache == "on"), f"{seen[0]} tokens came from the cache")


@case
def a_prefill_with_few_pages_evicts_and_changes_nothing():
    model, cases = tiny_model("qwen3"), cases_that_begin_alike(256, 24, seed=2)
    same(cluster(model, cases, 1, 1, prefill_options=("--kv-pages", "9", "--prompts-max", "3")),
         oracle(model, cases), "9 pages")


@case
def samples_and_prompt_log_probabilities_equal_one_process():
    for family in ("llama", "qwen3"):
        model = tiny_model(family)
        cases = (cases_that_begin_alike(256, 6, seed=3, extra="n=5 top=7 logprob_ids=3,200 bias=9:4")
                 + cases_that_begin_alike(256, 6, seed=4, extra="prompt_logprobs_from=5 top=3")
                 .replace("name=c", "name=p"))
        for options in ((), ("--chunk-tokens", "7", "--prompts-max", "2")):
            same(cluster(model, cases, 1, 1, prefill_options=options), oracle(model, cases),
                 f"{family} {options}")


@case
def samples_biases_and_all_log_probabilities_equal_one_process():
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        compare(tiny_model(family), make_wide_cases(256), 1, 1)
    compare(tiny_model("llama"), make_wide_cases(256, count=16, seed=2), 2, 2,
            worker_options=("--ucx-tls", "shm"))
    compare(tiny_model("qwen2"), make_wide_cases(256, count=6, seed=3), 1, 1,
            router_options=("--serial", "--credited"), prefill_options=("--chunk-tokens", "5"))


@case
def log_probabilities_of_a_prompt_alone():
    draw = random.Random(5)
    cases = "".join(
        f"name=p{i} ids={','.join(str(draw.randrange(256)) for _ in range(200))} max_new_tokens=0 "
        f"logprob=1 top={i} prompt_logprobs_from={start}\n" for i, start in enumerate((0, 150, 199)))
    compare(tiny_model("llama"), cases, 1, 1)


@case
def a_reader_with_credit_gets_the_same_rows():
    compare(tiny_model("qwen3"), make_cases(256, count=12, most=200), 1, 2,
            router_options=("--credited",))


@case
def few_pages_make_requests_wait_and_change_nothing():
    compare(tiny_model("llama"), make_cases(256, count=16), 2, 1,
            worker_options=("--kv-pages", "9", "--sequences-max", "3"))


@case
def retracted_samples_are_computed_again_to_the_same_bits():
    retractions = 0
    for seed, family in enumerate(("llama", "qwen2", "qwen3")):
        model = tiny_model(family)
        cases = make_wide_cases(256, count=12, most=120, seed=seed)
        router = Router(model, cases)
        workers = [Worker("prefill", model, router.port, "--page-tokens", "16"),
                   Worker("decode", model, router.port, "--page-tokens", "16", "--kv-pages", "15",
                          "--chunk-tokens", "7", "--log-level", "debug")]
        try:
            same(router.result(), oracle(model, cases), family)
            retractions += workers[1].text().count("retracted at")
        finally:
            router.stop()
            for worker in workers:
                worker.stop()
    check(retractions >= 3, f"{retractions} retractions")


@case
def checksums_of_every_kind():
    model, cases = tiny_model("llama"), make_cases(256, count=4)
    for kind in ("off", "sampled", "full"):
        compare(model, cases, 1, 1, router_options=("--kv-checksum", kind))


@case
def float32_pages_equal_one_process():
    model, cases = tiny_model("qwen3"), make_cases(256, count=4)
    same(cluster(model, cases, 1, 1, worker_options=("--kv-dtype", "f32", "--page-tokens", "64")),
         oracle(model, cases, "--kv-dtype", "f32"), "f32 pages")


@case
def the_demo_model_equals_one_process():
    if not DEMO_MODEL:
        raise Skip("BATON_DEMO_MODEL is not set")
    cases = make_cases(40000, count=3, most=12, prompt=50) if IS_FEW else make_cases(40000, count=6, most=24, prompt=120)
    compare(DEMO_MODEL, cases, 1, 1, worker_options=("--kv-bytes", "64M"))
    if IS_FEW:  # two by two over shared memory is what integration_equal takes then
        return
    compare(DEMO_MODEL, cases, 2, 2, worker_options=("--kv-bytes", "64M", "--ucx-tls", "shm"))


@case
def an_overflow_at_any_row_ends_there():
    model = tiny_model("llama")
    cases = "".join(f"name=o{i} ids={i + 1},2,3 max_new_tokens=30 mask=support temperature=3 "
                    f"seed={i}\n" for i in range(4))
    global CAP
    CAP = 255
    try:
        expected = oracle(model, cases)
        check(" finish overflow " in expected, "a support is larger than 255")
        same(cluster(model, cases, 1, 1), expected, "overflow")
    finally:
        CAP = 400


@case
def bounded_rows_are_cut_as_in_one_process():
    model = tiny_model("qwen3")
    cases = "".join(f"name=b{i} ids={i + 1},2,3 max_new_tokens=20 mask={('selected', 'support')[i % 2]} bounded=1 "
                    f"temperature={1 + i / 2} top_k={(0, 30, 300)[i % 3]} top_p={(1, 0.9)[i % 2]} "
                    f"filter={('joint', 'rank')[i // 3 % 2]} seed={i} n={1 + i % 2} logprob=1\n" for i in range(8))
    global CAP
    for CAP in (1, 20):
        try:
            expected = oracle(model, cases)
            check(" finish overflow " not in expected, "a bounded support does not overflow")
            rows = [line.split() for line in expected.splitlines() if " support " in line]
            cut = [words for words in rows
                   if int(words[words.index("size") + 1]) > len(words) - words.index("support") - 1]
            check(len(cut) > 20, "supports are cut")
            same(cluster(model, cases, 1, 1), expected, f"bounded by {CAP}")
        finally:
            CAP = 400


@case
def a_stop_id_ends_a_sequence_and_the_length_comes_first():
    model = tiny_model("qwen2")
    case_text = "name=s ids=9,8,7 max_new_tokens={} seed=4 stop={}\n"
    rows = oracle(model, case_text.format(6, 319)).splitlines()
    third = rows[2].split()[4]
    check(third not in (rows[0].split()[4], rows[1].split()[4]), "the third token is new")
    for most, finish in ((6, "stop"), (3, "length")):
        expected = oracle(model, case_text.format(most, third))
        check(expected.endswith(f"s finish {finish} rows 3\n"), expected)
        same(cluster(model, case_text.format(most, third), 1, 1), expected, finish)


# ---- cached prefixes, retracted samples ---------------------------------------------------------

@case
def cached_prefixes_change_no_bit():
    """One after the other, so that later prompts find what earlier ones left; and without a cache,
    in small chunks, with so few pages that what is cached has to go."""
    model = tiny_model("qwen3")
    cases = make_wide_cases(256, count=20, most=8, seed=9)
    expected = oracle(model, cases)
    for options in (("--prefix-cache", "on"), ("--prefix-cache", "off"),
                    ("--prefix-cache", "on", "--chunk-tokens", "7"),
                    ("--prefix-cache", "on", "--kv-pages", "6"),
                    ("--prefix-cache", "on", "--page-tokens", "32", "--prompts-max", "1")):
        same(cluster(model, cases, 1, 1, router_options=("--serial",), prefill_options=options),
             expected, options)
        if "off" in options:
            equal(cached_tokens, 0, "tokens found in no cache")
        elif "6" not in options:
            check(cached_tokens > 200, f"{cached_tokens} cached tokens with {options}")


@case
def retracted_samples_go_on_where_they_were():
    model = tiny_model("llama")
    cases = make_wide_cases(256, count=16, most=120, prompt=40, seed=10)
    expected = oracle(model, cases)
    for pages in ("12", "15"):
        same(cluster(model, cases, 1, 1, worker_options=("--kv-pages", pages)), expected, pages)
        check(retractions > 0, f"no sample was retracted with {pages} pages")


# ---- edges of the programs -----------------------------------------------------------------------

def start_alone(role, *options):
    return subprocess.run([BIN / f"baton-{role}", *options], capture_output=True, text=True,
                          timeout=60)


@case
def a_model_that_cannot_be_used_is_one_sentence_and_status_2():
    with tempfile.TemporaryDirectory() as folder:
        garbage = pathlib.Path(folder) / "garbage.gguf"
        garbage.write_bytes(b"not a model at all")
        truncated = pathlib.Path(folder) / "cut.gguf"
        whole = pathlib.Path(tiny_model("llama", gguf=True)).read_bytes()
        truncated.write_bytes(whole[:len(whole) // 2])
        for role in ("prefill", "decode"):
            for path in (garbage, truncated, pathlib.Path(folder) / "missing", folder):
                done = start_alone(role, "--model", path, "--log-level", "error")
                equal(done.returncode, 2, f"{role} {path}: {done.stderr}")
                equal(len(done.stderr.splitlines()), 1, done.stderr)
                check(done.stderr.startswith(f"baton-{role}: "), done.stderr)
                check(str(path) in done.stderr, done.stderr)


@case
def bad_options_are_one_sentence_and_status_2():
    model = tiny_model("llama")
    for role in ("prefill", "decode"):
        for options, word in ((("--page-tokens", "17"), "page-tokens"),
                              (("--router", "nowhere"), "nowhere"),
                              (("--threads", "x"), "threads"),
                              (("--kv-dtype", "fp8"), "kv-dtype"),
                              (("--kv-bytes", "1"), "kv-bytes"),
                              (("--ucx-net-devices", "all"), "all"),
                              (("--ucx-tls", "carrier-pigeon"), "carrier-pigeon"),
                              (("--no-such-option", "1"), "no-such-option")):
            done = start_alone(role, "--model", model, "--log-level", "error", *options)
            equal(done.returncode, 2, f"{role} {options}: {done.stderr}")
            check(word in done.stderr, f"{role} {options}: {done.stderr}")
        equal(start_alone(role).returncode, 2, "no model")
        listed = start_alone(role, "--list-options").stdout.split()
        check("ucx-tls" in listed and "sampling-mask-max-tokens" in listed, listed)


@case
def a_differing_worker_is_refused_with_a_sentence_and_status_3():
    model = tiny_model("llama")
    router = Router(model, make_cases(256, count=1), "--timeout", "60")
    good = Worker("decode", model, router.port)
    try:
        wait_until(lambda: "serving" in good.text(), "the first decode serves")
        for options, field in ((("--page-tokens", "64"), "page_tokens"),
                               (("--kv-dtype", "f32"), "kv_dtype"),
                               (("--sampling-mask-max-tokens", "17"), "sampling_mask_max_tokens"),
                               (("--kv-checksum", "off"), "kv_checksum")):
            worker = Worker("prefill", model, router.port, *options)
            equal(worker.wait(), 3, worker.text())
            check(f"{field} differs" in worker.text(), worker.text())
        other = Worker("prefill", tiny_model("qwen2"), router.port)
        equal(other.wait(), 3, other.text())
        check("differs" in other.text(), other.text())
        pinned = Worker("prefill", model, router.port, "--sampling-mask-max-tokens", str(CAP))
        check(" finish " in router.result(), "a pin that agrees is welcome")
        pinned.stop()
    finally:
        router.stop()
        good.stop()


@case
def workers_outlive_their_router_and_serve_the_next():
    model = tiny_model("llama")
    long_cases = "".join(f"name=l{i} ids=1,2,3 max_new_tokens=1500 mask=support top_k=50 seed={i}\n"
                         for i in range(4))
    first = Router(model, long_cases)
    port = first.port
    workers = [Worker("prefill", model, port, "--log-level", "debug"),
               Worker("decode", model, port, "--log-level", "debug")]
    try:
        wait_until(lambda: workers[1].text().count("-> running") >= 2, "work is in hand")
        first.stop()  # kill -9 with work in flight
        wait_until(lambda: all("serving -> away" in w.text() for w in workers), "they notice")
        cases = make_cases(256, count=6)
        second = Router(model, cases, port=port)
        try:
            same(second.result(), oracle(model, cases), "behind a restart")
        finally:
            second.stop()
        check(all(is_alive(w.process.pid) for w in workers), "both workers live on")
    finally:
        first.stop()
        for worker in workers:
            worker.stop()


@case
def a_killed_prefill_costs_a_retry_and_nothing_else():
    model = tiny_model("llama")
    cases = make_cases(256, count=40, most=100, prompt=900)
    router = Router(model, cases, "--prefill", "2")
    victim = Worker("prefill", model, router.port, "--log-level", "debug", "--chunk-tokens", "16")
    workers = [Worker("prefill", model, router.port, "--chunk-tokens", "16"),
               Worker("decode", model, router.port)]
    try:
        wait_until(lambda: "computing -> sending" in victim.text(), "the victim works")
        victim.process.kill()
        same(router.result(), oracle(model, cases), "with a killed prefill")
    finally:
        router.stop()
        victim.process.kill()
        victim.wait()
        for worker in workers:
            worker.stop()


run_cases()
