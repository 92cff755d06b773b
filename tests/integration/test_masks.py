"""What masks can do beyond the reference: any filter that may fit, bounded supports, the beginning of a
reply whose support grew too large, and ids that are never drawn.

Supports of a known width are made with logit_bias: ids with a bias of 1e30 are ties and have all weight."""

import json
import math

from harness import Cluster, case, check, check_rows, equal, in_threads, run_cases, tiny_model

CAP = 64
PROMPT = [5, 9, 33, 70, 12, 8, 41]
MASK, LOGPROBS, LENGTH = ("output_token_sampling_mask", "output_token_sampling_logprobs",
                          "output_token_sampling_mask_length")
OVERFLOW = (f"Sampling support exceeds --sampling-mask-max-tokens={CAP}, commonly because of cutoff ties. "
            "Lower top_k to leave more headroom or increase the server limit. Required: {}.")
# As dill writes sglang.srt.sampling.custom_logit_processor.DisallowedTokensLogitsProcessor.
PICKLE = (b"\x80\x04\x95R\0\0\0\0\0\0\0\x8c*sglang.srt.sampling.custom_logit_processor\x94\x8c"
          b"\x1fDisallowedTokensLogitsProcessor\x94\x93\x94.")
PROCESSOR = json.dumps({"callable": PICKLE.hex()})
cluster = None


def ties(*ids):
    return {str(i): 1e30 for i in ids}


def grows(at=5, width=40, by=40):
    """A support of `width` ties until `at` tokens are there, and of `by` more behind them."""
    stops = list(range(1000, 1000 + by))
    return {"top_k": 2, "logit_bias": ties(*range(100, 100 + width), *stops), "stop_token_ids": stops,
            "min_new_tokens": at, "max_new_tokens": 30, "sampling_seed": 3}


def params(**extra):
    return {"max_new_tokens": 8, "sampling_seed": 3, "ignore_eos": True, **extra}


def ask(p=None, mode="support", **fields):
    body = {"input_ids": PROMPT, "sampling_params": params() if p is None else p,
            "return_sampling_mask": True, "sampling_logprobs_mode": mode, **fields}
    return cluster.request("POST", "/generate", {k: v for k, v in body.items() if v is not None})


def good(*args, **fields):
    reply = ask(*args, **fields)
    equal(reply.status, 200, reply.body[:300])
    return reply.json


@case
def any_filter_that_fits_is_run():
    for p in ({"top_p": 0.02}, {"min_p": 0.9}, {"top_k": 2000, "top_p": 0.02}, {"top_k": -1, "min_p": 0.95},
              {"top_p": 0.02, "sampling_filter": "rank"}):
        whole = good(params(**p))
        check_rows(whole["meta_info"], whole["output_ids"], "support")
        plain = cluster.generate(input_ids=PROMPT, sampling_params=params(**p)).json
        equal(whole["output_ids"], plain["output_ids"], f"{p}: a mask changes no token")
    # And what does not fit says what it would need.
    for p in ({"top_k": 65}, {"top_k": 65, "top_p": 0.9999999}):
        reply = ask(params(**p))
        equal((reply.status, reply.json["error"]["message"]), (400, OVERFLOW.format(65)), f"{p}")
    reply = ask(params(top_p=0.9))
    equal(reply.status, 400)
    check("Required: " in reply.json["error"]["message"], reply.body)


@case
def a_bounded_support_is_cut_and_says_so():
    """Tokens are those without a mask; log-probabilities those of the whole support."""
    for p in (params(), params(top_p=0.9), params(top_k=500), params(sampling_filter="rank", top_k=100)):
        plain = cluster.generate(input_ids=PROMPT, sampling_params=p).json
        selected = good(p, mode="selected", sampling_mask_mode="bounded", return_logprob=True)
        support = good(p, sampling_mask_mode="bounded")
        for whole in (selected, support):
            equal(whole["output_ids"], plain["output_ids"], f"{p}")
            equal([len(row) for row in whole["meta_info"][MASK]], [CAP] * 8, f"{p}")
            for token, row in zip(whole["output_ids"], whole["meta_info"][MASK]):
                check(token in row and len(set(row)) == CAP, "the drawn token is kept")
        for t, token in enumerate(plain["output_ids"]):
            values = support["meta_info"][LOGPROBS][t]
            equal(selected["meta_info"][LOGPROBS][t],
                  values[support["meta_info"][MASK][t].index(token)], "one number of one draw")
            check(sum(math.exp(v) for v in values) < 1, "a cut row has not all of the mass")
            check(selected["meta_info"]["output_token_logprobs"][t][0] <= selected["meta_info"][LOGPROBS][t],
                  "below the log-probability over the vocabulary")
    # What fits is the same in both modes.
    exact, bounded = good(params(top_k=8)), good(params(top_k=8), sampling_mask_mode="bounded")
    for key in (MASK, LOGPROBS, LENGTH):
        equal(bounded["meta_info"][key], exact["meta_info"][key], key)


@case
def an_overflow_keeps_what_there_is():
    whole = good({**grows(), "logit_bias": ties(*range(100, 140)), "max_new_tokens": 5})
    part = good(grows(), on_mask_overflow="return_partial")
    for key in ("text", "output_ids"):
        equal(part[key], whole[key])
    for key in (MASK, LOGPROBS, LENGTH):
        equal(part["meta_info"][key], whole["meta_info"][key])
    equal(part["meta_info"]["finish_reason"], {"type": "abort", "message": OVERFLOW.format(80),
                                               "status_code": 400, "err_type": "BadRequestError"})
    equal((part["meta_info"]["sampling_mask_required"], part["meta_info"]["completion_tokens"]), (80, 5))
    for default in ("abort", None):
        lost = ask(grows(), on_mask_overflow=default)
        equal((lost.status, lost.json), (400, {"error": {"message": OVERFLOW.format(80)}}))
    for stream in (False, True):
        first = ask(grows(width=70, at=0), on_mask_overflow="return_partial", stream=stream)
        equal((first.status, first.json), (400, {"error": {"message": OVERFLOW.format(110)}}),
              "nothing there is to keep")
    for value in ("abort", "return_partial"):
        last = ask(grows(), on_mask_overflow=value, stream=True).events[-1]
        for key in ("text", "output_ids"):
            equal(last[key], part[key])
        for key in (MASK, LOGPROBS, LENGTH, "sampling_mask_required", "finish_reason"):
            equal(last["meta_info"][key], part["meta_info"][key])


@case
def samples_that_all_overflow_name_the_largest_need():
    """Each draws its own way, so each needs its own; the reply is one sentence."""
    p = {"temperature": 1.0, "n": 4, "max_new_tokens": 60, "ignore_eos": True}
    for seed in range(40):
        p |= {"sampling_seed": seed, "min_p": 0.38}
        sizes = [[s for s in sample["meta_info"]["output_token_sampling_support_sizes"] if s > CAP]
                 for sample in good(p, sampling_mask_mode="bounded")]
        if all(sizes) and sizes[0][0] < max(over[0] for over in sizes):
            break
    else:
        raise AssertionError("no seed of which the first sample needs the least")
    lost = ask(p)
    equal((lost.status, lost.json["error"]["message"]), (400, OVERFLOW.format(max(over[0] for over in sizes))))
    for stream in (False, True):
        kept = ask(p, on_mask_overflow="return_partial", stream=stream)
        last = {e["index"]: e for e in kept.events} if stream else dict(enumerate(kept.json))
        equal([last[i]["meta_info"]["sampling_mask_required"] for i in range(4)], [over[0] for over in sizes])


@case
def a_support_is_the_head_of_the_largest():
    """Numbers of a draw that come from other places: the largest, asked ids, and the row."""
    for p in ({"top_k": 8}, {"min_p": 0.95}, {"top_k": 30, "sampling_filter": "rank"},
              {"temperature": 0.3, "top_k": 5, "frequency_penalty": 1.5, "repetition_penalty": 1.3}):
        whole = good(params(**p), return_logprob=True, top_logprobs_num=64, token_ids_logprob=[3, 60, 3],
                     logprob_start_len=0)
        meta = whole["meta_info"]
        check_rows(meta, whole["output_ids"], "support")
        for t, (row, values) in enumerate(zip(meta[MASK], meta[LOGPROBS])):
            tops = meta["output_top_logprobs"][t]
            equal(row, [i for _, i, _ in tops][:len(row)], f"{p}, row {t}")
            shifts = [value - top[0] for value, top in zip(values, tops)]
            check(min(shifts) >= 0 and max(shifts) - min(shifts) < 1e-5, f"{p}, row {t}: {shifts}")
            equal([i for _, i, _ in meta["output_token_ids_logprobs"][t]], [3, 60, 3])


@case
def the_servers_own_defaults():
    """The router's rule for ties and its interval, with threads of its own for each connection."""
    asked = {"input_ids": PROMPT, "return_sampling_mask": True, "stream": True}
    tied = {"max_new_tokens": 7, "top_k": 2, "ignore_eos": True, "logit_bias": ties(*range(9))}
    with Cluster(tiny_model("wide"), options=["--router-options", "--sampling-filter rank --stream-interval 3 "
                                              "--http-threads 3 --tokenizer-threads 3"]) as other:
        for p, width, counts in (({}, 2, [1, 4, 7]), ({"sampling_filter": "joint"}, 9, [1, 4, 7]),
                                 ({"stream_interval": 1}, 2, [1, 2, 3, 4, 5, 6, 7])):
            events = other.generate(**asked, sampling_params={**tied, **p}).events
            equal([len(event["output_ids"]) for event in events], counts, f"{p}")
            equal([len(row) for row in events[-1]["meta_info"][MASK]], [width] * 7, f"{p}")
        bodies = [{**asked, "stream": False, "sampling_logprobs_mode": "support",
                   "sampling_params": params(top_k=3 + i, max_new_tokens=30, sampling_filter="joint")} for i in range(20)]
        replies = in_threads([lambda b=b: other.request("POST", "/generate", b).json for b in bodies])
    for body, reply in zip(bodies, replies):
        expected = cluster.request("POST", "/generate", body).json
        for key in (MASK, LOGPROBS, LENGTH):
            equal(reply["meta_info"][key], expected["meta_info"][key], f"{body}, {key}")


def of_a_cap(cap):
    """What fits is whole, what does not is refused or cut; a cap above the vocabulary refuses nothing."""
    widest = min(cap, 2100)
    for mode in ("selected", "support"):
        greedy = good({"temperature": 0, "max_new_tokens": 3}, mode=mode)
        check_rows(greedy["meta_info"], greedy["output_ids"], mode, top_k=1)
        for k in (2, 3):
            for stream in (False, True):
                reply = ask(params(top_k=k), mode=mode, stream=stream)
                if k <= cap:
                    equal((reply.status, len(reply.events if stream else reply.json)), (200, 8 if stream else 3))
                    continue
                equal((reply.status, reply.json["error"]["message"]),
                      (400, OVERFLOW.replace("tokens=64", f"tokens={cap}").format(k)))
        equal(ask(params(), mode=mode).status, 200 if cap >= 2100 else 400, "no filter")
        for whole in good(params(n=2), mode=mode, sampling_mask_mode="bounded", return_logprob=True):
            meta = whole["meta_info"]
            for t, token in enumerate(whole["output_ids"]):
                row, value = meta[MASK][t], meta[LOGPROBS][t]
                equal((len(row), meta["output_token_sampling_support_sizes"][t],
                       meta["output_token_sampling_mask_truncated"][t]), (widest, 2100, cap < 2100))
                # Nothing is filtered: the support is the vocabulary.
                equal(value[row.index(token)] if mode == "support" else value,
                      meta["output_token_logprobs"][t][0])


@case
def caps_of_one_and_two_and_above_the_vocabulary():
    global cluster
    outer = cluster
    try:
        for cap in (1, 2, 65536):
            with Cluster(tiny_model("wide"), shared=["--sampling-mask-max-tokens", str(cap)]) as cluster:
                of_a_cap(cap)
    finally:
        cluster = outer


@case
def what_cannot_be_drawn_makes_room():
    """Nothing filters, but no more ids than the cap are left."""
    for left in (CAP, CAP + 1):
        p = params(custom_params={"token_ids": list(range(2100 - left))})
        reply = ask(p, custom_logit_processor=PROCESSOR)
        equal(reply.status, 200 if left == CAP else 400, reply.body[:200])
        if left == CAP:
            equal({len(row) for row in reply.json["meta_info"][MASK]}, {CAP})
        else:
            check(f"all {left} ids are in the support" in reply.json["error"]["message"], reply.body)


@case
def each_sample_and_item_keeps_its_own():
    """Of three items the middle one fits."""
    fits = {**grows(), "logit_bias": ties(*range(100, 140)), "max_new_tokens": 5}
    batch = good([{**grows(), "n": 2}, fits, grows(width=70, at=0)], input_ids=[PROMPT] * 3,
                 on_mask_overflow=["return_partial", None, "return_partial"])
    equal([item["meta_info"]["finish_reason"]["type"] for item in batch], ["abort", "abort", "length", "abort"])
    equal([item["meta_info"].get("sampling_mask_required") for item in batch], [80, 80, None, 110])
    equal([len(item["output_ids"]) for item in batch], [5, 5, 5, 0])
    equal(batch[0]["output_ids"], batch[2]["output_ids"])
    equal(batch[1]["meta_info"]["finish_reason"]["message"], OVERFLOW.format(80))


@case
def disallowed_tokens_are_never_drawn():
    free = good(params(top_k=8), return_logprob=True, top_logprobs_num=3)
    banned = sorted({*free["output_ids"], *free["meta_info"][MASK][0]})
    p = params(top_k=8, custom_params={"token_ids": banned}, max_new_tokens=30)
    without = good(p, custom_logit_processor=PROCESSOR, return_logprob=True, top_logprobs_num=3,
                   token_ids_logprob=banned[:2])
    meta = without["meta_info"]
    check_rows(meta, without["output_ids"], "support")
    seen = {*without["output_ids"], *(i for row in meta[MASK] for i in row),
            *(entry[1] for top in meta["output_top_logprobs"] for entry in top)}
    equal(seen & set(banned), set(), "disallowed and seen")
    equal([[entry[:2] for entry in row] for row in meta["output_token_ids_logprobs"]],
          [[[-9999.0, i] for i in banned[:2]]] * 30)
    # A bias brings none of them back; the same draw without a mask, in chat and as an item of a list.
    again = cluster.generate(input_ids=[PROMPT, [1]], custom_logit_processor=[PROCESSOR, None], sampling_params=[
        {**p, "logit_bias": {str(i): 100 for i in banned}}, {"max_new_tokens": 1}]).json
    equal(again[0]["output_ids"], without["output_ids"])
    chat = cluster.request("POST", "/v1/chat/completions", {
        "model": "m", "input_ids": PROMPT, "max_tokens": 30, "seed": 3, "ignore_eos": True, "top_k": 8,
        "custom_logit_processor": PROCESSOR, "custom_params": {"token_ids": banned}, "return_token_ids": True})
    equal(chat.json["choices"][0]["response_token_ids"], without["output_ids"])


@case
def other_processors_are_refused_and_disturb_nobody():
    other = json.dumps({"callable": PICKLE.replace(b"Disallowed", b"Harmless!!").hex()})
    for value in (other, "x", "{", json.dumps({"callable": "00"}), 7, {"callable": PICKLE.hex()}):
        for mask in (True, None):
            reply = ask(return_sampling_mask=mask, custom_logit_processor=value)
            equal(reply.status, 400, f"{value}")
            check("only supports DisallowedTokensLogitsProcessor" in reply.json["error"]["message"], reply.body)
    for value in (None, {}, {"token_ids": 5}, {"ids": [5]}):
        reply = ask(params(top_k=8, custom_params=value), custom_logit_processor=PROCESSOR)
        equal(reply.status, 400, f"{value}")
        check("only supports DisallowedTokensLogitsProcessor" in reply.json["error"]["message"], reply.body)
    good(params(top_k=8))


if __name__ == "__main__":
    with Cluster(tiny_model("wide"), shared=["--sampling-mask-max-tokens", str(CAP)]) as cluster:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
