"""Aborts over HTTP in real clusters, on the sim device, whose steps take the time they are given: in every
phase, streamed or not, on every endpoint. What an aborted reply has is the beginning, bit for bit, of what it
would have been, and afterwards nothing is left in any process."""

import base64
import http.client
import json
import struct
import threading

from harness import Cluster, Reply, case, check, check_rows, equal, in_threads, run_cases, tiny_model, wait_until

SUPPORT = {"return_sampling_mask": True, "sampling_logprobs_mode": "support", "return_logprob": True}


def sim(step_us=5000, prefill=1, decode=1, shared=(), options=(), support="7"):
    return Cluster(tiny_model(), prefill, decode, options=["--device", "sim", *options],
                   shared=["--sim-step-us", str(step_us), "--sim-support", support, *shared])


def body(rid, tokens=120, prompt=(1, 2, 3), seed=5, **fields):
    parameters = {"max_new_tokens": tokens, "ignore_eos": True, "top_k": 7, "sampling_seed": seed,
                  **fields.pop("sampling_params", {})}
    return {"input_ids": list(prompt), "rid": rid, "sampling_params": parameters, **fields}


def abort(cluster, **fields):
    reply = cluster.request("POST", "/abort_request", fields)
    equal((reply.status, reply.body), (200, b""), "the answer to an abort")


def finish(message):
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


class Asked(threading.Thread):
    """A request on its way; result() is its reply."""

    def __init__(self, cluster, path, fields, headers=None):
        super().__init__(daemon=True)
        self.cluster, self.path, self.fields, self.headers = cluster, path, fields, headers
        self.reply = self.error = None
        self.start()

    def run(self):
        try:
            self.reply = self.cluster.request("POST", self.path, self.fields, self.headers)
        except BaseException as error:  # told by result()
            self.error = error

    def result(self):
        self.join(60)
        check(not self.is_alive(), f"no reply to {self.fields}")
        if self.error:
            raise self.error
        return self.reply


def drawn(cluster):
    """Sequences that decode draws, as of the last heartbeats."""
    return sum(w["sequences_running"] for w in cluster.workers() if w["role"] == "decode")


def start(cluster, path, fields, headers=None, count=1):
    """A request of which so many sequences are being drawn now."""
    wait_until(lambda: drawn(cluster) == 0, "nothing else is drawn")
    asked = Asked(cluster, path, fields, headers)
    wait_until(lambda: drawn(cluster) == count, f"{count} sequences are drawn")
    return asked


LISTS = ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs")


def check_prefix(reply, whole, message="Aborted", least=0, most=0):
    """A /generate reply against the one that was not aborted; it may have all tokens only with `most`."""
    meta, tokens = reply["meta_info"], len(reply["output_ids"])
    equal(meta["finish_reason"], finish(message))
    check(least <= tokens <= (most or len(whole["output_ids"]) - 1), f"{tokens} tokens")
    equal(reply["output_ids"], whole["output_ids"][:tokens])
    check(whole["text"].startswith(reply["text"].rstrip("\ufffd")), "the text is the beginning")
    equal(meta["completion_tokens"], tokens)
    for name in LISTS:
        if name in whole["meta_info"] and tokens > 0:
            equal(meta[name], whole["meta_info"][name][:tokens], name)
    if "output_token_sampling_mask" in whole["meta_info"]:
        if tokens == 0:
            check("output_token_sampling_mask" not in meta, "masks without a token")
        else:
            check_rows(meta, reply["output_ids"], "support")
    if "output_token_logprobs" in whole["meta_info"]:
        equal(meta["output_token_logprobs_length"], tokens)
    return tokens


@case
def a_whole_reply_has_what_decode_still_held():
    with sim() as cluster:
        for number in range(6):
            fields = body("r", prompt=[number, 2], **SUPPORT)
            whole = cluster.generate(**fields).json
            asked = start(cluster, "/generate", fields)
            abort(cluster, rid="r")
            reply = asked.result()
            equal(reply.status, 200)
            check_prefix(reply.json, whole, least=1)
        cluster.wait_at_rest()


@case
def more_than_the_first_row_comes():
    """Rows of whole replies travel by fifties: between the first one and the fiftieth they are with decode."""
    with sim(step_us=20000) as cluster:
        fields = body("r", tokens=45, **SUPPORT)
        whole = cluster.generate(**fields).json
        tokens = []
        for _ in range(3):
            asked = start(cluster, "/generate", fields)
            abort(cluster, rid="r")
            tokens.append(check_prefix(asked.result().json, whole, least=1))
        check(max(tokens) > 1, f"only {tokens} tokens came")


@case
def streams_end_with_an_event_and_done():
    with sim() as cluster:
        for interval in (1, 7):
            fields = body("r", tokens=250, stream=True, **SUPPORT,
                          sampling_params={"stream_interval": interval})
            whole = cluster.generate(**{**fields, "stream": False}).json
            asked = start(cluster, "/generate", fields)
            abort(cluster, rid="r")
            events = asked.result().events
            equal([e["meta_info"]["finish_reason"] for e in events[:-1]], [None] * (len(events) - 1))
            check_prefix(events[-1], whole, least=1)


@case
def chats_and_completions():
    with sim() as cluster:
        for path, ask in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                          ("/v1/completions", {"prompt": "a"})):
            for stream in (False, True):
                fields = {"model": "m", **ask, "rid": "r", "max_tokens": 3000, "ignore_eos": True, "seed": 4,
                          "return_meta_info": True, "return_sampling_mask": True, "top_k": 7,
                          "return_token_ids": True, "stream": stream, "n": 2}
                asked = start(cluster, path, fields, count=2)
                abort(cluster, rid="r")
                reply = asked.result()
                equal(reply.status, 200, reply.body)
                parts = [c for e in reply.events for c in e["choices"]] if stream else reply.json["choices"]
                for index in range(2):
                    mine = [c for c in parts if c["index"] == index]
                    equal([c["finish_reason"] for c in mine], [None] * (len(mine) - 1) + ["abort"])
                    told = [c["meta_info"] for c in mine if c.get("meta_info")]
                    equal(told[-1]["finish_reason"], finish("Aborted"))
                    ids = [i for c in mine for i in c.get("response_token_ids") or []]
                    rows = [r for m in told for r in m.get("output_token_sampling_mask", [])]
                    check(len(ids) > 0, "there are tokens")
                    equal(len(rows), len(ids), "rows")
                    check(all(i in r for i, r in zip(ids, rows)), "tokens are in their rows")


@case
def packed_and_files():
    with sim() as cluster:
        plain = body("r", **SUPPORT)
        whole = cluster.generate(**plain).json["meta_info"]
        for fields, headers in (({**plain, "sampling_mask_format": "packed"}, None),
                                (plain, {"Accept": "application/x-safetensors"})):
            asked = start(cluster, "/generate", fields, headers)
            abort(cluster, rid="r")
            reply = asked.result()
            equal(reply.status, 200)
            if headers:
                size = struct.unpack("<Q", reply.body[:8])[0]
                head, data = json.loads(reply.body[8:8 + size]), reply.body[8 + size:]
                def part(name, head=head, data=data):
                    start, end = head[name]["data_offsets"]
                    return data[start:end]
                meta = json.loads(part("reply_json"))["meta_info"]
                lengths, ids = part("sampling_mask_lengths"), part("sampling_mask_token_ids")
            else:
                meta = reply.json["meta_info"]
                packed = meta["output_token_sampling_packed"]
                lengths, ids = (base64.b64decode(packed[n]["data"]) for n in ("lengths", "token_ids"))
            tokens = meta["completion_tokens"]
            equal(meta["finish_reason"], finish("Aborted"))
            check(0 < tokens < 120, f"{tokens} tokens")
            rows = whole["output_token_sampling_mask"][:tokens]
            equal(list(struct.unpack(f"<{len(lengths) // 4}i", lengths)), [len(r) for r in rows])
            equal(list(struct.unpack(f"<{len(ids) // 4}i", ids)), [i for r in rows for i in r])


@case
def in_the_queue_and_in_prefill():
    """One long prompt computes, the others wait for it; neither has a token."""
    with sim(step_us=300000, shared=["--chunk-tokens", "32"]) as cluster:
        for stream in (False, True):
            prompts = [Asked(cluster, "/generate", body(f"p{i}", 4, [i] * 200, stream=stream, **SUPPORT))
                       for i in range(6)]
            wait_until(lambda: cluster.get("/server_info").json["requests_running"] >= 1
                       and cluster.get("/server_info").json["requests_queued"] >= 1, "some wait")
            abort(cluster, rid="p", prefix=True)
            messages = set()
            for asked in prompts:
                reply = asked.result()
                equal(reply.status, 200, reply.body)
                told = reply.events if stream else [reply.json]
                equal(len(told), 1)
                equal((told[0]["output_ids"], told[0]["text"]), ([], ""))
                equal(told[0]["meta_info"]["output_token_logprobs"], [])
                check("output_token_sampling_mask" not in told[0]["meta_info"], "rows of no token")
                reason = told[0]["meta_info"]["finish_reason"]
                equal(reason, finish(reason["message"]))
                messages.add(reason["message"])
            equal(messages, {"Abort in waiting queue", "Abort before prefill"})
            cluster.wait_at_rest()


@case
def prompts_that_are_scored():
    """Without a token their log-probabilities are not there; with one they are complete."""
    with sim(step_us=200000, shared=["--chunk-tokens", "32"]) as cluster:
        fields = body("r", 50, [3] * 100, logprob_start_len=0, return_logprob=True)
        asked = Asked(cluster, "/generate", fields)
        wait_until(lambda: cluster.get("/server_info").json["requests_running"] == 1, "it runs")
        abort(cluster, rid="r")
        meta = asked.result().json["meta_info"]
        equal(meta["finish_reason"], finish("Abort before prefill"))
        equal((meta["input_token_logprobs"], meta["output_token_logprobs"]), ([], []))
        asked = start(cluster, "/generate", fields)
        abort(cluster, rid="r")
        meta = asked.result().json["meta_info"]
        equal(meta["finish_reason"], finish("Aborted"))
        equal(len(meta["input_token_logprobs"]), 100)


@case
def samples_and_lists_by_their_names():
    with sim() as cluster:
        fields = body("s", 400, sampling_params={"n": 3})
        asked = start(cluster, "/generate", fields, count=3)
        abort(cluster, rid="s_1")
        wait_until(lambda: drawn(cluster) == 2, "one ended")
        abort(cluster, rid="s_3")
        abort(cluster, rid="s_")
        abort(cluster, rid="")
        abort(cluster)
        abort(cluster, prefix=True)
        replies = asked.result().json
        equal([r["meta_info"]["finish_reason"]["type"] for r in replies], ["length", "abort", "length"])
        lists = body("b", 400)
        lists["input_ids"] = [[1], [2], [3]]
        asked = start(cluster, "/generate", lists, count=3)
        abort(cluster, rid="b_2")
        wait_until(lambda: drawn(cluster) == 2, "one ended")
        abort(cluster, rid="b")
        replies = asked.result().json
        equal([r["meta_info"]["finish_reason"] for r in replies], [finish("Aborted")] * 3)
        check(len(replies[2]["output_ids"]) < len(replies[0]["output_ids"]), "the third ended first")
        lists["rid"] = ["x1", "x2", "y"]
        asked = start(cluster, "/generate", lists, count=3)
        abort(cluster, rid="x", prefix=True)
        replies = asked.result().json
        equal([r["meta_info"]["finish_reason"]["type"] for r in replies], ["abort", "abort", "length"])


@case
def all_of_them():
    with sim(decode=2, prefill=2) as cluster:
        asked = [Asked(cluster, "/generate", body(None, 3000, [i], stream=i % 2 == 0, **SUPPORT)) for i in range(24)]
        wait_until(lambda: drawn(cluster) >= 10, "many are drawn")
        abort(cluster, abort_all=True)
        for number, request in enumerate(asked):
            reply = request.result()
            equal(reply.status, 200)
            told = reply.events[-1] if number % 2 == 0 else reply.json
            equal(told["meta_info"]["finish_reason"]["type"], "abort")
        cluster.wait_at_rest()


@case
def a_race_with_the_end():
    """However an abort and the last token pass each other, the reply is the whole one or its beginning, and
    whoever takes the name again is not hit."""
    with sim(step_us=1000) as cluster:
        whole = cluster.generate(**body("r", 8, **SUPPORT)).json
        kinds = {"length": 0, "abort": 0}

        def race(name):
            for turn in range(24):
                asked = Asked(cluster, "/generate", body(name, 8, **SUPPORT))
                for _ in range(turn % 12):
                    cluster.get("/ping")
                abort(cluster, rid=name)
                reply = asked.result().json
                kind = reply["meta_info"]["finish_reason"]["type"]
                kinds[kind] += 1
                if kind == "length":
                    equal(reply["output_ids"], whole["output_ids"])
                else:
                    # The last token's step may have run when the abort came.
                    check_prefix(reply, whole, reply["meta_info"]["finish_reason"]["message"], most=8)
                again = cluster.generate(**body(name, 3, **SUPPORT)).json
                equal(again["meta_info"]["finish_reason"], {"type": "length", "length": 3})

        in_threads([lambda n=n: race(f"race{n}") for n in range(6)])
        print(f"# {kinds}")
        check(kinds["abort"] > 0, "no abort came in time")


@case
def an_abort_and_an_overflow():
    """Whatever comes first is the end. Supports have up to 256 ids and 32 is the cap, so that requests overflow
    sooner or later, this one some rows later; an abort before that leaves the rows that are there."""
    cap, options = 32, ["--router-options", "--sampling-mask-max-tokens 32"]
    with sim(step_us=1000, options=options, support="realistic") as cluster:
        for first in range(100):
            fields = body("r", 40, prompt=[first, 2], sampling_params={"top_k": 256}, **SUPPORT)
            kept = cluster.generate(**fields, on_mask_overflow="return_partial")
            if kept.status == 200 and 10 <= kept.json["meta_info"]["completion_tokens"] < 40:
                break
        whole, tokens = kept.json, len(kept.json["output_ids"])
        check(10 <= tokens < 40, f"{tokens} rows before the overflow")
        check(whole["meta_info"]["sampling_mask_required"] > cap, whole["meta_info"])
    with sim(step_us=150000, options=options, support="realistic") as cluster:
        asked = start(cluster, "/generate", fields)
        abort(cluster, rid="r")
        reply = asked.result()
        equal(reply.status, 200, reply.body)
        check_prefix(reply.json, whole, least=1, most=tokens)

        lost = cluster.generate(**fields)
        abort(cluster, rid="r")
        equal((lost.status, lost.json["error"]["message"]), (400, whole["meta_info"]["finish_reason"]["message"]))
        cluster.wait_at_rest()


@case
def what_is_wrong_is_refused_by_name():
    with sim() as cluster:
        for fields, word in (({"rid": 7}, "rid"), ({"rid": ["a"]}, "rid"), ({"rid": "x" * 300}, "rid"),
                             ({"abort_all": 1}, "abort_all"), ({"rid": "a", "prefix": "yes"}, "prefix"),
                             ({"rid": "a", "id": 1}, "'id'"), ({"rid": "a", "abort_message": "m"}, "abort_message"),
                             ([], "object")):
            reply = cluster.request("POST", "/abort_request", fields)
            equal(reply.status, 400, fields)
            check(word in reply.json["error"]["message"], reply.body)
        equal(cluster.request("POST", "/abort_request", b"{").status, 400)
        equal(cluster.request("POST", "/abort_request", b"").status, 400)
        equal(cluster.get("/abort_request").status, 405)
        abort(cluster, rid="nobody")
        abort(cluster, rid="nobody", prefix=True, abort_all=False, abort_message=None)
        abort(cluster, abort_all=True)


if __name__ == "__main__":
    run_cases()
