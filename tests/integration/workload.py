"""The workload: 54 requests that are answered the same, to the last bit and digit, whatever the cluster
around them looks like. 18 settings, each asked for three times with one prompt and one seed: without a
mask, with the mask and the drawn token's log-probability (selected), with those of the whole support.

A reply is compared as its *normal form*: everything in it but the times and what the prefix cache did. Numbers stay the text that came; equal texts are equal bits. Events of a stream are joined
by what they say: each repeats all (cumulative), or says what is new (incremental)."""

import array
import base64
import json
import re
import threading

from harness import check, equal, in_threads, joined_runs

COUNT = 54
MODES = ("off", "selected", "support")
CAP = 1024  # of the cluster's masks: above every support here
VOLATILE = ("e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details")
SAFETENSORS = "application/x-safetensors"
MASK_KEYS = ("output_token_sampling_mask", "output_token_sampling_logprobs",
             "output_token_sampling_mask_length")

BOUNDED_KEYS = ("output_token_sampling_mask_truncated", "output_token_sampling_support_sizes")


def numbers(seed):
    """splitmix64: the same whole numbers in every version of Python."""
    mask = 2**64 - 1
    while True:
        seed = seed + 0x9E3779B97F4A7C15 & mask
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        yield z ^ z >> 31


class Facts:
    """What the requests need to know of a model: how many ids have text, which ones may be in a prompt,
    which one is made likely to end a reply and which ones do (its own), strings that come in replies."""

    def __init__(self, path, text_ids, prompt_ids, eos, ends, stop_strings):
        self.path, self.text_ids, self.prompt_ids = path, text_ids, prompt_ids
        self.eos, self.ends, self.stop_strings = eos, ends, stop_strings


def settings_of(facts, tokens):
    """(length of the prompt, events every so many tokens, sampling_params without seed and length)"""
    every = {"ignore_eos": True}
    end = {str(facts.eos): 3.0}
    shift = {str(7 * i + 300): (-1.5, 2.25, 0.5)[i % 3] for i in range(90)}
    some = [i for i in range(100, 2000, 40)]
    return [
        (33, 1, {"top_k": 1, **every}),
        (64, 1, {"temperature": 0, **every}),
        (7, 1, {"top_k": 2, **every}),
        (90, 1, {"top_k": 8, "top_p": 0.95, **every}),
        (150, 1, {"top_k": 20, "temperature": 0.7, **every}),
        (31, 1, {"top_p": 0.9, "temperature": 0.12, **every}),
        (701, 7, {"top_k": 200, "temperature": 1.3, **every}),
        (32, 16, {"top_k": 500, "top_p": 0.8, **every}),
        (1, 50, {"top_k": 1000, **every}),
        (96, 50, {"top_k": 1000, "top_p": 0.98, "temperature": 1.5, **every}),
        (40, 5, {"top_k": 1000, "top_p": 0.95, "temperature": 0.25, **every}),
        (12, 5, {"min_p": 0.05, "temperature": 0.4, **every}),
        (65, 7, {"top_k": 300, "top_p": 0.9, "min_p": 0.02, "sampling_filter": "rank", **every}),
        (530, 3, {"top_k": 40, "top_p": 0.9, "sampling_filter": "rank", "stop_token_ids": [302, 607]}),
        (24, 4, {"top_k": 64, "frequency_penalty": 0.7, "presence_penalty": 0.4,
                 "repetition_penalty": 1.2, "temperature": 0.5, **every}),
        (17, 10, {"top_k": 100, "top_p": 0.99, "temperature": 0.6, "logit_bias": {**shift, **end}}),
        (45, 9, {"top_k": 64, "logit_bias": {str(i): 2.5 for i in some}, "stop_token_ids": some[::2],
                 "min_new_tokens": tokens // 2 + 3}),
        (80, 1, {"top_k": 30, "temperature": 0.5, "stop": facts.stop_strings}),
    ]


def requests_of(facts, tokens=120):
    """The 54 bodies, as objects. Number 3 * s + m is setting s in mode m."""
    draw = numbers(54)
    shared = [facts.prompt_ids[next(draw) % len(facts.prompt_ids)] for _ in range(64)]
    requests = []  # COUNT of them
    for s, (length, interval, params) in enumerate(settings_of(facts, tokens)):
        prompt = shared[:length] if s % 3 == 0 else []
        prompt = prompt + [facts.prompt_ids[next(draw) % len(facts.prompt_ids)]
                           for _ in range(length - len(prompt))]
        params = {"max_new_tokens": tokens, "sampling_seed": next(draw) >> 1, **params}
        for m, mode in enumerate(MODES):
            stream = (s + m) % 2 == 0
            request = {"rid": f"w{3 * s + m}", "input_ids": prompt, "stream": stream,
                       "sampling_params": {**params, **({"stream_interval": interval} if stream else {})}}
            if (s // 2 + m) % 3 != 2:
                request["return_logprob"] = True
                request["top_logprobs_num"] = (0, 5, 2)[s % 3]
            if mode != "off":
                request |= {"return_sampling_mask": True, "sampling_logprobs_mode": mode}
            requests.append(request)
    return requests


def streaming(request, interval):
    """The same request, streamed with an interval, or not streamed for None."""
    params = {k: v for k, v in request["sampling_params"].items() if k != "stream_interval"}
    if interval is not None:
        params["stream_interval"] = interval
    return {**request, "stream": interval is not None, "sampling_params": params}


# ---- replies ----------------------------------------------------------------------------------

def parse(text):
    """Numbers with a fraction or an exponent stay text."""
    return json.loads(text, parse_float=str)


def event_texts(body, what):
    """The JSON texts of a whole stream's events."""
    check(body.endswith(b"data: [DONE]\n\n"), f"{what}: no [DONE] at the end: {body[-200:]!r}")
    parts = body.split(b"\n\n")
    check(parts[-1] == b"" and all(p.startswith(b"data: ") and b"\n" not in p for p in parts[:-1]),
          f"{what}: events that are not one line of data")
    return [part[6:] for part in parts[:-2]]


def join_events(events):
    """What the events of an incremental stream say together: lists and text grow, the rest is the
    last one's. What is told of the prompt comes once."""
    whole = events[0]
    for event in events[1:]:
        event["text"] = whole["text"] + event["text"]
        event["output_ids"] = whole["output_ids"] + event["output_ids"]
        before, meta = whole["meta_info"], event["meta_info"]
        for key, value in meta.items():
            if key == "output_token_weight_versions":
                meta[key] = joined_runs(before[key] + value)
            elif isinstance(value, list):
                before[key].extend(value)
                meta[key] = before[key]
        whole = event
    return whole


def form_of(whole):
    """The comparable part of a parsed reply."""
    meta = whole.pop("meta_info")
    form = {**whole, **{k: v for k, v in meta.items() if k not in VOLATILE}}
    form["keys"] = [*whole, "meta_info", *meta]
    return form


def mode_of(request):
    return request["sampling_logprobs_mode"] if request.get("return_sampling_mask") else "off"


def normal_form(reply, request, is_incremental, what):
    equal(reply.status, 200, f"{what}: {reply.body[:300]!r}")
    if reply.headers["Content-Type"] == SAFETENSORS:
        return form_of(from_safetensors(reply.body, mode_of(request)))
    texts = event_texts(reply.body, what) if request["stream"] else [reply.body]
    if request["stream"]:
        check_interval(texts, request["sampling_params"], what)
    if is_incremental:
        return form_of(join_events([unpacked(parse(t), mode_of(request)) for t in texts]))
    # Each event repeats all: the first one, one in the middle and the last.
    some = [unpacked(parse(texts[i]), mode_of(request)) for i in sorted({0, len(texts) // 2, len(texts) - 1})]
    for event in some[:-1]:
        check_beginning(event, some[-1], what)
    return form_of(some[-1])


def check_interval(texts, params, what):
    """An event after the first token, then every so many tokens, and the last one; later where the text could have become
    a stop string."""
    interval = params["stream_interval"]
    counts = [int(re.search(rb'"completion_tokens":(\d+)', text)[1]) for text in texts]
    check(all(a < b for a, b in zip(counts, counts[1:])), f"{what}: events after {counts} tokens")
    wrong = [count for count in counts[:-1] if interval > 1 and count % interval != 1]
    check("stop" in params or not wrong, f"{what}: events after {counts} tokens, every {interval}")


def check_beginning(event, whole, what):
    """An event of a cumulative stream is how the last one begins: text, ids, and a row for each."""
    count = len(event["output_ids"])
    before, after = event["meta_info"], whole["meta_info"]
    check(whole["text"].startswith(event["text"]), f"{what}: text after {count} tokens")
    equal((event["output_ids"], before["completion_tokens"]), (whole["output_ids"][:count], count), what)
    for key in (*MASK_KEYS[:2], *BOUNDED_KEYS, "output_token_logprobs", "output_top_logprobs"):
        equal(key in before, key in after, f"{what}: {key}")
        if key in before:
            equal(before[key], after[key][:count], f"{what}: {key} after {count} tokens")
    equal(before.get(MASK_KEYS[2]), count if MASK_KEYS[2] in after else None, f"{what}: rows after {count} tokens")


def where(one, other):
    """The place at which two values differ."""
    if isinstance(one, list) and isinstance(other, list):
        for i, (a, b) in enumerate(zip(one, other)):
            if a != b:
                return f"[{i}]{where(a, b)}"
        return f": {len(one)} and {len(other)} entries"
    return f": {str(one)[:80]!r} and {str(other)[:80]!r}"


def differences(forms, base):
    """A sentence for each reply that is not the base's."""
    found = []
    for number, (form, expected) in enumerate(zip(forms, base)):
        if form == expected:
            continue
        key = next(k for k in [*expected, *form] if form.get(k) != expected.get(k))
        found.append(f"request {number} ({MODES[number % 3]}), {key}"
                     f"{where(form.get(key), expected.get(key))}")
    return found


def expect_identical(forms, base, what):
    equal((len(forms), len(base)), (COUNT, COUNT), f"{what}, replies")
    found = differences(forms, base)
    check(not found, f"{what}: {len(base) - len(found)} of {len(base)} identical; " + "; ".join(found[:4]))


# ---- as arrays -----------------------------------------------------------------------------------

def json_text(value):
    """The shortest text that reads back as the double, in the reference's form (section 2.2)."""
    mantissa, _, exponent = repr(value).partition("e")
    if not exponent:
        return mantissa
    if int(exponent) == -5:
        digits = mantissa.lstrip("-").replace(".", "")
        return ("-" if value < 0 else "") + "0.0000" + digits
    return f"{mantissa}e{int(exponent)}"


ARRAYS = {"lengths": ("int32", "i"), "token_ids": ("int32", "i"), "logprobs": ("float32", "f"),
          "truncated": ("uint8", "B"), "support_sizes": ("int32", "i")}


def little_endian(kind, data):
    values = array.array(kind)
    equal(values.itemsize, 1 if kind == "B" else 4)
    values.frombytes(data)
    return values.tolist()


def mask_lists(lengths, ids, logprobs, mode):
    """The two lists of a reply from its arrays; numbers as their text."""
    equal(len(ids), sum(lengths), "ids of the arrays")
    equal(len(logprobs), len(ids) if mode == "support" else len(lengths), "values of the arrays")
    rows, values, at = [], [], 0
    texts = [json_text(value) for value in logprobs]
    for t, length in enumerate(lengths):
        rows.append(ids[at : at + length])
        values.append(texts[at : at + length] if mode == "support" else texts[t])
        at += length
    return {MASK_KEYS[0]: rows, MASK_KEYS[1]: values}


def unpacked(whole, mode):
    """A packed reply or event with the lists in place of the arrays."""
    meta = {}
    for key, value in whole["meta_info"].items():
        if key != "output_token_sampling_packed":
            meta[key] = value
            continue
        check(list(value) in (list(ARRAYS)[:3], list(ARRAYS)), f"the packed object: {list(value)}")
        arrays = []
        for name, entry in value.items():
            dtype, kind = ARRAYS[name]
            equal((list(entry), entry["dtype"]), (["dtype", "shape", "data"], dtype), name)
            arrays.append(little_endian(kind, base64.b64decode(entry["data"], validate=True)))
            equal(entry["shape"], [len(arrays[-1])], name)
        meta |= mask_lists(*arrays[:3], mode)
        if len(arrays) > 3:
            meta |= dict(zip(BOUNDED_KEYS, ([flag == 1 for flag in arrays[3]], arrays[4])))
    return {**whole, "meta_info": meta}


def from_safetensors(body, mode):
    """The reply that the file of tensors is. The format's own rules are checked too."""
    size = int.from_bytes(body[:8], "little")
    header, data = json.loads(body[8 : 8 + size]), body[8 + size :]
    equal((size % 8, header.pop("__metadata__")), (0, {"format": "baton-1"}), "header")
    tensors, at = {}, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        equal(begin, at, f"{name} begins where the one before it ends")
        width = {"I32": 4, "F32": 4, "U8": 1}[entry["dtype"]]
        equal((end - begin, begin % width), (entry["shape"][0] * width, 0), name)
        tensors[name] = data[begin:end]
        at = end
    equal((at, list(header)[-1]), (len(data), "reply_json"), "no holes, the JSON last")
    whole = parse(tensors["reply_json"])
    whole = {"text": whole.pop("text"), "output_ids": little_endian("i", tensors["output_ids"]), **whole}
    if mode == "off":
        equal(list(header), ["output_ids", "reply_json"], "tensors without a mask")
        return whole
    lists = mask_lists(little_endian("i", tensors["sampling_mask_lengths"]),
                       little_endian("i", tensors["sampling_mask_token_ids"]),
                       little_endian("f", tensors["sampling_logprobs"]), mode)
    meta = {}
    for key, value in whole["meta_info"].items():
        if key == MASK_KEYS[2]:
            meta |= lists
        meta[key] = value
    return {**whole, "meta_info": meta}


# ---- as one list -------------------------------------------------------------------------------

def list_of(requests, stream):
    """One request with a list of prompts: what differs between the items is given in lists."""
    names = {key for request in requests for key in request} - {"stream"}
    return {"stream": stream, **{key: [request.get(key) for request in requests] for key in names}}


def forms_of_list(reply, count, stream, is_incremental, what):
    equal(reply.status, 200, f"{what}: {reply.body[:300]!r}")
    if not stream:
        return [form_of(whole) for whole in parse(reply.body)]
    events = [[] for _ in range(count)]
    for text in event_texts(reply.body, what):
        event = parse(text)
        mine = events[event.pop("index")]
        if not is_incremental:
            mine.clear()
        mine.append(event)
    return [form_of(join_events(mine)) for mine in events]


# ---- OpenAI's endpoints ------------------------------------------------------------------------

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def as_openai(request, path):
    """The same request for chat or completions, which have SGLang's parameters at top level."""
    names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed", "min_new_tokens": "min_tokens"}
    body = {names.get(key, key): value for key, value in request["sampling_params"].items()}
    body |= {"model": "m", "rid": request["rid"], "stream": request["stream"], "return_meta_info": True,
             "return_token_ids": True, "input_ids" if path == CHAT else "prompt": request["input_ids"]}
    body |= {key: value for key, value in request.items() if "sampling_" in key and key != "sampling_params"}
    if "return_logprob" in request:
        top = request["top_logprobs_num"]
        body |= {"logprobs": True, "top_logprobs": top} if path == CHAT else {"logprobs": top}
    return body


def from_choice(choice):
    """What /generate would say: the text, the ids, meta_info. None for an event without tokens' data."""
    if "meta_info" not in choice:
        return None
    message = choice.get("message") or choice.get("delta") or {}
    return {"text": choice.get("text") or message.get("content") or "",
            "output_ids": choice["response_token_ids"], "meta_info": choice["meta_info"]}


def form_of_openai(reply, request, what):
    equal(reply.status, 200, f"{what}: {reply.body[:300]!r}")
    if not request["stream"]:
        return form_of(from_choice(parse(reply.body)["choices"][0]))
    told = [from_choice(parse(text)["choices"][0]) for text in event_texts(reply.body, what)]
    return form_of(join_events([event for event in told if event]))


# ---- bounded -----------------------------------------------------------------------------------

def bounded_form(form, cap):
    """What a reply of the base is with a bounded mask and a smaller cap: of a longer row the heaviest
    entries, the drawn token in the place of the last one where it is not among them."""
    if MASK_KEYS[0] not in form:
        return form
    rows, values, sizes = [], [], [len(row) for row in form[MASK_KEYS[0]]]
    for token, row, value in zip(form["output_ids"], form[MASK_KEYS[0]], form[MASK_KEYS[1]]):
        kept = list(range(min(cap, len(row))))
        if token not in row[:cap]:
            kept[-1] = row.index(token)
        rows.append([row[i] for i in kept])
        values.append([value[i] for i in kept] if isinstance(value, list) else value)
    keys = list(form["keys"])
    at = keys.index(MASK_KEYS[1]) + 1
    return {**form, MASK_KEYS[0]: rows, MASK_KEYS[1]: values, BOUNDED_KEYS[0]: [n > cap for n in sizes],
            BOUNDED_KEYS[1]: sizes, "keys": [*keys[:at], *BOUNDED_KEYS, *keys[at:]]}


# ---- sending -----------------------------------------------------------------------------------

def post(cluster, request, path="/generate", headers=None):
    return cluster.request("POST", path, request, headers, timeout=600)


def send_at_once(cluster, requests, path="/generate", headers=None):
    """Replies in order; no request is sent before all are ready to be."""
    gate = threading.Barrier(len(requests))

    def ask(request):
        gate.wait()
        return post(cluster, request, path, headers)

    return in_threads([lambda r=r: ask(r) for r in requests])


def send_in_turn(cluster, requests):
    return [post(cluster, request) for request in requests]


def forms_of(replies, requests, is_incremental, what):
    return [normal_form(reply, request, is_incremental, f"{what}, request {number}")
            for number, (reply, request) in enumerate(zip(replies, requests))]
