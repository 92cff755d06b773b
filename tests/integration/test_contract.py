"""The contract of sampling masks as an existing client knows it: fields, defaults, refusals word for word,
shapes and the order of keys, rows, streams, ends. One table for each part of it; docs/api.md is the text.

Supports of a known width are made with logit_bias: ids with a bias of 1e30 all have the logit 1e30 and
are ties, whatever the model thinks of them, and nothing else has any weight."""

import http.client
import json
import math
import pathlib
import shutil
import struct
import tempfile

from harness import (Cluster, case, check, check_rows, equal, in_threads, run_cases, tiny_model,
                     wait_until)

CAP = 64
PROMPT = [5, 9, 33, 70, 12, 8, 41]
OVERFLOW = ("Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of cutoff ties. Lower "
            "top_k to leave more headroom or increase the server limit. Required: {}.")
NEEDS_FILTER = ("return_sampling_mask requires top_k=1 for greedy sampling or a top_k, top_p or min_p that "
                "filters: without one all 2100 ids are in the support, more than "
                "--sampling-mask-max-tokens=64. sampling_mask_mode 'bounded' takes any.")
META_BEFORE = ["id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"]
META_LOGPROBS = ["input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"]
META_MASK = ["output_token_sampling_mask", "output_token_sampling_logprobs",
             "output_token_sampling_mask_length", "output_token_weight_versions"]
META_AFTER = ["reasoning_tokens", "completion_tokens", "cached_tokens", "cached_tokens_details", "dp_rank",
              "e2e_latency", "response_sent_to_client_ts"]
cluster = None


def params(tokens=6, **extra):
    return {"max_new_tokens": tokens, "top_k": 8, "sampling_seed": 3, "ignore_eos": True, **extra}


def ties(*ids):
    """All weight on these ids, the same for each."""
    return {str(i): 1e30 for i in ids}


def ask(n=6, stream=False, mask="selected", **fields):
    """A request with masks; sampling parameters in `p`."""
    p = fields.pop("p", {})
    body = {"input_ids": PROMPT, "stream": stream, "sampling_params": params(n, **p), **fields}
    if mask:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": mask}
    return cluster.request("POST", "/generate", {k: v for k, v in body.items() if v is not None})


def chat(n=6, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "Name a city."}], "max_tokens": n,
            "seed": 3, "ignore_eos": True, "temperature": 1.0, "top_k": 8, **fields}
    return cluster.request("POST", "/v1/chat/completions", {k: v for k, v in body.items() if v is not None})


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def short_error(message):
    return json.dumps({"error": {"message": message}}, separators=(",", ":")).encode()


def long_error(message, code=400, kind="BadRequestError"):
    fields = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": fields, "object": "error", **fields}, separators=(",", ":")).encode()


# ---- requests ------------------------------------------------------------------------------------

REFUSED_PARAMETERS = [
    ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
    ({"temperature": -0.5}, "temperature must be a non-negative finite number, got -0.5."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
    ({"top_p": 1.0001}, "top_p must be in (0, 1], got 1.0001."),
    ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
    ({"top_k": -2}, "top_k must be -1 (disable) or at least 1, got -2."),
    ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1."),
    ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5."),
    ({"frequency_penalty": 2.5}, "frequency_penalty must be in [-2, 2], got 2.5."),
    ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3."),
    ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0."),
    ({"repetition_penalty": 2.25}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 2.25."),
    ({"logit_bias": {"2116": 1}}, "logit_bias must has keys in [0, 2115], got 2116."),
    ({"logit_bias": {"-1": 1}}, "logit_bias must has keys in [0, 2115], got -1."),
]


@case
def sampling_parameters_are_refused_in_these_words():
    for given, message in REFUSED_PARAMETERS:
        for stream in (False, True):
            reply = ask(p=given, stream=stream)
            equal((reply.status, reply.body), (400, short_error(message)), f"{given}, stream {stream}")
            reply = chat(**given, stream=stream)
            equal((reply.status, reply.body), (400, long_error(message)), f"chat {given}, stream {stream}")
    reply = ask(p={"regex": "a", "json_schema": "{}"})
    equal((reply.status, reply.body),
          (400, short_error("Only one of regex, json_schema, or ebnf can be set.")))


@case
def the_edges_of_what_is_allowed():
    for given in ({"temperature": 0}, {"temperature": 1e-300}, {"temperature": 30}, {"top_p": 1},
                  {"top_p": 1e-12}, {"min_p": 0}, {"min_p": 1}, {"frequency_penalty": 2},
                  {"frequency_penalty": -2}, {"presence_penalty": -2}, {"repetition_penalty": 1e-3},
                  {"repetition_penalty": 2}, {"top_k": CAP}, {"top_k": 1}, {"top_k": 8.0}, {"n": 1},
                  {"logit_bias": {"0": 1, "2115": -1}}, {"sampling_seed": 2**64 - 1},
                  {"sampling_seed": -(2**63)}, {"sampling_filter": "rank"}):
        reply = ask(p=given)
        equal(reply.status, 200, f"{given}: {reply.body[:200]!r}")
        check_rows(reply.json["meta_info"], reply.json["output_ids"], "selected")
    empty = dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
                           "repetition_penalty", "logit_bias", "n", "stop", "stop_token_ids",
                           "sampling_filter", "stream_interval", "min_new_tokens", "regex"))
    equal(ask(p=empty).json["output_ids"], ask().json["output_ids"], "null is the default")


@case
def near_zero_temperatures_are_greedy():
    greedy = ask(p={"top_k": 1}).json
    for given in ({"temperature": 0}, {"temperature": 9.9e-7}, {"temperature": 0, "top_k": None},
                  {"temperature": 0, "top_k": -1, "top_p": 0.5}, {"temperature": 0, "top_k": 2**30},
                  {"top_k": 1, "sampling_filter": "rank"}, {"top_k": 1, "min_p": 0.5, "temperature": 9}):
        reply = ask(p=given).json
        for key in ("output_ids", "text"):
            equal(reply[key], greedy[key], f"{given}")
        equal(reply["meta_info"][META_MASK[0]], [[i] for i in greedy["output_ids"]], f"{given}")
    check(ask(p={"temperature": 1e-6, "top_k": 8}).status == 200, "1e-6 samples")


@case
def modes_are_read_where_they_are():
    for mode in ("all", "", "Support"):
        reply = ask(mask=mode or None, sampling_logprobs_mode=mode, return_sampling_mask=True)
        equal((reply.status, reply.body), (400, short_error(
            f"sampling_logprobs_mode must be 'selected' or 'support', got '{mode}'.")), mode)
    for value in (1, "true", [True], {}):
        reply = ask(mask=None, return_sampling_mask=value)
        equal(reply.status, 400, f"return_sampling_mask {value}")
        check("return_sampling_mask" in reply.json["message"], reply.body)
    off = ask(mask=None, sampling_logprobs_mode="support")
    equal((off.status, [k for k in off.json["meta_info"] if "sampling" in k]), (200, []), "a mode alone")
    off = ask(mask=None, return_sampling_mask=None, sampling_logprobs_mode=None)
    equal([k for k in off.json["meta_info"] if "sampling" in k], [], "null is off")
    default = ask(mask=None, return_sampling_mask=True)
    check_rows(default.json["meta_info"], default.json["output_ids"], "selected")
    inside = cluster.request("POST", "/generate", {"input_ids": PROMPT, "sampling_params": params(
        return_sampling_mask=True)})
    equal((inside.status, inside.body),
          (400, short_error("Unexpected sampling parameter 'return_sampling_mask'.")))


@case
def no_filter_at_all_is_refused_where_the_vocabulary_is_wider_than_the_cap():
    for given in ({"top_k": -1}, {"top_k": None}, {"top_k": 2**30}):
        for stream in (False, True):
            reply = ask(p=given, stream=stream)
            equal((reply.status, reply.body), (400, short_error(NEEDS_FILTER)), f"{given}")
        reply = chat(**given, return_sampling_mask=True, return_meta_info=True)
        equal((reply.status, reply.body), (400, long_error(NEEDS_FILTER)), f"chat {given}")
        equal(ask(p=given, mask=None).status, 200, "without a mask nothing is refused")


# ---- replies -------------------------------------------------------------------------------------

@case
def keys_come_in_the_order_of_the_reference():
    for masks in ((), META_MASK):
        for logprobs in ((), META_LOGPROBS):
            fields = {"return_logprob": True} if logprobs else {}
            for stream in (False, True):
                reply = ask(mask="selected" if masks else None, stream=stream, **fields)
                for whole in reply.events if stream else [reply.json]:
                    equal(list(whole), ["text", "output_ids", "meta_info"], "reply")
                    equal(list(whole["meta_info"]), [*META_BEFORE, *logprobs, *masks, *META_AFTER], "meta")
    whole = ask(return_logprob=True, top_logprobs_num=2, token_ids_logprob=[4],
                return_prompt_token_ids=True).json
    equal(list(whole), ["text", "output_ids", "meta_info", "prompt_token_ids"], "reply")
    names = ["token_logprobs", "top_logprobs", "token_ids_logprobs"]
    pairs = [f"{end}_{name}" for name in names for end in ("input", "output")]
    equal([k for k in whole["meta_info"] if "logprobs" in k and "sampling" not in k and "length" not in k],
          pairs, "log-probabilities")


@case
def values_of_meta_info():
    whole = ask(5, return_logprob=True, rid="a-name").json
    meta = whole["meta_info"]
    equal({k: meta[k] for k in ("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions",
                                "input_token_logprobs", "output_token_logprobs_length",
                                "output_token_sampling_mask_length", "reasoning_tokens",
                                "completion_tokens", "cached_tokens_details", "dp_rank")},
          {"id": "a-name", "finish_reason": {"type": "length", "length": 5}, "prompt_tokens": len(PROMPT),
           "weight_version": "default", "num_retractions": 0, "input_token_logprobs": [],
           "output_token_logprobs_length": 5, "output_token_sampling_mask_length": 5,
           "reasoning_tokens": 0, "completion_tokens": 5, "cached_tokens_details": None, "dp_rank": None})
    for triple, token, value in zip(meta["output_token_logprobs"], whole["output_ids"], meta[META_MASK[1]]):
        equal(triple[1:], [token, None], "a triple of log-probability, id and no text")
        check(triple[0] <= value, f"{triple[0]} of the vocabulary is above {value} of the support")
    check(isinstance(meta["e2e_latency"], float) and isinstance(meta["response_sent_to_client_ts"], float),
          "times are numbers")


@case
def ties_at_the_cutoff():
    """The reference's 7.3, and the rows of 3.4 that are about ties."""
    four = [40, 7, 300, 2000]
    for given, width in (({"top_k": 2}, 4), ({"top_k": 3, "top_p": 0.3}, 4), ({"top_k": 4}, 4),
                         ({"top_k": 8}, 4), ({"top_k": 1}, 1), ({"temperature": 0}, 1),
                         ({"top_k": 2, "min_p": 1}, 4), ({"top_k": 8, "min_p": 0.5, "top_p": 0.6}, 4),
                         ({"top_k": 2, "sampling_filter": "rank"}, 2),
                         ({"top_k": 3, "sampling_filter": "rank"}, 3),
                         ({"top_k": 8, "sampling_filter": "rank"}, 4),
                         # The sum before rank 2 is 0.5, which is not above top_p.
                         ({"top_k": 8, "top_p": 0.5, "sampling_filter": "rank"}, 3),
                         ({"top_k": 8, "top_p": 0.25, "sampling_filter": "rank"}, 2)):
        row = sorted(four)[:width]
        number = math.log(1 / width)
        for mode in ("selected", "support"):
            whole = ask(12, mask=mode, p={"logit_bias": ties(*four), **given}).json
            check(set(whole["output_ids"]) <= set(row), f"{given}: {whole['output_ids']}")
            equal(whole["meta_info"][META_MASK[0]], [row] * 12, f"{given}, ids by weight, then by id")
            for value in whole["meta_info"][META_MASK[1]]:
                values = value if mode == "support" else [value]
                equal(len(values), width if mode == "support" else 1, f"{given}")
                check(all(abs(v - number) < 1e-6 and v == float32(v) for v in values), f"{given}: {values}")
                equal(len(set(values)), 1, f"{given}: equal weights")


@case
def greedy_rows_as_text():
    for mode, numbers in (("selected", b"[0.0,0.0,0.0]"), ("support", b"[[0.0],[0.0],[0.0]]")):
        body = ask(3, mask=mode, p={"temperature": 0}).body
        ids = json.loads(body)["output_ids"]
        text = b'"output_token_sampling_mask":[[%d],[%d],[%d]],"output_token_sampling_logprobs":' % tuple(ids)
        check(text + numbers + b',"output_token_sampling_mask_length":3,' in body, body)


@case
def halves_and_thirds_as_text():
    """The number text of the reference: log(0.5) and log(0.25) as the doubles next to the float32."""
    for width, number in ((2, b"-0.6931471824645996"), (4, b"-1.3862943649291992"), (1, b"0.0")):
        ids = list(range(500, 500 + width))
        body = ask(1, mask="support", p={"logit_bias": ties(*ids), "top_k": 5}).body
        text = b'"output_token_sampling_logprobs":[[%s]]' % b",".join([number] * width)
        check(text in body, f"{text!r} is not in {body!r}")


@case
def ends_of_a_reply():
    whole = ask(4, p={"logit_bias": ties(70)}).json
    equal((whole["output_ids"], whole["meta_info"]["finish_reason"]), ([70] * 4, {"type": "length", "length": 4}))
    stopped = ask(9, p={"logit_bias": ties(70), "stop_token_ids": [70], "ignore_eos": False}).json
    equal((stopped["output_ids"], stopped["text"], stopped["meta_info"]["finish_reason"]),
          ([70], "", {"type": "stop", "matched": 70}), "a stop token")
    equal(stopped["meta_info"][META_MASK[0]], [[70]], "the stop token has its row")
    end = ask(9, p={"logit_bias": ties(2099), "ignore_eos": False}).json
    equal((end["output_ids"], end["meta_info"]["finish_reason"]), ([2099], {"type": "stop", "matched": 2099}))
    text = whole["text"][:2]
    cut = ask(9, p={"logit_bias": ties(70), "stop": [text]}).json
    equal((cut["text"], cut["meta_info"]["finish_reason"]), ("", {"type": "stop", "matched": text}))
    check_rows(cut["meta_info"], cut["output_ids"], "selected")
    last = ask(1, p={"logit_bias": ties(70), "stop_token_ids": [70], "ignore_eos": False}).json
    equal(last["meta_info"]["finish_reason"], {"type": "length", "length": 1}, "the length comes first")
    held = ask(9, p={"logit_bias": ties(70, 71), "stop_token_ids": [70], "ignore_eos": False,
                     "min_new_tokens": 4}).json
    equal(held["meta_info"][META_MASK[0]][:4], [[71]] * 4, "what may not be drawn is in no row")
    equal(held["meta_info"][META_MASK[0]][4], [70, 71], "then it may")
    none = ask(0).json
    equal((none["output_ids"], [k for k in none["meta_info"] if "sampling" in k]), ([], []),
          "without a row the keys are absent")


@case
def samples_are_a_list():
    many = ask(1, p={"n": 2, "temperature": 0.7, "top_p": 0.9}, return_logprob=True, rid="pair").json
    equal(len(many), 2)
    for i, one in enumerate(many):
        equal(list(one), ["text", "output_ids", "meta_info"])
        meta = one["meta_info"]
        equal(list(meta), [*META_BEFORE, *META_LOGPROBS, *META_MASK, *META_AFTER])
        equal(meta["id"], f"pair_{i}")
        equal([t[1:] for t in meta["output_token_logprobs"]], [[one["output_ids"][0], None]])
        check_rows(meta, one["output_ids"], "selected")
        check(meta["output_token_logprobs"][0][0] <= meta[META_MASK[1]][0], "full below support")


# ---- streams -------------------------------------------------------------------------------------

@case
def events_repeat_everything_and_are_consistent():
    for mode in ("selected", "support"):
        whole = ask(20, mask=mode, return_logprob=True).json
        for interval in (1, 3, 7, 50):
            events = ask(20, mask=mode, return_logprob=True, stream=True,
                         p={"stream_interval": interval}).events
            counts = [event["meta_info"]["completion_tokens"] for event in events]
            equal(counts, sorted(set(counts)), f"interval {interval}: each event says more")
            check(all(n % interval == 1 % interval for n in counts[:-1]), f"interval {interval}: {counts}")
            equal((counts[0], counts[-1]), (1, 20), f"interval {interval}")
            for event in events:
                check_rows(event["meta_info"], event["output_ids"], mode)
                n = len(event["output_ids"])
                for key in (*META_MASK[:2], "output_token_logprobs"):
                    equal(event["meta_info"][key], whole["meta_info"][key][:n], key)
                equal(event["meta_info"]["finish_reason"],
                      whole["meta_info"]["finish_reason"] if n == 20 else None, "finish reason")
            equal((events[-1]["text"], events[-1]["output_ids"]), (whole["text"], whole["output_ids"]))


def incremental_events():
    """The reference's 7.7: deltas of text, ids and lists; totals stay totals."""
    fields = {"mask": "support", "return_logprob": True}
    whole = ask(20, **fields).json
    for interval in (1, 6):
        events = ask(20, stream=True, p={"stream_interval": interval}, **fields).events
        told = 0
        for event in events:
            meta, new = event["meta_info"], len(event["output_ids"])
            check(new > 0, "an event without a token")
            equal((meta[META_MASK[2]], meta["completion_tokens"], meta["output_token_logprobs_length"]),
                  (told + new,) * 3, "totals")
            for key in (*META_MASK[:2], "output_token_logprobs"):
                equal(meta[key], whole["meta_info"][key][told : told + new], key)
            equal(event["output_ids"], whole["output_ids"][told : told + new])
            told += new
        equal("".join(event["text"] for event in events), whole["text"])
        equal(events[-1]["meta_info"]["finish_reason"], {"type": "length", "length": 20})


def stops_inside_characters(is_incremental):
    """Draws of a few bytes give characters, broken ones and pieces of them. Text is held back while it
    could become a stop string; ids and rows are those of the tokens up to the one that completed it."""
    stopped = 0
    for seed in range(36):
        ids = [[0xE2, 0x82, 0xAC, 0x61], [0xF0, 0x9F, 0x98, 0x80, 0x61], [0xC3, 0xA9, 0x61, 0x62]][seed % 3]
        stops = [["\u20aca"], ["a\u20ac"], ["aba", "bab"], ["\ufffda"], ["a\u00e9", "\U0001f600"],
                 ["\u00e9\u00e9", "aa"], ["\u00e9b"]][seed % 7]
        p = {"logit_bias": ties(*ids), "sampling_seed": seed, "no_stop_trim": seed % 2 == 0}
        free = ask(60, mask="support", p=p).json
        equal(free["text"], bytes(free["output_ids"]).decode("utf-8", "replace"), "the bytes that were drawn")
        whole = ask(60, mask="support", p={**p, "stop": stops}).json
        count, finish = len(whole["output_ids"]), whole["meta_info"]["finish_reason"]
        equal(whole["output_ids"], free["output_ids"][:count])
        for key in META_MASK[:2]:
            equal(whole["meta_info"][key], free["meta_info"][key][:count], key)
        equal(whole["meta_info"][META_MASK[2]], count)
        found = [free["text"].find(stop) for stop in stops if stop in free["text"][:-4]]
        equal(finish["type"], "stop" if found else finish["type"], f"{stops} in {free['text']!r}")
        if finish["type"] == "stop":
            stopped += 1
            text = whole["text"] if p["no_stop_trim"] else whole["text"] + finish["matched"]
            check(free["text"].startswith(text) and text.endswith(finish["matched"]), f"{text!r}, {finish}")
            check(all(stop not in text[:-1] for stop in stops), f"{text!r} holds {stops} before its end")
            check("\ufffd" in finish["matched"] or text == bytes(whole["output_ids"]).decode("utf-8", "replace"),
                  "the token that completed it is the last")
        for interval in (1, 3):
            events = ask(60, stream=True, mask="support", p={**p, "stop": stops, "stream_interval": interval}).events
            join = (lambda lists: [x for part in lists for x in part]) if is_incremental else (lambda lists: lists[-1])
            equal("".join(join([list(e["text"]) for e in events])), whole["text"], f"{stops}")
            equal(join([e["output_ids"] for e in events]), whole["output_ids"])
            for key in META_MASK[:2]:
                equal(join([e["meta_info"].get(key, []) for e in events]), whole["meta_info"][key], key)
            for event in events:
                equal(len(event["meta_info"].get(META_MASK[0], [])), len(event["output_ids"]), "a row for each id")
            equal(events[-1]["meta_info"]["finish_reason"], finish)
    check(stopped > 10, f"{stopped} replies were stopped")


@case
def stop_strings_and_rows():
    stops_inside_characters(is_incremental=False)


@case
def streams_of_deltas():
    global cluster
    outer = cluster
    try:
        with Cluster(tiny_model("wide"), shared=["--sampling-mask-max-tokens", str(CAP),
                                                 "--incremental-streaming-output"]) as cluster:
            incremental_events()
            overflow_in_a_stream(is_incremental=True)
            stops_inside_characters(is_incremental=True)
    finally:
        cluster = outer


# ---- failures ------------------------------------------------------------------------------------

def grows(by=40, ids=40, at=5):
    """A support of `ids` ties until `at` tokens are there, and of `by` more behind them."""
    stops = list(range(1000, 1000 + by))
    return {"top_k": 2, "logit_bias": ties(*range(100, 100 + ids), *stops), "stop_token_ids": stops,
            "min_new_tokens": at, "ignore_eos": False}


@case
def an_overflow_of_the_first_token_is_a_400():
    p = {"top_k": 2, "logit_bias": ties(*range(100, 170))}
    for mode in ("selected", "support"):
        for stream in (False, True):
            reply = ask(p=p, mask=mode, stream=stream)
            equal((reply.status, reply.body), (400, short_error(OVERFLOW.format(70))), f"{mode} {stream}")
        # Chat's biases are small; at such a temperature all ids are ties.
        reply = chat(temperature=1e30, return_sampling_mask=True, return_meta_info=True,
                     sampling_logprobs_mode=mode)
        equal((reply.status, reply.body), (400, long_error(OVERFLOW.format(2100))), mode)
    both = ask(p={**p, "n": 2})
    equal((both.status, both.body), (400, short_error(OVERFLOW.format(70))), "both samples")
    equal(ask(p=p, mask=None).status, 200, "without a mask there is nothing to overflow")
    equal(ask(p={**p, "sampling_filter": "rank"}).status, 200, "rank keeps no ties")
    exact = ask(p={"top_k": 2, "logit_bias": ties(*range(100, 164))})
    equal((exact.status, len(exact.json["meta_info"][META_MASK[0]][0])), (200, 64), "the cap itself fits")


@case
def an_overflow_later_loses_a_reply_and_ends_a_stream():
    reply = ask(30, p=grows())
    equal((reply.status, reply.body), (400, short_error(OVERFLOW.format(80))))
    overflow_in_a_stream(is_incremental=False)
    equal(ask().status, 200, "it goes on")


def overflow_in_a_stream(is_incremental):
    for mode in ("selected", "support"):
        reply = ask(30, p=grows(), stream=True, mask=mode)
        equal(reply.status, 200)
        events = reply.events
        last = events[-1]
        equal(list(last["meta_info"]), [*META_BEFORE, *META_MASK, "sampling_mask_required", *META_AFTER])
        equal(last["meta_info"]["sampling_mask_required"], 80)
        equal(last["meta_info"]["finish_reason"],
              {"type": "abort", "message": OVERFLOW.format(80), "status_code": 400,
               "err_type": "BadRequestError"})
        equal((last["meta_info"][META_MASK[2]], last["meta_info"]["completion_tokens"]), (5, 5),
              "the token that overflowed is not there")
        told = [e["meta_info"][META_MASK[0]] for e in events]
        rows = [row for rows in told for row in rows] if is_incremental else told[-1]
        equal(rows, [list(range(100, 140))] * 5)
        check(all(e["meta_info"]["finish_reason"] is None for e in events[:-1]), "one end")


def with_endless_logits(folder):
    """A copy of the model in which the logit of one id is a huge number times some values of the last
    hidden state: where they are large enough the logit is infinite, and there is nothing to draw from."""
    copy = pathlib.Path(folder, "endless")
    shutil.copytree(tiny_model("wide"), copy)
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])["lm_head.weight"]
    row = 2 * entry["shape"][1]
    at = 8 + size + entry["data_offsets"][0] + 77 * row
    data[at : at + row] = b"\x7f\x7f" * 3 + bytes(row - 6)  # 3.39e38, the largest bfloat16
    path.write_bytes(data)
    return copy


def ends_without_a_capture(prompt, mode):
    """What a stream of a prompt says before its capture fails, against the same request as a whole."""
    message = "The sampling backend selected a token outside its captured sampling support."
    error = (500, long_error(message, 500, "InternalServerError"))
    streamed = ask(60, input_ids=prompt, mask=mode, stream=True)
    whole = ask(60, input_ids=prompt, mask=mode)
    equal((whole.status, whole.body), error, f"{prompt}")
    if streamed.status == 500:
        equal(streamed.body, error[1], f"{prompt}, at the first token")
        return 0
    last = streamed.events[-1]
    equal(last["meta_info"]["finish_reason"], {"type": "abort", "message": message, "status_code": 500,
                                               "err_type": "InternalServerError"})
    check_rows(last["meta_info"], last["output_ids"], mode)
    shorter = ask(len(last["output_ids"]), input_ids=prompt, mask=mode).json
    for key in META_MASK:
        equal(last["meta_info"][key], shorter["meta_info"][key], "the rows before it")
    return len(last["output_ids"])


@case
def an_invalid_capture_is_a_500():
    """At the first token it is the status; behind tokens the end of a stream, or the status of a reply."""
    global cluster
    outer = cluster
    try:
        with tempfile.TemporaryDirectory() as folder, Cluster(with_endless_logits(folder)) as cluster:
            kept = [ends_without_a_capture([5, i, 9], ("selected", "support")[i % 2]) for i in range(24)]
            check(min(kept) == 0 and max(kept) > 1, f"tokens before the end: {kept}")
    finally:
        cluster = outer


@case
def neighbours_of_an_overflow_do_not_notice():
    alone = [ask(40, mask=mode, p={"sampling_seed": 9}).json for mode in ("selected", "support")]
    with_it = []
    asks = [lambda m=m: with_it.append((m, ask(40, mask=m, p={"sampling_seed": 9}).json))
            for m in ("selected", "support")] * 2
    asks += [lambda: check(ask(30, p=grows()).status == 400, "the overflow")] * 3
    in_threads(asks)
    for mode, whole in with_it:
        expected = alone[mode == "support"]
        for key in META_MASK:
            equal(whole["meta_info"][key], expected["meta_info"][key], f"{mode}, {key}")


@case
def a_client_that_leaves_takes_its_request_along():
    for stream in (True, False):
        connection = http.client.HTTPConnection(cluster.host, cluster.port, timeout=60)
        body = {"input_ids": PROMPT, "stream": stream, "return_sampling_mask": True, "rid": "leaves",
                "sampling_params": params(1500)}
        connection.request("POST", "/generate", json.dumps(body))
        if stream:
            connection.getresponse().read(1)
        else:
            wait_until(lambda: cluster.get("/server_info").json["requests_running"] == 1, "it runs")
        connection.close()
        cluster.wait_at_rest()
        again = ask(3, rid="leaves")
        equal((again.status, again.json["meta_info"]["id"]), (200, "leaves"), "the name is free again")


# ---- chat ----------------------------------------------------------------------------------------

@case
def chat_replies():
    reply = chat(2, return_sampling_mask=True, sampling_logprobs_mode="support", return_meta_info=True,
                 return_token_ids=True)
    equal(reply.status, 200, reply.body)
    whole = reply.json
    equal(list(whole)[:5], ["id", "object", "created", "model", "choices"])
    equal((whole["object"], whole["model"]), ("chat.completion", "m"))
    choice = whole["choices"][0]
    equal((choice["index"], choice["message"]["role"], choice["logprobs"], choice["finish_reason"]),
          (0, "assistant", None, "length"))
    equal(list(choice["meta_info"]), [*META_BEFORE, *META_MASK, *META_AFTER])
    equal((choice["meta_info"]["id"], choice["meta_info"]["finish_reason"]),
          (whole["id"], {"type": "length", "length": 2}))
    equal(len(choice["response_token_ids"]), 2)
    check_rows(choice["meta_info"], choice["response_token_ids"], "support")
    usage = whole["usage"]
    equal((usage["completion_tokens"], usage["total_tokens"] - usage["prompt_tokens"]), (2, 2))
    plain = chat(2, return_meta_info=True).json["choices"][0]
    equal([k for k in plain["meta_info"] if "sampling" in k], [], "no mask, no key")
    check("meta_info" not in chat(2).json["choices"][0], "nothing that was not asked for")


@case
def chat_and_generate_draw_alike():
    whole = chat(8, return_sampling_mask=True, return_meta_info=True, return_token_ids=True,
                 return_prompt_token_ids=True).json["choices"][0]
    same = ask(8, input_ids=whole["prompt_token_ids"]).json
    equal(same["output_ids"], whole["response_token_ids"])
    for key in META_MASK:
        equal(same["meta_info"][key], whole["meta_info"][key], key)


@case
def streams_of_chat_and_completions_carry_masks():
    """Refused by the reference (7.9); here each row once, and together the reply that is not streamed."""
    asked = {"return_sampling_mask": True, "sampling_logprobs_mode": "support", "return_meta_info": True,
             "return_token_ids": True}
    for path, prompt in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "Name a city."}]}),
                         ("/v1/completions", {"prompt": "Name a city."})):
        body = {"model": "m", "max_tokens": 9, "seed": 3, "ignore_eos": True, "top_k": 8, **prompt, **asked}
        whole = cluster.request("POST", path, body).json["choices"][0]
        check_rows(whole["meta_info"], whole["response_token_ids"], "support")
        choices = [e["choices"][0] for e in cluster.request("POST", path, {**body, "stream": True}).events]
        if "chat" in path:
            equal(choices[0]["delta"], {"role": "assistant", "content": ""}, "the role comes first")
            check("meta_info" not in choices.pop(0), "and alone")
        ids = [i for choice in choices for i in choice["response_token_ids"]]
        equal(ids, whole["response_token_ids"], path)
        for key in META_MASK[:2]:
            equal([row for c in choices for row in c["meta_info"][key]], whole["meta_info"][key], key)
        equal([c["meta_info"][META_MASK[2]] for c in choices][-1], 9, "the length is the total")
        equal([c["finish_reason"] for c in choices], [None] * (len(choices) - 1) + ["length"], path)


@case
def an_overflow_in_a_chat():
    """Ties without biases: at such a temperature all that is not disallowed or held back has the same
    weight, so that the support grows when the stop ids may be drawn."""
    callable_ = (b"\x80\x04\x95R\0\0\0\0\0\0\0\x8c*sglang.srt.sampling.custom_logit_processor\x94\x8c"
                 b"\x1fDisallowedTokensLogitsProcessor\x94\x93\x94.").hex()
    late = {"temperature": 1e30, "top_k": 8, "min_tokens": 5, "stop_token_ids": list(range(40)),
             "custom_params": {"token_ids": list(range(80, 2100))}, "ignore_eos": None,
             "custom_logit_processor": json.dumps({"callable": callable_}),
             "return_sampling_mask": True, "return_meta_info": True, "return_token_ids": True}
    message = OVERFLOW.format(80)
    reply = chat(20, **late)
    equal((reply.status, reply.body), (400, long_error(message)))
    kept = chat(20, **late, on_mask_overflow="return_partial").json["choices"][0]
    equal((kept["finish_reason"], kept["meta_info"][META_MASK[0]]), ("abort", [list(range(40, 80))] * 5))
    equal((kept["meta_info"]["finish_reason"]["message"], kept["meta_info"]["sampling_mask_required"]),
          (message, 80))
    for policy in ("abort", "return_partial"):
        events = chat(20, **late, stream=True, on_mask_overflow=policy).events
        ids = [i for e in events[1:-1] for i in e["choices"][0]["response_token_ids"]]
        equal(ids, kept["response_token_ids"], "the tokens before")
        if policy == "abort":
            equal(events[-1], {"error": {"message": message, "type": "BadRequestError", "param": None,
                                         "code": 400}})
            continue
        last = events[-1]["choices"][0]
        equal((last["finish_reason"], last["meta_info"]["finish_reason"]),
              ("abort", kept["meta_info"]["finish_reason"]), "what is kept ends like a reply")


if __name__ == "__main__":
    with Cluster(tiny_model("wide"), shared=["--sampling-mask-max-tokens", str(CAP)]) as cluster:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
