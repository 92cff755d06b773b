"""Chats and completions with masks, streamed and not, of real clusters: what a stream tells in pieces is
what the whole reply says; completions beside /generate; first tokens whose mask overflows at the prefill
worker; what load generators and evaluation harnesses send."""

import base64
import json
import struct

import openai

from harness import Cluster, case, check, check_rows, equal, joined_runs, run_cases, tiny_model

IDS = [5, 9, 33, 70, 12, 8, 41]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPTS = {CHAT: {"input_ids": IDS}, COMPLETION: {"prompt": IDS}}
MASK_KEYS = ("output_token_sampling_mask", "output_token_sampling_logprobs")
cluster = small = None


def ask(path, on=None, **fields):
    return (on or cluster).request("POST", path, {**PROMPTS[path], **fields})


def drawn(n=1, **extra):
    return {"max_tokens": 14, "temperature": 1.0, "top_k": 8, "seed": 11, "ignore_eos": True, "n": n, **extra}


MASKS = {"return_sampling_mask": True, "sampling_logprobs_mode": "support", "return_meta_info": True,
         "return_token_ids": True}


def together(events):
    """The choices that the events of a stream make, by index: text, ids, lists, last scalars."""
    choices = {}
    for event in events:
        for choice in event.get("choices", []):
            whole = choices.setdefault(choice["index"], {"text": "", "ids": [], "meta": {}})
            delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
            whole["text"] += delta or ""
            whole["ids"] += choice.get("response_token_ids", [])
            for key, value in choice.get("meta_info", {}).items():
                if isinstance(value, list):
                    whole["meta"].setdefault(key, []).extend(value)
                    if key == "output_token_weight_versions":
                        whole["meta"][key] = joined_runs(whole["meta"][key])
                else:
                    whole["meta"][key] = value
            check(whole.get("reason") is None, "an event behind the end of a choice")
            whole["reason"] = choice["finish_reason"]
            if whole["reason"] is None and "meta_info" in choice:
                equal(choice["meta_info"]["finish_reason"], None)
    return choices


def of_reply(reply):
    return {c["index"]: {"text": c["message"]["content"] if "message" in c else c["text"],
                         "ids": c["response_token_ids"], "meta": c["meta_info"], "reason": c["finish_reason"]}
            for c in reply["choices"]}


def without_times(choices):
    for choice in choices.values():
        for key in ("e2e_latency", "response_sent_to_client_ts", "cached_tokens"):
            choice["meta"].pop(key, None)
    return choices


@case
def a_stream_in_pieces_is_the_whole_reply():
    for path in (CHAT, COMPLETION):
        for n in (1, 3):
            for extra in ({}, {"return_logprob": True}, {"stop": "a"}, {"skip_special_tokens": False}):
                fields = {**drawn(n), **MASKS, **extra, "rid": "r"}
                reply = ask(path, **fields)
                equal(reply.status, 200, reply.body[:300])
                whole = without_times(of_reply(reply.json))
                for choice in whole.values():
                    check_rows(choice["meta"], choice["ids"], "support")
                for interval in (1, 4):
                    stream = ask(path, stream=True, stream_interval=interval, **fields)
                    equal(without_times(together(stream.events)), whole, f"{path} {n} {extra}")


@case
def a_completion_is_what_generate_says():
    fields = {"max_new_tokens": 14, "temperature": 1.0, "top_k": 8, "sampling_seed": 11, "ignore_eos": True}
    native = cluster.generate(input_ids=IDS, sampling_params=fields, return_logprob=True, top_logprobs_num=3,
                              return_sampling_mask=True, sampling_logprobs_mode="support").json
    choice = ask(COMPLETION, logprobs=3, **drawn(), **MASKS).json["choices"][0]
    equal(choice["text"], native["text"])
    equal(choice["response_token_ids"], native["output_ids"])
    for key in MASK_KEYS + ("output_token_logprobs", "output_top_logprobs"):
        equal(choice["meta_info"][key], native["meta_info"][key], key)
    logprobs = choice["logprobs"]
    equal(logprobs["token_logprobs"], [x for x, _, _ in native["meta_info"]["output_token_logprobs"]])
    for value, name, tops, expected in zip(logprobs["token_logprobs"], logprobs["tokens"],
                                           logprobs["top_logprobs"],
                                           native["meta_info"]["output_top_logprobs"]):
        equal(tops[name], value)
        equal(sorted(tops.values(), reverse=True)[:3], [x for x, _, _ in expected])
    equal(len(logprobs["text_offset"]), 14)
    chat = ask(CHAT, **drawn(), **MASKS).json["choices"][0]
    equal(chat["response_token_ids"], native["output_ids"])
    equal(chat["meta_info"]["output_token_sampling_mask"], native["meta_info"]["output_token_sampling_mask"])
    text = cluster.generate(text="Hi there", sampling_params={**fields, "n": 2}).json
    reply = cluster.request("POST", COMPLETION, {"prompt": "Hi there", **drawn(2)}).json
    equal([c["text"] for c in reply["choices"]], [r["text"] for r in text])
    equal(reply["usage"]["prompt_tokens"], text[0]["meta_info"]["prompt_tokens"])
    equal(reply["usage"]["completion_tokens"], 28)
    equal(len(ask(COMPLETION, ignore_eos=True, return_token_ids=True).json["choices"][0]["response_token_ids"]),
          16)


@case
def a_list_of_prompts_is_its_prompts():
    prompts = ["Hello", [5, 9, 33], "a b c"]
    alone = [cluster.request("POST", COMPLETION, {"prompt": p, **drawn(2), **MASKS}).json for p in prompts]
    for stream in (False, True):
        reply = cluster.request("POST", COMPLETION, {"prompt": prompts, "stream": stream, "rid": "many",
                                                     "stream_options": {"include_usage": True}, **drawn(2), **MASKS})
        equal(reply.status, 200, reply.body[:300])
        choices = without_times(together(reply.events) if stream else of_reply(reply.json))
        usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
        equal(sorted(choices), list(range(6)))
        for i, one in enumerate(alone):
            for k, expected in without_times(of_reply(one)).items():
                equal(choices[2 * i + k]["meta"].pop("id"), f"many_{i}_{k}")
                expected["meta"].pop("id", None)
                equal(choices[2 * i + k], expected, f"prompt {i}, sample {k}")
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            equal(usage[key], sum(one["usage"][key] for one in alone), key)
    scored = cluster.request("POST", COMPLETION, {"prompt": [[5, 9, 33], [7] * 40], "echo": True, "logprobs": 1,
                                                  "max_tokens": 1, "temperature": 0, "seed": 1234}).json
    equal([len(c["logprobs"]["token_logprobs"]) for c in scored["choices"]], [4, 41])
    streamed = cluster.request("POST", COMPLETION, {"prompt": [[5, 9, 33], [7] * 40], "echo": True, "logprobs": 1,
                                                    "max_tokens": 0, "stream": True}).events
    equal({e["choices"][0]["index"]: e["choices"][0]["logprobs"]["token_logprobs"] for e in streamed},
          {c["index"]: c["logprobs"]["token_logprobs"][:-1] for c in scored["choices"]})
    equal(cluster.request("POST", COMPLETION, {"prompt": ["a", 5]}).status, 400)
    cluster.wait_at_rest()


@case
def an_echo_scores_the_prompt():
    made = ask(COMPLETION, logprobs=2, return_token_ids=True, **drawn(top_k=-1)).json["choices"][0]
    ids = IDS + made["response_token_ids"]
    for max_tokens in (0, 1):
        for stream in (False, True):
            reply = cluster.request("POST", COMPLETION, {
                "prompt": ids, "max_tokens": max_tokens, "echo": True, "logprobs": 2, "temperature": 0,
                "stream": stream, "ignore_eos": True})
            equal(reply.status, 200, reply.body[:300])
            if stream:
                logprobs = {"token_logprobs": [], "tokens": [], "top_logprobs": [], "text_offset": []}
                text = ""
                for event in reply.events:
                    text += event["choices"][0]["text"]
                    for key in logprobs:
                        logprobs[key] += event["choices"][0]["logprobs"][key]
            else:
                text, logprobs = reply.json["choices"][0]["text"], reply.json["choices"][0]["logprobs"]
            equal({len(logprobs[key]) for key in logprobs}, {len(ids) + max_tokens})
            equal(logprobs["token_logprobs"][0], None)
            equal(logprobs["top_logprobs"][0], None)
            end = len(ids)
            # Drawn at temperature 1 and with no filter: the scores are those of the draw.
            equal(logprobs["token_logprobs"][len(IDS):end], made["logprobs"]["token_logprobs"])
            equal(logprobs["tokens"][len(IDS):end], made["logprobs"]["tokens"])
            equal(logprobs["top_logprobs"][len(IDS):end], made["logprobs"]["top_logprobs"])
            check(logprobs["text_offset"] == sorted(logprobs["text_offset"]), "offsets grow")
            check(logprobs["text_offset"][-1] <= len(text), "an offset behind the text")
    plain = cluster.request("POST", COMPLETION, {"prompt": "Hello, \u20ac!", "echo": True, "max_tokens": 2,
                                                 "ignore_eos": True}).json["choices"][0]
    check(plain["text"].startswith("Hello, \u20ac!"), plain["text"])
    equal(plain["logprobs"], None)


@case
def an_evaluation_harness():
    """Continuations scored behind their contexts, several at once, by the rule of such programs: a sum over
    the continuation, and whether greedy decoding would have given it."""
    greedy = ask(COMPLETION, max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True)
    right = greedy.json["choices"][0]["response_token_ids"]
    pairs = [(IDS, right), (IDS, right[:3] + [right[3] + 1]), (IDS[:1], [17, 18])]
    reply = cluster.request("POST", COMPLETION, {
        "model": "m", "prompt": [c + t for c, t in pairs], "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True})
    equal(reply.status, 200, reply.body[:300])
    verdicts = []
    for choice, (context, continuation) in zip(sorted(reply.json["choices"], key=lambda c: c["index"]), pairs):
        values = choice["logprobs"]["token_logprobs"][len(context):-1]
        tops = choice["logprobs"]["top_logprobs"][len(context):-1]
        equal((len(values), len(tops)), (len(continuation),) * 2)
        verdicts.append(all(value == max(top.values()) for value, top in zip(values, tops)))
        native = cluster.generate(input_ids=context + continuation, return_logprob=True, logprob_start_len=0,
                                  sampling_params={"max_new_tokens": 0}).json["meta_info"]
        equal(values, [x for x, _, _ in native["input_token_logprobs"][len(context):]])
    equal(verdicts[:2], [True, False])


OVERFLOW = ("Sampling support exceeds --sampling-mask-max-tokens=4, commonly because of cutoff ties. Lower top_k "
            "to leave more headroom or increase the server limit.")


@case
def a_first_token_that_overflows_is_the_clients_400():
    """Prefill finds it, and decode never had the request's tokens; the client gets 400 all the same."""
    ties = {"top_k": 2, "temperature": 1e9}  # everything ties at this temperature
    for stream in (False, True):
        for n in (1, 3):
            replies = [small.generate(input_ids=IDS, stream=stream, return_sampling_mask=True,
                                      sampling_params={"max_new_tokens": 5, "n": n, **ties})]
            for path in (CHAT, COMPLETION):
                for mode in ("selected", "support"):
                    fields = {**drawn(n, **ties), **MASKS, "sampling_logprobs_mode": mode}
                    replies.append(ask(path, on=small, stream=stream, **fields))
                    error = replies[-1].json["error"]
                    equal((error["type"], error["code"]), ("BadRequestError", 400))
            for reply in replies:
                equal(reply.status, 400, reply.body[:300])
                message = reply.json["error"]["message"]
                equal(message[:len(OVERFLOW)], OVERFLOW)
                check(message[len(OVERFLOW):].startswith(" Required: "), message)
                equal(reply.headers["Content-Type"], "application/json")
    small.wait_at_rest()


def overflowing():
    """Parameters of a draw whose support fits the small cap at first and later does not, with the
    number of tokens before and the cap that it needs there."""
    for seed in range(400):
        params = {"temperature": 1.0, "min_p": (0.75, 0.8, 0.85, 0.9)[seed % 4]}
        bounded = small.generate(input_ids=IDS, return_sampling_mask=True, sampling_mask_mode="bounded",
                                 sampling_params={"max_new_tokens": 12, "sampling_seed": seed, "ignore_eos": True,
                                                  **params}).json
        sizes = bounded["meta_info"]["output_token_sampling_support_sizes"]
        wide = [i for i, size in enumerate(sizes) if size > 4]
        if wide and wide[0] >= 3:
            return {"seed": seed, **params}, wide[0], sizes[wide[0]], bounded["output_ids"][:wide[0]]
    raise AssertionError("no draw overflows late")


@case
def a_later_overflow_tells_what_was_drawn():
    params, count, needed, ids = overflowing()
    message = OVERFLOW + f" Required: {needed}."
    for path in (CHAT, COMPLETION):
        fields = {**MASKS, **params, "max_tokens": 12, "ignore_eos": True}
        lost = ask(path, on=small, **fields)
        equal((lost.status, lost.json["error"]["message"]), (400, message))
        part = ask(path, on=small, on_mask_overflow="return_partial", **fields)
        equal(part.status, 200, part.body[:300])
        whole = of_reply(part.json)[0]
        equal((whole["ids"], whole["reason"]), (ids, "abort"))
        equal(whole["meta"]["finish_reason"], {"type": "abort", "message": message, "status_code": 400,
                                               "err_type": "BadRequestError"})
        equal(whole["meta"]["sampling_mask_required"], needed)
        equal(part.json["usage"]["completion_tokens"], count)
        check_rows(whole["meta"], ids, "support")
        events = ask(path, on=small, stream=True, on_mask_overflow="return_partial", **fields).events
        streamed = together(events)[0]
        for choice in (whole, streamed):
            choice["meta"].pop("id")
        equal(without_times({0: streamed}), without_times({0: whole}))
        equal([e for e in events if "error" in e], [])
        events = ask(path, on=small, stream=True, **fields).events
        equal(events[-1], {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})
        streamed = together(events[:-1])[0]
        equal((streamed["ids"], streamed["reason"]), (ids, None))
        for key in MASK_KEYS:
            equal(streamed["meta"][key], whole["meta"][key])
    small.wait_at_rest()


@case
def the_package_raises_what_ends_a_stream():
    """The tokens before it have been read; a request that fails as a whole is its own exception."""
    params, _, needed, ids = overflowing()
    client = openai.OpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0, timeout=60)
    fields = dict(model="m", prompt=IDS, max_tokens=12, temperature=1.0, seed=params["seed"],
                  extra_body={**MASKS, "min_p": params["min_p"], "ignore_eos": True})
    told = []
    try:
        for chunk in client.completions.create(stream=True, **fields):
            told += chunk.choices[0].model_dump()["response_token_ids"]
        raise AssertionError("the stream ended as if nothing had happened")
    except openai.APIError as error:
        check(str(error).endswith(f" Required: {needed}."), str(error))
        equal(error.body["code"], 400)
    equal(told, ids)
    try:
        client.completions.create(**fields)
        raise AssertionError("an overflow is a reply")
    except openai.BadRequestError as error:
        check(str(error.body["message"]).endswith(f" Required: {needed}."), str(error))


def unpacked(array):
    kind = {"int32": "i", "float32": "f", "uint8": "B"}[array["dtype"]]
    return list(struct.unpack(f"<{array['shape'][0]}{kind}", base64.b64decode(array["data"])))


@case
def packed_and_bounded_masks_in_streams():
    """The arrays of all events hold what the lists hold."""
    for path in (CHAT, COMPLETION):
        fields = {**drawn(2), **MASKS, "sampling_mask_mode": "bounded"}
        lists = of_reply(ask(path, on=small, **fields).json)
        told = {i: {} for i in lists}
        for event in ask(path, on=small, stream=True, stream_interval=3, sampling_mask_format="packed",
                         **fields).events:
            for choice in event["choices"]:
                packed = choice.get("meta_info", {}).get("output_token_sampling_packed", {})
                for key, array in packed.items():
                    told[choice["index"]].setdefault(key, []).extend(unpacked(array))
        for i, choice in lists.items():
            meta = choice["meta"]
            rows = meta["output_token_sampling_mask"]
            equal(told[i], {
                "lengths": [len(row) for row in rows], "token_ids": [x for row in rows for x in row],
                "logprobs": [x for row in meta["output_token_sampling_logprobs"] for x in row],
                "truncated": [int(x) for x in meta["output_token_sampling_mask_truncated"]],
                "support_sizes": meta["output_token_sampling_support_sizes"]})
            equal({len(row) for row in rows}, {4}, "top_k 8 and a cap of 4")


@case
def load_generators():
    oai = {"model": "default", "prompt": "a b c", "temperature": 0.0, "best_of": 1, "max_tokens": 8,
           "stream": True, "ignore_eos": True}
    events = cluster.request("POST", COMPLETION, oai).events
    check(all(e["choices"][0]["text"] is not None for e in events), "text in every event")
    equal(events[0]["object"], "text_completion")
    vllm = {"model": "m", "prompt": "a b c", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "min_tokens": 8}
    events = cluster.request("POST", COMPLETION, vllm).events
    equal(events[-1]["choices"], [])
    equal(events[-1]["usage"]["completion_tokens"], 8)
    check(all(e.get("usage") is None for e in events[:-1]), "usage before the last event")
    guide = {"model": "m", "prompt": "a", "max_tokens": 4, "stream": True, "ignore_eos": True,
             "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = cluster.request("POST", COMPLETION, guide).events
    counts = [e["usage"]["completion_tokens"] for e in events]
    equal((counts, counts[-1]), (sorted(counts), 4))
    whole = cluster.request("POST", COMPLETION, {**oai, "stream": False}).json
    equal((whole["object"], whole["usage"]["completion_tokens"]), ("text_completion", 8))


@case
def bad_bodies_are_400_by_name():
    for fields, name in (({"prompt": 5}, "prompt"), ({"logprobs": True}, "logprobs"), ({"best_of": 3}, "best_of"),
                         ({"suffix": "x"}, "suffix"), ({"echo": "yes"}, "echo"), ({"max_tokens": -1}, "max_tokens")):
        for stream in (False, True):
            reply = cluster.request("POST", COMPLETION, {"prompt": "a", "stream": stream, **fields})
            equal(reply.status, 400)
            check(name in json.loads(reply.body)["error"]["message"], reply.body)
    equal(cluster.request("POST", COMPLETION, {}).status, 400)
    equal(cluster.get(COMPLETION).status, 405)


if __name__ == "__main__":
    model = tiny_model()
    with Cluster(model) as cluster, Cluster(model, shared=["--sampling-mask-max-tokens", "4"]) as small:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
