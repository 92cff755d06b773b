"""54 requests (workload.py) in one configuration after the other, each of which differs from the base in
one factor: every reply is the base's, bit for bit and digit for digit, rows of the first token included.
What the replies of the base must have among themselves; neighbours that overflow; a decode worker that
is killed in the middle.

The model is generated (tests/support/tiny_model.h). With BATON_WORKLOAD_DEMO=1 it is the demo model, for
an hour rather than a minute. Under a sanitizer (BATON_FEW=1) replies are shorter and only some
factors are tried."""

import copy
import functools
import http.client
import json
import math
import os
import signal
import struct
import subprocess
import threading

import workload
from harness import (IS_FEW, TEST_BIN, Cluster, case, check, demo_model, equal, in_threads, is_alive, run_cases,
                     tiny_model, unless_few, wait_until)
from workload import CAP, MASK_KEYS, MODES

IS_DEMO = os.environ.get("BATON_WORKLOAD_DEMO", "") == "1"
TOKENS = 60 if IS_FEW else 120
BASE = {"prefill": 1, "decode": 1, "ucx_tls": "tcp"}


@functools.cache
def facts():
    if IS_DEMO:
        return workload.Facts(demo_model(), 49152, range(100, 40000), 2, [2], [" and", "the", "."])
    # Ids 0 to 255 are bytes, the last three of 2100 are special: see tiny_tokenizer.c.
    return workload.Facts(tiny_model("wide"), 2100, range(2097), 2099, [2099, 2097], ["zzqq", "rrl", "elc"])


@functools.cache
def requests():
    return workload.requests_of(facts(), TOKENS)


def cluster_of(workers=(), shared=(), cap=CAP, **changed):
    """A cluster like the base's but for what is given; workers: options of prefill and decode."""
    options = []
    for role in ("prefill", "decode"):
        words = " ".join(["--threads 1", *(w for r, w in workers if r in (role, "both"))])
        options += [f"--{role}-options", words]
    sizes = ["--kv-bytes", "768M"] if IS_DEMO else []
    return Cluster(facts().path, options=options, **{**BASE, **changed},
                   shared=["--sampling-mask-max-tokens", str(cap), *sizes, *shared])


def run_in(cluster, what, send=workload.send_at_once, is_incremental=False, asked=None):
    asked = asked or requests()
    return workload.forms_of(send(cluster, asked), asked, is_incremental, what)


@functools.cache
def base():
    """The replies of the base: everything at once. Everything else is compared with them."""
    with cluster_of() as cluster:
        return run_in(cluster, "base")


def same_in(cluster, what, **how):
    workload.expect_identical(run_in(cluster, what, **how), base(), what)


def same_as_a_list(cluster, what, stream, is_incremental=False):
    reply = workload.post(cluster, workload.list_of(requests(), stream))
    forms = workload.forms_of_list(reply, len(requests()), stream, is_incremental, what)
    workload.expect_identical(forms, base(), what)


def same_by_openai(cluster, path):
    """Also where /generate streams everything in each event: these endpoints stream what is new."""
    asked = [workload.as_openai(request, path) for request in requests()]
    replies = workload.send_at_once(cluster, asked, path)
    forms = [workload.form_of_openai(reply, request, f"{path}, request {number}")
             for number, (reply, request) in enumerate(zip(replies, asked))]
    workload.expect_identical(forms, base(), path)


def send_and_watch(cluster, asked):
    """Everything at once, with a look at who is busy: a worker that has nothing to do shows nothing."""
    busy, is_over = set(), threading.Event()

    def watch():
        while not is_over.wait(0.01):
            busy.update(w["id"] for w in cluster.workers() if w["attempts"] > 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        replies = workload.send_at_once(cluster, asked)
    finally:
        is_over.set()
        watcher.join()
    equal(busy, {w["id"] for w in cluster.workers()}, "workers that had something to do")
    return replies


# ---- what holds in the base --------------------------------------------------------------------

def triples():
    """(number of the setting, the three replies)"""
    for s in range(len(base()) // 3):
        yield s, base()[3 * s : 3 * s + 3]


@case
def the_base_has_what_the_workload_is_for():
    finishes = [form["finish_reason"] for form in base()]
    by_length = sum(f["type"] == "length" for f in finishes)
    by_id = [f["matched"] for f in finishes if f["type"] == "stop" and isinstance(f["matched"], int)]
    by_text = [f["matched"] for f in finishes if f["type"] == "stop" and isinstance(f["matched"], str)]
    widths = [len(row) for form in base() for row in form.get(MASK_KEYS[0], [])]
    check(by_length >= 30, f"{by_length} of the replies ended by length")
    if not IS_DEMO:
        check(len(by_id) >= 9 and len(by_text) >= 3, f"ended by ids {by_id}, by text {by_text}")
        check(facts().eos in by_id, "one ended by the model's own end of text")
        check(max(widths) == 1000, f"the widest support has {max(widths)} ids")
    check(sum(w > 1 for w in widths) > 1000, "supports of more than one id")
    check(any(r["stream"] for r in requests()) and any(not r["stream"] for r in requests()), "streams")


def row_lost(form):
    for key in MASK_KEYS[:2]:
        form[key].pop()


def digit_changed(form):
    values = form[MASK_KEYS[1]]
    value = values[0] if isinstance(values[0], str) else values[0][0]
    changed = value[:-1] + str((int(value[-1]) + 1) % 10)
    if isinstance(values[0], str):
        values[0] = changed
    else:
        values[0][0] = changed


CHANGES = {
    "a row less": row_lost,
    "a digit of the first token's row": digit_changed,
    "no rows": lambda form: [form.pop(key) for key in MASK_KEYS],
    "another id in a row": lambda form: form[MASK_KEYS[0]][-1].append(7),
    "another order of the keys": lambda form: form["keys"].reverse(),
    "a key more": lambda form: form.update(more=1),
    "another token": lambda form: form["output_ids"].__setitem__(0, 1),
}


@case
def the_comparison_sees_every_difference():
    """Also that nothing was compared, or not enough."""
    workload.expect_identical(copy.deepcopy(base()), base(), "itself")
    tried = [("nothing", []), ("all but one", base()[1:]), ("one twice", [*base(), base()[0]])]
    for what, change in CHANGES.items():
        for number in (1, 2, workload.COUNT - 1):
            tried.append((what, copy.deepcopy(base())))
            change(tried[-1][1][number])
    for what, forms in tried:
        try:
            workload.expect_identical(forms, base(), what)
        except AssertionError as error:
            check(len(forms) != workload.COUNT or f"{what}: 53 of 54 identical" in str(error), error)
        else:
            raise AssertionError(f"nobody saw {what}")
    try:
        workload.expect_identical([], [], "no base")
    except AssertionError:
        return
    raise AssertionError("nobody saw that there is no base")


@case
def masks_change_no_token_and_both_modes_tell_the_same_support():
    for s, (off, selected, support) in triples():
        for key in ("output_ids", "text", "finish_reason"):
            equal(selected[key], off[key], f"setting {s}, {key} with a mask")
            equal(support[key], off[key], f"setting {s}, {key} with the support")
        masks = support[MASK_KEYS[0]]
        equal(selected[MASK_KEYS[0]], masks, f"setting {s}, supports")
        for t, token in enumerate(support["output_ids"]):
            # The text of the number: equal bits, printed alike.
            equal(selected[MASK_KEYS[1]][t], support[MASK_KEYS[1]][t][masks[t].index(token)],
                  f"setting {s}, token {t}")


@case
def every_row_proves_itself():
    rows = 0
    for number, (form, request) in enumerate(zip(base(), requests())):
        if MODES[number % 3] == "off":
            continue
        ids, masks, values = form["output_ids"], form[MASK_KEYS[0]], form[MASK_KEYS[1]]
        equal((len(masks), len(values), form[MASK_KEYS[2]], form["completion_tokens"]),
              (len(ids),) * 4, f"request {number}, lengths")
        params = request["sampling_params"]
        is_greedy = params.get("temperature") == 0 or params.get("top_k") == 1
        for t, (token, row, value) in enumerate(zip(ids, masks, values)):
            what = f"request {number}, row {t}"
            check(row and len(set(row)) == len(row), f"{what} repeats an id: {row}")
            check(token in row, f"{what} lacks its token {token}: {row}")
            if is_greedy:
                equal((row, value), ([token], ["0.0"] if MODES[number % 3] == "support" else "0.0"), what)
            elif params.get("sampling_filter") == "rank":
                check(len(row) <= params["top_k"], f"{what} has {len(row)} ids")
            if MODES[number % 3] == "support":
                check_support(row, [float(v) for v in value], what)
            else:
                check(isinstance(value, str) and float(value) <= 0, f"{what}: {value!r}")
            rows += 1
    check(rows > 15 * TOKENS, f"only {rows} rows")


def check_support(row, values, what):
    equal(len(values), len(row), what)
    total = math.fsum(map(math.exp, values))
    check(abs(total - 1) < 1e-5, f"{what} sums to {total}")
    order = [(-v, i) for v, i in zip(values, row)]
    check(all(a[0] <= b[0] for a, b in zip(order, order[1:])), f"{what} is not in descending order")


@case
def values_of_the_support_and_of_the_whole_vocabulary_agree():
    """A support's log-probability is that of the whole vocabulary minus the log of the support's mass:
    never below it, and for all ids of a row by the same difference."""
    compared = 0
    for number, (form, request) in enumerate(zip(base(), requests())):
        equal("output_token_logprobs" in form, "return_logprob" in request, f"request {number}")
        if MODES[number % 3] == "off" or "return_logprob" not in request:
            continue
        whole = form["output_token_logprobs"]
        equal([t[1] for t in whole], form["output_ids"], f"request {number}")
        tops = form.get("output_top_logprobs", [[]] * len(whole))
        # A greedy row is the singleton whatever its probability was.
        for t, ((full, token, _), top) in enumerate(zip(whole, tops)):
            row, value = form[MASK_KEYS[0]][t], form[MASK_KEYS[1]][t]
            values = dict(zip(row, value)) if isinstance(value, list) else {token: value}
            shift = float(values[token]) - float(full)
            check(shift >= 0, f"request {number}, row {t}: {values[token]} is below {full}")
            for entry in top:
                if entry[1] in values:
                    compared += 1
                    check(abs(float(values[entry[1]]) - float(entry[0]) - shift) < 1e-5,
                          f"request {number}, row {t}: {entry} against {values[entry[1]]}, {shift}")
    check(compared > TOKENS, f"{compared} values compared")


@case
def keys_exist_where_they_are_asked_for():
    for number, (form, request) in enumerate(zip(base(), requests())):
        names = form["keys"]
        masks = [key for key in names if "sampling" in key]
        equal(masks, [] if MODES[number % 3] == "off" else list(MASK_KEYS), f"request {number}")
        tops = request.get("top_logprobs_num", 0) > 0
        equal("output_top_logprobs" in names, tops, f"request {number}, top log-probabilities")


@case
def a_stop_ends_the_reply_and_has_its_row():
    stopped = 0
    for number, (form, request) in enumerate(zip(base(), requests())):
        finish, ids, params = form["finish_reason"], form["output_ids"], request["sampling_params"]
        equal(form["completion_tokens"], len(ids), f"request {number}")
        if finish["type"] == "length":
            equal((finish["length"], len(ids)), (TOKENS, TOKENS), f"request {number}")
            continue
        stopped += 1
        check(not params.get("ignore_eos"), f"request {number} ignores stops")
        if isinstance(finish["matched"], int):
            ends = {*facts().ends, *params.get("stop_token_ids", [])}
            equal((ids[-1], ends & set(ids[:-1])), (finish["matched"], set()), f"request {number}")
            check(len(ids) > params.get("min_new_tokens", 0), f"request {number} stopped too early")
        else:
            check(all(stop not in form["text"] for stop in params["stop"]), f"request {number}")
        if MODES[number % 3] != "off":
            equal(len(form[MASK_KEYS[0]]), len(ids), f"request {number}, the stop's row")
    check(IS_DEMO or stopped >= 9, f"{stopped} stops")


def flat(value):
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    elif isinstance(value, str):
        yield value


@case
def numbers_are_float32_in_the_references_text():
    texts = {text for form in base() for key in form if "logprobs" in key for text in flat(form[key])}
    check(len(texts) > 10000, f"{len(texts)} different numbers")
    for text in texts:
        value = float(text)
        equal(struct.unpack("f", struct.pack("f", value))[0], value, f"a float32 as {text}")
        equal(text, workload.json_text(value), "its text")


# ---- one factor at a time ----------------------------------------------------------------------

@case
def twice_the_same_and_one_at_a_time():
    with cluster_of() as cluster:
        same_in(cluster, "the base again")
        same_in(cluster, "the base again, what it left being cached")
        if not IS_FEW:
            same_in(cluster, "one request at a time", send=workload.send_in_turn)
        plain = [workload.streaming(r, None) for r in requests()]
        same_in(cluster, "nothing streams", asked=plain)
        every_50 = [workload.streaming(r, 50) for r in requests()]
        same_in(cluster, "everything streams, an event every 50 tokens", asked=every_50)
        same_as_a_list(cluster, "a list of prompts", stream=False)
        if not IS_FEW:
            same_as_a_list(cluster, "a list of prompts, streamed", stream=True)


@case
def incremental_streaming():
    with cluster_of(shared=["--incremental-streaming-output"]) as cluster:
        same_in(cluster, "incremental streaming", is_incremental=True)
        for interval in (1, 50):
            asked = [workload.streaming(r, interval) for r in requests()]
            same_in(cluster, f"deltas every {interval} tokens", asked=asked, is_incremental=True)
        same_as_a_list(cluster, "a list of prompts, deltas", stream=True, is_incremental=True)
        same_in(cluster, "packed deltas", asked=packed(), is_incremental=True)


def with_masks(**fields):
    """The requests, those with masks with these fields too."""
    return [{**r, **fields} if "return_sampling_mask" in r else r for r in requests()]


def packed(**fields):
    return with_masks(sampling_mask_format="packed", **fields)


@case
def as_arrays():
    """Base64 in JSON, whole and in events, and files of tensors: the bits of the lists."""
    with cluster_of() as cluster:
        replies = workload.send_at_once(cluster, packed())
        for request, reply in zip(requests(), replies):
            equal(b'"output_token_sampling_packed":{' in reply.body, "return_sampling_mask" in request, "packed")
        workload.expect_identical(workload.forms_of(replies, packed(), False, "packed"), base(), "packed")
        plain = [workload.streaming(r, None) for r in requests()]
        send = functools.partial(workload.send_at_once, headers={"Accept": workload.SAFETENSORS})
        replies = send(cluster, plain)
        equal({r.headers["Content-Type"] for r in replies}, {workload.SAFETENSORS}, "tensors")
        workload.expect_identical(workload.forms_of(replies, plain, False, "safetensors"), base(), "safetensors")


@case
def bounded_masks_and_other_caps():
    """With room for all a bounded mask is the exact one and says so; with less it is the cut one."""
    with cluster_of(cap=100) as cluster:
        cut = [workload.bounded_form(form, 100) for form in base()]
        check(sum(any(form.get(workload.BOUNDED_KEYS[0], [])) for form in cut) > 8, "rows are cut")
        for ask in (with_masks, packed):
            forms = run_in(cluster, "bounded", asked=ask(sampling_mask_mode="bounded"))
            workload.expect_identical(forms, cut, f"bounded by 100, {ask.__name__}")
    if IS_FEW:
        return
    with cluster_of(cap=4096) as cluster:
        same_in(cluster, "a cap of 4096")
        forms = run_in(cluster, "bounded", asked=with_masks(sampling_mask_mode="bounded"))
        workload.expect_identical(forms, [workload.bounded_form(f, 4096) for f in base()], "bounded by 4096")


@case
def by_the_other_endpoints():
    with cluster_of() as cluster:
        same_by_openai(cluster, workload.COMPLETIONS)
        same_by_openai(cluster, workload.CHAT)


@case
def two_by_two():
    with cluster_of(prefill=2, decode=2) as cluster:
        same_in(cluster, "2x2", send=send_and_watch)


@unless_few
def two_prefills():
    with cluster_of(prefill=2) as cluster:
        same_in(cluster, "2x1", send=send_and_watch)


@unless_few
def two_decodes():
    with cluster_of(decode=2) as cluster:
        same_in(cluster, "1x2", send=send_and_watch)


@case
def prefill_in_chunks_of_32():
    with cluster_of(workers=[("prefill", "--chunk-tokens 32")]) as cluster:
        same_in(cluster, "chunks of 32")


@unless_few
def prefill_in_chunks_of_512():
    """The default; 2048 takes every prompt whole."""
    for chunk in (512, 2048):
        with cluster_of(workers=[("prefill", f"--chunk-tokens {chunk}")]) as cluster:
            same_in(cluster, f"chunks of {chunk}")


@unless_few
def two_threads():
    with cluster_of(workers=[("both", "--threads 2")]) as cluster:
        same_in(cluster, "two threads")


@unless_few
def shared_memory():
    with cluster_of(ucx_tls="shm") as cluster:
        same_in(cluster, "shm")


@unless_few
def pages_of_16_and_no_prefix_cache():
    with cluster_of(shared=["--page-tokens", "16"]) as cluster:
        same_in(cluster, "pages of 16")
    with cluster_of(workers=[("prefill", "--prefix-cache off")]) as cluster:
        same_in(cluster, "no prefix cache")


@unless_few
def few_pages_and_few_sequences():
    """Requests wait, samples are retracted and computed again; a retraction is told in its own key."""
    with cluster_of(workers=[("decode", "--kv-pages 27")]) as cluster:
        forms = run_in(cluster, "few pages")
        told = [form.pop("num_retractions") for form in forms]
        check(any(told), "nothing was retracted; the case shows nothing")
        expected = [{k: v for k, v in form.items() if k != "num_retractions"} for form in base()]
        workload.expect_identical(forms, expected, "few pages")


@unless_few
def one_process():
    """baton-oracle does both roles without a cluster."""
    lines = []
    asked = [(n, r) for n, r in enumerate(requests()) if "stop" not in r["sampling_params"]]
    for number, request in asked:
        params = request["sampling_params"]
        stops = [] if params.get("ignore_eos") else [*facts().ends, *params.get("stop_token_ids", [])]
        words = {"name": number, "ids": ",".join(map(str, request["input_ids"])),
                 "max_new_tokens": params["max_new_tokens"], "seed": params["sampling_seed"],
                 "temperature": params.get("temperature", 1), "top_k": params["top_k"] if "top_k" in params
                 else 0, "vocab_limit": facts().text_ids, "mask": MODES[number % 3], "logprob": 1,
                 "filter": params.get("sampling_filter", "joint"), "stop": ",".join(map(str, stops)),
                 "bias": ",".join(f"{i}:{b}" for i, b in params.get("logit_bias", {}).items()),
                 **{k: params[k] for k in ("top_p", "min_p", "frequency_penalty", "presence_penalty",
                                           "repetition_penalty", "min_new_tokens") if k in params}}
        if words["temperature"] == 0:
            words |= {"temperature": 1, "top_k": 1}
        lines.append(" ".join(f"{k}={v}" for k, v in words.items() if v != "") + "\n")
    done = subprocess.run([TEST_BIN / "baton-oracle", "--model", facts().path,
                           "--sampling-mask-max-tokens", str(CAP)],
                          input="".join(lines), capture_output=True, text=True, timeout=3000)
    equal(done.returncode, 0, done.stderr)
    seen = compare_with_oracle(done.stdout)
    equal(seen, sum(len(base()[n]["output_ids"]) for n, _ in asked), "rows of the oracle")


def compare_with_oracle(text):
    """Lines `NUMBER row T token ID logprob X [selected X support ID[:X] ...]`, floats in hexadecimal."""
    seen = 0
    for line in text.splitlines():
        words = line.split()
        if words[1] != "row":
            continue
        number, t = int(words[0]), int(words[2])
        form, what = base()[number], f"request {number}, row {t} of one process"
        check(t < len(form["output_ids"]), f"{what} is too many")
        equal(form["output_ids"][t], int(words[4]), what)
        if "output_token_logprobs" in form:
            equal(float(form["output_token_logprobs"][t][0]), float.fromhex(words[6]), what)
        if "support" in words:
            row = [pair.split(":") for pair in words[words.index("support") + 1 :]]
            equal(form[MASK_KEYS[0]][t], [int(pair[0]) for pair in row], what)
            value = form[MASK_KEYS[1]][t]
            if isinstance(value, list):
                equal([float(v) for v in value], [float.fromhex(pair[1]) for pair in row], what)
            else:
                equal(float(value), float.fromhex(words[words.index("selected") + 1]), what)
        seen += 1
    return seen


# ---- neighbours that fail, workers that die ----------------------------------------------------

OVERFLOW = ("Sampling support exceeds --sampling-mask-max-tokens={}, commonly because of cutoff ties. Lower "
            "top_k to leave more headroom or increase the server limit. Required: {}.")


def overflowing(number):
    """Ties at the cutoff: as many ids as the bias names have the same logit, and live together. Until
    min_new_tokens the stop ids among them cannot be drawn, so the support grows above the cap then."""
    at_first = number % 2 == 0
    ids = list(range(300, 300 + (CAP + 70 if at_first else CAP - 10)))
    stops = list(range(1900, 1930))
    params = {"max_new_tokens": 40, "sampling_seed": number, "top_k": 2,
              "logit_bias": {str(i): 1e30 for i in ids}}
    if not at_first:
        params |= {"logit_bias": {str(i): 1e30 for i in [*ids, *stops]}, "stop_token_ids": stops,
                   "min_new_tokens": 9}
    return {"rid": f"o{number}", "input_ids": [number + 1, 5, 9], "stream": number % 4 >= 2,
            "return_sampling_mask": True, "sampling_logprobs_mode": MODES[1 + number % 3 % 2],
            "on_mask_overflow": "return_partial" if number >= 4 else "abort", "sampling_params": params}


def check_overflow(reply, request, number):
    at_first = number % 2 == 0
    message = OVERFLOW.format(CAP, CAP + (70 if at_first else 20))
    what = f"overflow {number}"
    if at_first or (not request["stream"] and request["on_mask_overflow"] == "abort"):
        equal(reply.status, 400, f"{what}: {reply.body[:200]!r}")
        equal(json.loads(reply.body)["error"]["message"], message, what)
        return
    equal(reply.status, 200, what)
    last = reply.events[-1] if request["stream"] else reply.json
    equal(last["meta_info"]["finish_reason"], {"type": "abort", "message": message, "status_code": 400,
                                               "err_type": "BadRequestError"}, what)
    equal((len(last["output_ids"]), len(last["meta_info"][MASK_KEYS[0]]),
           last["meta_info"][MASK_KEYS[2]]), (9, 9, 9), what)


@case
def an_overflow_hurts_nobody_else():
    fail = [overflowing(number) for number in range(8)]
    # Between the others, not behind them.
    mixed = list(requests())
    for number, request in enumerate(fail):
        mixed.insert(7 * number + 3, request)
    with cluster_of() as cluster:
        replies = workload.send_at_once(cluster, mixed)
        by_id = {request["rid"]: reply for request, reply in zip(mixed, replies)}
        for number, request in enumerate(fail):
            check_overflow(by_id[request["rid"]], request, number)
        forms = workload.forms_of([by_id[r["rid"]] for r in requests()], requests(), False, "neighbours")
        workload.expect_identical(forms, base(), "beside requests that overflow")


class Partial:
    """A reply that is read as it comes: what was received before the end, however it ended."""

    def __init__(self):
        self.status, self.body, self.error = None, b"", None


def read_as_it_comes(cluster, request, partial, on_begin):
    connection = http.client.HTTPConnection(cluster.host, cluster.port, timeout=300)
    try:
        connection.request("POST", "/generate", json.dumps(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        partial.status = response.status
        while chunk := response.read1(1 << 20):
            if not partial.body:
                on_begin()
            partial.body += chunk
    except (http.client.HTTPException, OSError) as error:
        partial.error = error
    finally:
        connection.close()


def check_survivor(partial, request, expected, number):
    """The base's reply, or an honest error behind a beginning of it. True for the reply."""
    what = f"request {number} beside a kill"
    check(partial.error is None, f"{what}: cut off without a word: {partial.error!r}")
    if not request["stream"]:
        equal(partial.status, 200, f"{what}: what nobody has read yet is drawn again")
    if partial.status != 200:
        check(partial.status >= 400, f"{what}: status {partial.status}")
        check(json.loads(partial.body)["error"]["message"], f"{what}: {partial.body[:200]!r}")
        return False
    texts = workload.event_texts(partial.body, what) if request["stream"] else [partial.body]
    for text in [texts[0], texts[len(texts) // 2], *texts[-2:]]:
        event = workload.parse(text)
        kept = len(event["output_ids"])
        for key in ("output_ids", *MASK_KEYS[:2], "output_token_logprobs"):
            mine = event if key == "output_ids" else event["meta_info"]
            if key in expected and (kept or key == "output_ids"):
                equal(mine[key], expected[key][:kept], f"{what}, {key} of {kept}")
    reason = event["meta_info"]["finish_reason"]
    if reason["type"] != "abort":
        equal((kept, reason), (len(expected["output_ids"]), expected["finish_reason"]), what)
        return True
    check(request["stream"] and reason["status_code"] >= 400 and reason["message"], f"{what}: {reason}")
    return False


def beside_a_kill(role):
    """Which replies came through when a worker of two was killed well into the workload, and retries."""
    base()
    with cluster_of(**{role: 2}, on_death="restart") as cluster:
        victim = cluster.pids(role)[0]
        partials = [Partial() for _ in requests()]
        begun = threading.Semaphore(0)
        threads = [threading.Thread(target=read_as_it_comes, args=(cluster, r, p, begun.release))
                   for r, p in zip(requests(), partials)]
        for thread in threads:
            thread.start()
        for _ in range(12):  # of 27 that stream
            check(begun.acquire(timeout=300), "no reply begins")
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=600)
            check(not thread.is_alive(), "a request hangs")
        whole = [check_survivor(p, r, b, n)
                 for n, (p, r, b) in enumerate(zip(partials, requests(), base()))]
        retries = cluster.get("/server_info").json["retries_total"]
        wait_until(lambda: ready_again(cluster, victim), "the killed worker is replaced", 120)
        same_in(cluster, "after the restart")
    return whole, retries


@case
def a_killed_decode_costs_honest_errors_and_nothing_else():
    for _ in range(4):  # a worker may be idle at the moment of its death
        whole, retries = beside_a_kill("decode")
        if not all(whole) or retries > 0:
            break
    else:
        raise AssertionError("four kills hit nothing; the case shows nothing")
    check(any(whole), "nothing came through")


@unless_few
def a_killed_prefill_costs_retries_and_nothing_else():
    whole, _ = beside_a_kill("prefill")
    check(all(whole), f"{whole.count(False)} requests were lost with a prefill")


def ready_again(cluster, dead):
    pids = sorted(cluster.pids("prefill") + cluster.pids("decode"))
    ready = sorted(w["pid"] for w in cluster.workers() if w["is_ready"])
    return len(pids) == cluster.worker_count and pids == ready and dead not in pids


if __name__ == "__main__":
    run_cases()
