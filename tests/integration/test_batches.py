"""Lists of prompts on /generate: every item as if it had been sent alone, in order, with failures of its own."""

import base64
import http.client
import json
import struct

from harness import Cluster, case, check, check_rows, equal, run_cases, tiny_model

PROMPTS = [[5, 9, 33, 70, 12, 8, 41], [7], [5, 9, 33, 70], [90, 14, 3, 3, 3, 61], [11, 12]]
CAP = 64
TIMES = ("e2e_latency", "response_sent_to_client_ts")
cluster = None


def sample(seed=11, **extra):
    return {"max_new_tokens": 9, "temperature": 1.0, "top_k": 8, "top_p": 0.95, "sampling_seed": seed,
            "ignore_eos": True, **extra}


def plain(reply):
    """A reply without what differs from one request to the next."""
    meta = {k: v for k, v in reply["meta_info"].items() if k not in (*TIMES, "id", "cached_tokens")}
    return {**{k: v for k, v in reply.items() if k != "index"}, "meta_info": meta}


def ids(replies):
    return [r["meta_info"]["id"] for r in replies]


def ask(**fields):
    reply = cluster.generate(**fields)
    equal(reply.status, 200, reply.body[:300])
    return reply.json


def refused(expected, **fields):
    reply = cluster.generate(**fields)
    equal(reply.status, 400, f"status of {fields}: {reply.body[:300]}")
    text = reply.json["error"]["message"]
    check(expected in text, f"{expected!r} is not in {text!r}")


@case
def items_equal_single_requests():
    """Every field as a list; masks and log-probabilities bit for bit, as their JSON text says it."""
    params = [sample(11), sample(12, top_k=1), sample(13, max_new_tokens=1), sample(14, min_p=0.1),
              sample(15, max_new_tokens=20, stop_token_ids=[3], ignore_eos=False)]
    lists = {"return_logprob": [True, False, True, True, None], "logprob_start_len": [0, -1, 1, None, 0],
             "top_logprobs_num": [2, 3, 0, 1, None], "token_ids_logprob": [[4, 5], None, [], [6], None],
             "return_sampling_mask": [True, True, False, True, None],
             "sampling_logprobs_mode": ["support", None, "selected", "selected", "support"],
             "sampling_filter": [None, "rank", "joint", "rank", None], "cache_salt": ["s", None, "", "t", None]}
    batch = ask(input_ids=PROMPTS, sampling_params=params, rid=["a", "b", "c", "d", None],
                return_prompt_token_ids=True, **lists)
    equal(ids(batch)[:4], ["a", "b", "c", "d"])
    equal(len(batch[4]["meta_info"]["id"]), 32, "a made id")
    for i, prompt in enumerate(PROMPTS):
        alone = ask(input_ids=prompt, sampling_params=params[i], return_prompt_token_ids=True,
                    **{name: values[i] for name, values in lists.items()})
        equal(plain(batch[i]), plain(alone), f"item {i}")
    check_rows(batch[0]["meta_info"], batch[0]["output_ids"], "support")


@case
def one_value_counts_for_all():
    batch = ask(input_ids=PROMPTS, sampling_params=sample(), rid="r", return_logprob=True,
                token_ids_logprob=[4, 5], return_sampling_mask=True)
    equal(ids(batch), [f"r_{i}" for i in range(len(PROMPTS))])
    for prompt, item in zip(PROMPTS, batch):
        alone = ask(input_ids=prompt, sampling_params=sample(), return_logprob=True, token_ids_logprob=[4, 5],
                    return_sampling_mask=True)
        equal(plain(item), plain(alone))


@case
def texts_are_a_batch_too():
    batch = ask(text=["ab", "c", "ab"], sampling_params=sample())
    equal(plain(batch[0]), plain(ask(text="ab", sampling_params=sample())))
    equal(plain(batch[0]), plain(batch[2]))
    check(batch[0]["output_ids"] != batch[1]["output_ids"], "different prompts, the same tokens")
    equal([plain(item) for item in ask(text=["c"], sampling_params=sample())], [plain(batch[1])],
          "a list of one")
    equal([plain(item) for item in ask(input_ids=[[7]], sampling_params=sample())],
          [plain(ask(input_ids=[7], sampling_params=sample()))])


@case
def samples_come_item_by_item():
    params = [sample(11, n=3), sample(12), sample(13, n=2)]
    batch = ask(input_ids=PROMPTS[:3], sampling_params=params, rid="r")
    equal(ids(batch), ["r_0_0", "r_0_1", "r_0_2", "r_1", "r_2_0", "r_2_1"])
    alone = [ask(input_ids=prompt, sampling_params=p) for prompt, p in zip(PROMPTS, params)]
    equal([plain(item) for item in batch],
          [plain(item) for item in alone[0] + [alone[1]] + alone[2]])


@case
def streams_mix_and_tell_whose_an_event_is():
    fields = dict(input_ids=PROMPTS[:3], sampling_params=[sample(11, n=2), sample(12), sample(13)], rid="r",
                  return_sampling_mask=True, sampling_logprobs_mode="support", return_logprob=True)
    whole = ask(**fields)
    events = cluster.generate(stream=True, **fields).events
    last = {}
    for event in events:
        index = event["index"]
        equal(event["meta_info"]["id"], whole[index]["meta_info"]["id"])
        n = event["meta_info"]["completion_tokens"]
        equal(event["output_ids"], whole[index]["output_ids"][:n])
        check(n >= last[index]["meta_info"]["completion_tokens"] if index in last else True, "tokens go back")
        last[index] = event
    equal([plain(last[i]) for i in range(4)], [plain(item) for item in whole])


def tensors_of(body):
    """Name and values of each tensor of a safetensors file; reply_json is parsed."""
    size = int.from_bytes(body[:8], "little")
    head = json.loads(body[8 : 8 + size])
    out = {}
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = body[8 + size + begin : 8 + size + end]
        kind = {"I32": "i", "F32": "f", "U8": "B"}[entry["dtype"]]
        out[name] = list(struct.unpack(f"<{(end - begin) // struct.calcsize(kind)}{kind}", data))
    return {**out, "reply_json": json.loads(bytes(out["reply_json"]))}


@case
def a_batch_as_tensors_and_packed():
    fields = dict(input_ids=PROMPTS[:3], sampling_params=[sample(11, n=2), sample(12), sample(13)], rid="r",
                  return_sampling_mask=[True, False, True], sampling_logprobs_mode="support")
    whole = ask(**fields)
    reply = cluster.request("POST", "/generate", fields, headers={"Accept": "application/x-safetensors"})
    equal(reply.status, 200, reply.body[:300])
    tensors = tensors_of(reply.body)
    equal(ids(tensors["reply_json"]), ids(whole))
    for i, item in enumerate(whole):
        equal(tensors[f"{i}.output_ids"], item["output_ids"])
        rows = item["meta_info"].get("output_token_sampling_mask")
        equal(f"{i}.sampling_mask_lengths" in tensors, rows is not None, f"sample {i}")
        if rows is None:
            continue
        equal(tensors[f"{i}.sampling_mask_lengths"], [len(row) for row in rows])
        equal(tensors[f"{i}.sampling_mask_token_ids"], [i for row in rows for i in row])
        equal(tensors[f"{i}.sampling_logprobs"],
              [x for row in item["meta_info"]["output_token_sampling_logprobs"] for x in row])
    mixed = ask(**fields, sampling_mask_format=["packed", None, "json"])
    for i, item in enumerate(mixed):
        equal("output_token_sampling_packed" in item["meta_info"], i < 2, f"sample {i}")
        packed = item["meta_info"].get("output_token_sampling_packed")
        if packed:
            flat = base64.b64decode(packed["token_ids"]["data"])
            equal(list(struct.unpack(f"<{len(flat) // 4}i", flat)), tensors[f"{i}.sampling_mask_token_ids"])


@case
def bad_lists_are_refused_with_both_lengths():
    two = {"input_ids": [[1], [2]]}
    for name, value in (("sampling_params", [{}]), ("rid", ["a"]), ("return_logprob", [True, True, True]),
                        ("top_logprobs_num", [1]), ("token_ids_logprob", [[1]]), ("logprob_start_len", [0]),
                        ("return_sampling_mask", []), ("sampling_logprobs_mode", ["support"])):
        refused(f"{name} is a list of {len(value)}, but there are 2 prompts.", **two, **{name: value})
    refused("[1]: top_p must be in (0, 1], got 3.", **two, sampling_params=[{}, {"top_p": 3}])
    refused("top_p must be in (0, 1], got 3.", **two, sampling_params={"top_p": 3})
    refused("[1]: input_ids[0] must be a token id", input_ids=[[1], [-1]])
    refused("[1]: The prompt is empty.", text=["a", ""])
    refused("[0]: input_ids cannot be empty.", input_ids=[[]])
    refused("text cannot be an empty list.", text=[])
    refused("a list of 41 prompts is longer than --batch-max=40.", text=["a"] * 41)
    refused("n asks for 400 samples", text=["a"] * 40, sampling_params={"n": 10})
    refused("Duplicate request ID detected: a", **two, rid=["a", "a"])
    refused("stream must be a boolean", **two, stream=[True, False])


@case
def a_client_that_leaves_frees_every_item():
    connection = http.client.HTTPConnection(cluster.host, cluster.port, timeout=60)
    body = {"input_ids": PROMPTS, "stream": True, "sampling_params": sample(max_new_tokens=150, n=2)}
    connection.request("POST", "/generate", json.dumps(body))
    check(connection.getresponse().readline().startswith(b"data: "), "no event")
    connection.close()
    cluster.wait_at_rest()


@case
def whole_replies_of_many_items_go_through_little_memory():
    """--reply-memory 100k: the rows of 40 items lie in a file until they are written."""
    fields = dict(return_sampling_mask=True, sampling_logprobs_mode="support",
                  sampling_params=sample(top_k=CAP, top_p=1.0, max_new_tokens=12))
    batch = ask(input_ids=[[i + 1, 7] for i in range(40)], **fields)
    equal(len(batch), 40)
    for i in (0, 17, 39):
        equal(plain(batch[i]), plain(ask(input_ids=[i + 1, 7], **fields)))
    check(sum(len(row) for item in batch for row in item["meta_info"]["output_token_sampling_mask"]) > 20000,
          "the rows are too narrow to show anything")


@case
def the_longest_list():
    """512 prompts with masks, by the defaults, in each form."""
    fields = dict(input_ids=[[i % 200 + 1, 7, i // 200 + 3] for i in range(512)], return_sampling_mask=True,
                  sampling_logprobs_mode="support", sampling_params=sample(max_new_tokens=3))
    with Cluster(tiny_model()) as other:
        lists = other.generate(**fields).json
        packed = other.generate(**fields, sampling_mask_format="packed").json
        file = other.request("POST", "/generate", fields, headers={"Accept": "application/x-safetensors"})
        events = other.generate(**fields, stream=True).events
        refused = other.generate(**{**fields, "input_ids": [[1]] * 513})
        equal((refused.status, refused.json["error"]["message"]),
              (400, "a list of 513 prompts is longer than --batch-max=512."))
    tensors = tensors_of(file.body)
    last = {event["index"]: event for event in events}
    equal((len(lists), len(packed), len(last)), (512,) * 3)
    for i, item in enumerate(lists):
        rows = item["meta_info"]["output_token_sampling_mask"]
        flat = [id for row in rows for id in row]
        data = base64.b64decode(packed[i]["meta_info"]["output_token_sampling_packed"]["token_ids"]["data"])
        equal(list(struct.unpack(f"<{len(flat)}i", data)), flat)
        equal(tensors[f"{i}.sampling_mask_token_ids"], flat)
        equal(last[i]["meta_info"]["output_token_sampling_mask"], rows)


if __name__ == "__main__":
    with Cluster(tiny_model(), shared=["--batch-max", "40", "--reply-memory", "100K",
                                       "--sampling-mask-max-tokens", str(CAP)]) as cluster:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
