"""/generate, chat and the information endpoints of a 1x1 cluster on a generated model, over HTTP."""

import json
import math

from harness import Cluster, case, check, check_rows, equal, in_threads, run_cases, tiny_model

PROMPT = [5, 9, 33, 70, 12, 8, 41]
cluster = None


def sample(n=12, **extra):
    return {"max_new_tokens": n, "temperature": 1.0, "top_k": 8, "top_p": 0.95, "sampling_seed": 11,
            "ignore_eos": True, **extra}


@case
def a_plain_reply_has_no_mask_fields():
    reply = cluster.generate(input_ids=PROMPT, sampling_params=sample())
    equal(reply.status, 200)
    meta = reply.json["meta_info"]
    equal(len(reply.json["output_ids"]), 12, "output ids")
    equal(meta["finish_reason"], {"type": "length", "length": 12})
    equal(meta["prompt_tokens"], len(PROMPT))
    equal(meta["completion_tokens"], 12)
    check(not [key for key in meta if "sampling" in key], f"mask fields without opt-in: {list(meta)}")
    check("output_token_logprobs" not in meta, "log-probabilities without opt-in")


@case
def masks_change_no_token_and_both_modes_agree():
    plain = cluster.generate(input_ids=PROMPT, sampling_params=sample()).json
    selected = cluster.generate(input_ids=PROMPT, sampling_params=sample(),
                                return_sampling_mask=True).json
    support = cluster.generate(input_ids=PROMPT, sampling_params=sample(), return_sampling_mask=True,
                               sampling_logprobs_mode="support").json
    equal(selected["output_ids"], plain["output_ids"])
    equal(support["output_ids"], plain["output_ids"])
    check_rows(selected["meta_info"], selected["output_ids"], "selected")
    check_rows(support["meta_info"], support["output_ids"], "support")
    masks = support["meta_info"]["output_token_sampling_mask"]
    equal(selected["meta_info"]["output_token_sampling_mask"], masks)
    for t, token in enumerate(support["output_ids"]):
        equal(support["meta_info"]["output_token_sampling_logprobs"][t][masks[t].index(token)],
              selected["meta_info"]["output_token_sampling_logprobs"][t], f"token {t}")
    check(max(len(row) for row in masks) > 1, "every support is a singleton; the case shows nothing")


@case
def streams_repeat_everything_and_end_as_the_plain_reply():
    for mode in ("selected", "support"):
        fields = dict(input_ids=PROMPT, sampling_params=sample(), return_logprob=True,
                      return_sampling_mask=True, sampling_logprobs_mode=mode)
        whole = cluster.generate(**fields).json
        reply = cluster.generate(stream=True, **fields)
        equal(reply.headers["Content-Type"].split(";")[0], "text/event-stream")
        events = reply.events
        check(len(events) >= 2, "one event only")
        for event in events:
            n = event["meta_info"]["completion_tokens"]
            equal(event["output_ids"], whole["output_ids"][:n])
            check(whole["text"].startswith(event["text"]) or n == len(whole["output_ids"]), "text grows")
            for key in ("output_token_sampling_mask", "output_token_sampling_logprobs",
                        "output_token_logprobs"):
                equal(event["meta_info"][key], whole["meta_info"][key][:n], key)
        equal(events[-1]["text"], whole["text"])
        equal(events[-1]["meta_info"]["finish_reason"], whole["meta_info"]["finish_reason"])
        check(all(e["meta_info"]["finish_reason"] is None for e in events[:-1]), "an early finish reason")


@case
def greedy_rows_are_singletons():
    for params in ({"temperature": 0}, {"top_k": 1}, {"temperature": 1e-7, "top_k": 50}):
        reply = cluster.generate(input_ids=PROMPT, return_sampling_mask=True,
                                 sampling_params={"max_new_tokens": 5, "ignore_eos": True, **params})
        equal(reply.status, 200, str(params))
        meta = reply.json["meta_info"]
        equal(meta["output_token_sampling_mask"], [[t] for t in reply.json["output_ids"]])
        equal(meta["output_token_sampling_logprobs"], [0.0] * 5)
        check(b'"output_token_sampling_logprobs":[0.0,0.0,0.0,0.0,0.0]' in reply.body, "number text")


@case
def log_probabilities_cover_the_whole_vocabulary():
    meta = cluster.generate(input_ids=PROMPT, return_logprob=True, return_sampling_mask=True,
                            sampling_params=sample()).json
    triples = meta["meta_info"]["output_token_logprobs"]
    equal([t[1] for t in triples], meta["output_ids"])
    equal([t[2] for t in triples], [None] * len(triples))
    for triple, selected in zip(triples, meta["meta_info"]["output_token_sampling_logprobs"]):
        check(triple[0] <= selected + 1e-4, f"{triple[0]} above the support's {selected}")
    equal(meta["meta_info"]["output_token_logprobs_length"], len(triples))
    equal(meta["meta_info"]["input_token_logprobs"], [])


@case
def numbers_print_as_the_shortest_double():
    body = cluster.generate(input_ids=PROMPT, return_sampling_mask=True, sampling_params=sample()).body
    values = json.loads(body)["meta_info"]["output_token_sampling_logprobs"]
    for value in values:
        check(repr(value).encode() in body or "e" in repr(value), f"{value!r} is not in the body")
        check(value == 0 or math.frexp(value)[0] * 2**24 % 1 == 0, f"{value!r} is not a float32")


@case
def few_tokens_and_none():
    zero = cluster.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 0})
    equal(zero.status, 200)
    equal((zero.json["output_ids"], zero.json["text"]), ([], ""))
    equal(zero.json["meta_info"]["finish_reason"], {"type": "length", "length": 0})
    one = cluster.generate(input_ids=PROMPT, return_sampling_mask=True, sampling_params=sample(1)).json
    equal(len(one["output_ids"]), 1)
    check_rows(one["meta_info"], one["output_ids"], "selected")
    twelve = cluster.generate(input_ids=PROMPT, sampling_params=sample(12)).json
    equal(one["output_ids"], twelve["output_ids"][:1], "the first token")
    unlimited = cluster.generate(input_ids=PROMPT, sampling_params=sample(None)).json
    context = cluster.get("/v1/models").json["data"][0]["max_model_len"]
    equal(len(unlimited["output_ids"]), context - len(PROMPT), "null runs to the context")
    default = cluster.generate(input_ids=PROMPT, sampling_params={"ignore_eos": True}).json
    equal(len(default["output_ids"]), 128, "the default number of tokens")


@case
def seeds_decide_and_no_seed_is_fresh():
    first = cluster.generate(input_ids=PROMPT, sampling_params=sample()).json["output_ids"]
    again = cluster.generate(input_ids=PROMPT, sampling_params=sample()).json["output_ids"]
    other = cluster.generate(input_ids=PROMPT, sampling_params=sample(sampling_seed=12)).json["output_ids"]
    equal(again, first, "the same seed")
    check(other != first, "another seed gave the same tokens")
    free = {"max_new_tokens": 24, "temperature": 2.0, "ignore_eos": True}
    fresh = {tuple(cluster.generate(input_ids=PROMPT, sampling_params=free).json["output_ids"])
             for _ in range(3)}
    equal(len(fresh), 3, "different replies without a seed")


@case
def stop_ids_and_stop_strings():
    whole = cluster.generate(input_ids=PROMPT, sampling_params=sample()).json
    stop = whole["output_ids"][4]
    at = whole["output_ids"].index(stop)
    params = sample(stop_token_ids=[None, stop])
    params["ignore_eos"] = False
    reply = cluster.generate(input_ids=PROMPT, return_sampling_mask=True, sampling_params=params).json
    check(len(reply["output_ids"]) <= at + 1, "ran past the stop id")
    if reply["meta_info"]["finish_reason"].get("matched") == stop:
        equal(reply["output_ids"], whole["output_ids"][: at + 1], "the stop token is in the ids")
    check_rows(reply["meta_info"], reply["output_ids"], "selected")
    ignored = cluster.generate(input_ids=PROMPT, sampling_params=sample(stop_token_ids=[stop])).json
    equal(ignored["output_ids"], whole["output_ids"], "ignore_eos also ignores stop ids")
    text = whole["text"]
    needle = next((text[i : i + 2] for i in range(3, len(text) - 2)
                   if text[i : i + 2].isascii() and text.index(text[i : i + 2]) == i), None)
    check(needle, f"no needle in {text!r}")
    for stream in (False, True):
        for trim, expected in ((False, text[: text.index(needle)]),
                               (True, text[: text.index(needle) + len(needle)])):
            reply = cluster.generate(input_ids=PROMPT, stream=stream, return_sampling_mask=True,
                                     sampling_params=sample(stop=["", needle, "\x00never"],
                                                            no_stop_trim=trim))
            last = reply.events[-1] if stream else reply.json
            equal(last["text"], expected, f"stream {stream}, no_stop_trim {trim}")
            equal(last["meta_info"]["finish_reason"], {"type": "stop", "matched": needle})
            check_rows(last["meta_info"], last["output_ids"], "selected")
            if stream:
                check(all(expected.startswith(e["text"]) for e in reply.events), "text was taken back")


@case
def many_requests_at_once_equal_themselves_alone():
    requests = [dict(input_ids=[1 + i] * (3 + 7 * i), return_sampling_mask=True,
                     sampling_logprobs_mode=("selected", "support")[i % 2],
                     sampling_params=sample(5 + 3 * i, sampling_seed=100 + i, top_k=1 + i))
                for i in range(10)]
    alone = [cluster.generate(**r).json for r in requests]
    together = in_threads([lambda r=r: cluster.generate(**r).json for r in requests])
    for i, (a, b) in enumerate(zip(alone, together)):
        equal(b["output_ids"], a["output_ids"], f"request {i}")
        for key in ("output_token_sampling_mask", "output_token_sampling_logprobs"):
            equal(b["meta_info"][key], a["meta_info"][key], f"request {i}, {key}")


@case
def samples_of_one_prompt():
    for extra in ({}, {"return_logprob": True, "top_logprobs_num": 3, "return_sampling_mask": True}):
        fields = dict(input_ids=PROMPT, rid="many", **extra)
        one = cluster.generate(input_ids=PROMPT, sampling_params=sample(), **extra).json
        reply = cluster.generate(sampling_params={**sample(), "n": 5}, **fields)
        equal(reply.status, 200, reply.body[:300])
        many = reply.json
        equal([r["meta_info"]["id"] for r in many], [f"many_{i}" for i in range(5)])
        equal(many[0]["output_ids"], one["output_ids"], "sample 0 is the reply of n 1")
        check(len({tuple(r["output_ids"]) for r in many}) > 3, "samples differ")
        last = {}
        for event in cluster.generate(sampling_params={**sample(), "n": 5}, stream=True, **fields).events:
            whole = many[event["index"]]
            n = event["meta_info"]["completion_tokens"]
            equal(event["output_ids"], whole["output_ids"][:n])
            for key in [k for k in whole["meta_info"] if isinstance(whole["meta_info"][k], list)]:
                if key == "output_token_weight_versions":
                    equal(event["meta_info"][key], [[0, n]], key)
                else:
                    equal(event["meta_info"][key], whole["meta_info"][key][:n], key)
            last[event["index"]] = event
        equal({i: (e["text"], e["meta_info"]["finish_reason"]) for i, e in last.items()},
              {i: (r["text"], r["meta_info"]["finish_reason"]) for i, r in enumerate(many)})
    cluster.wait_at_rest()


@case
def a_stop_string_ends_one_sample():
    params = {**sample(16), "n": 4}
    whole = cluster.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True).json
    stop = next(c for c in whole[1]["text"][2:] if c.isascii() and c.isprintable())
    cut = cluster.generate(input_ids=PROMPT, sampling_params={**params, "stop": stop}).json
    for before, after in zip(whole, cut):
        at = before["text"].find(stop)
        if at < 0 or before["text"].endswith(stop):
            continue
        equal(after["text"], before["text"][:at])
        equal(after["meta_info"]["finish_reason"]["matched"], stop)
    cluster.wait_at_rest()


@case
def the_largest_and_the_asked_log_probabilities():
    asked = [3, 60, 3]
    meta = cluster.generate(input_ids=PROMPT, return_logprob=True, top_logprobs_num=20,
                            token_ids_logprob=asked, sampling_params=sample()).json["meta_info"]
    equal(meta["input_token_logprobs"], [])
    equal((len(meta["output_top_logprobs"]), len(meta["output_token_ids_logprobs"])), (12, 12))
    for drawn, top, ids in zip(meta["output_token_logprobs"], meta["output_top_logprobs"],
                               meta["output_token_ids_logprobs"]):
        equal(len({id for _, id, _ in top}), 20)
        equal(top, sorted(top, key=lambda entry: (-entry[0], entry[1])), "best first")
        check(drawn in top or drawn[0] < top[-1][0], "the drawn token has its value in the list")
        equal([id for _, id, _ in ids], asked)
        for entry in ids:
            check(entry in top or entry[0] <= top[-1][0], f"{entry} against {top}")


@case
def the_prompt_is_scored_as_the_output_was():
    params = {"max_new_tokens": 10, "temperature": 1.0, "sampling_seed": 4, "ignore_eos": True}
    asked = dict(return_logprob=True, top_logprobs_num=4, token_ids_logprob=[7, 9])
    made = cluster.generate(input_ids=PROMPT, sampling_params=params, **asked).json
    ids = PROMPT + made["output_ids"]
    for start in (0, len(PROMPT) - 1, len(ids) - 1):
        scored = cluster.generate(input_ids=ids, sampling_params={"max_new_tokens": 0},
                                  logprob_start_len=start, return_text_in_logprobs=False, **asked)
        equal(scored.status, 200, scored.body[:300])
        meta = scored.json["meta_info"]
        equal([id for _, id, _ in meta["input_token_logprobs"]], ids[start:])
        equal(meta["input_token_logprobs"][0][0], None)
        equal((meta["input_top_logprobs"][0], meta["input_token_ids_logprobs"][0]), (None, None))
        for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
            of_prompt = meta["input_" + name][1:]
            of_output = made["meta_info"]["output_" + name]
            count = min(len(of_prompt), len(of_output))
            equal(of_prompt[len(of_prompt) - count:], of_output[len(of_output) - count:], name)
    whole = cluster.generate(input_ids=ids, sampling_params=sample(3), logprob_start_len=0, **asked).json
    for event in cluster.generate(input_ids=ids, sampling_params=sample(3), logprob_start_len=0,
                                  stream=True, **asked).events:
        for key in [k for k in whole["meta_info"] if k.startswith("input_")]:
            equal(event["meta_info"][key], whole["meta_info"][key], key)


@case
def parameters_change_what_is_drawn():
    def ids(**params):
        reply = cluster.generate(input_ids=PROMPT, sampling_params={
            "max_new_tokens": 24, "sampling_seed": 5, "ignore_eos": True, **params})
        equal(reply.status, 200, reply.body[:300])
        return reply.json["output_ids"]
    equal(ids(logit_bias={"42": 1000.0}), [42] * 24, "a bias")
    greedy = ids(temperature=0)
    barred = ids(temperature=0, logit_bias={str(greedy[0]): -1e30})
    check(greedy[0] not in barred, "an id with a bias of -1e30 was drawn")
    check(len(set(ids(temperature=0, logit_bias={"42": 1000.0}, presence_penalty=2))) == 1, "too weak")
    check(len(set(ids(logit_bias={"42": 30.0, "43": 29.0}, temperature=0, presence_penalty=2))) > 1,
          "a presence penalty lets the second one in")
    equal(ids(min_p=1.0), greedy, "only the largest is left")
    stop = greedy[2]
    params = {"max_new_tokens": 24, "temperature": 0, "stop_token_ids": [stop], "min_new_tokens": 12}
    held = cluster.generate(input_ids=PROMPT, sampling_params=params).json["output_ids"]
    check(len(held) >= 12 and stop not in held[:11], f"{stop} was drawn early: {held}")
    rows = cluster.generate(input_ids=PROMPT, return_sampling_mask=True, sampling_filter="rank",
                            sampling_params=sample(24, top_k=5)).json["meta_info"]
    check(max(len(row) for row in rows["output_token_sampling_mask"]) == 5, "rank keeps top_k ids")


@case
def salts_part_cached_prefixes():
    long = [3 + i % 90 for i in range(150)]
    def cached(**fields):
        return cluster.generate(input_ids=long, sampling_params={"max_new_tokens": 1},
                                **fields).json["meta_info"]["cached_tokens"]
    cached(cache_salt="a")
    check(cached(cache_salt="a") > 0, "the same salt shares")
    equal(cached(cache_salt="b"), 0)
    equal(cached(cache_salt="a", extra_key="x"), 0)
    equal(cached(), 0)


@case
def chat_plain_and_streamed():
    body = {"model": "any", "messages": [{"role": "system", "content": "Be brief."},
                                         {"role": "user", "name": None,
                                          "content": [{"type": "text", "text": "Hi "},
                                                      {"type": "text", "text": "there"}]}],
            "max_tokens": 9, "seed": 5, "ignore_eos": True, "temperature": 1.0, "top_k": 6, "n": 1,
            "stop": None, "response_format": None, "tools": []}
    reply = cluster.request("POST", "/v1/chat/completions", body)
    equal(reply.status, 200, reply.body)
    choice = reply.json["choices"][0]
    equal((reply.json["object"], reply.json["model"]), ("chat.completion", "any"))
    equal(choice["finish_reason"], "length")
    equal(choice["message"]["role"], "assistant")
    usage = reply.json["usage"]
    equal(usage["completion_tokens"], 9)
    equal(usage["total_tokens"], usage["prompt_tokens"] + 9)
    stream = cluster.request("POST", "/v1/chat/completions",
                             {**body, "stream": True, "stream_options": {"include_usage": True}})
    events = stream.events
    equal(events[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    equal(text, choice["message"]["content"])
    equal(events[-1]["choices"], [])
    equal(events[-1]["usage"]["completion_tokens"], 9)
    equal(events[-2]["choices"][0]["finish_reason"], "length")
    no_usage = cluster.request("POST", "/v1/chat/completions", {**body, "stream": True}).events
    check(all(e["choices"] for e in no_usage), "a usage chunk nobody asked for")
    mask = cluster.request("POST", "/v1/chat/completions",
                           {**body, "return_sampling_mask": True, "return_meta_info": True,
                            "sampling_logprobs_mode": "support", "return_token_ids": True}).json
    check_rows(mask["choices"][0]["meta_info"], mask["choices"][0]["response_token_ids"], "support")


@case
def the_information_endpoints():
    equal(cluster.get("/health").status, 200)
    models = cluster.get("/v1/models").json
    equal(models["object"], "list")
    name = models["data"][0]["id"]
    equal(cluster.get("/v1/models/" + name).json["id"], name)
    missing = cluster.get("/v1/models/none-such")
    equal(missing.status, 404)
    equal(missing.json["error"]["code"], "model_not_found")
    info = cluster.get("/server_info").json
    equal(info["sampling_mask_max_tokens"], 4096)
    equal(len(info["internal_states"]), 1)
    equal(sorted(w["role"] for w in info["workers"]), ["decode", "prefill"])
    equal(cluster.get("/get_server_info").json["sampling_mask_max_tokens"], 4096)
    equal(cluster.request("PUT", "/generate", {"input_ids": PROMPT, "sampling_params": sample(2)}).status,
          200)
    equal(cluster.get("/nothing").status, 404)
    equal(cluster.request("DELETE", "/generate").status, 405)
    head = cluster.request("HEAD", "/health")
    equal((head.status, head.body), (200, b""))


if __name__ == "__main__":
    with Cluster(tiny_model(), options=[]) as cluster:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
