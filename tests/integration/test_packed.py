"""Masks as JSON, packed and as safetensors: the same request answered three ways holds the same bits."""

import base64
import importlib.util
import json
import subprocess
import sys

import numpy as np
from harness import ROOT, Cluster, case, check, check_rows, equal, run_cases, tiny_model
from safetensors.numpy import load as load_tensors

PROMPT = [5, 9, 33, 70, 12, 8, 41]
TENSORS = "application/x-safetensors"
DTYPES = {"int32": "<i4", "float32": "<f4", "uint8": "u1"}
LISTS = ("output_token_sampling_mask", "output_token_sampling_logprobs", "output_token_sampling_packed",
         "output_token_sampling_mask_truncated", "output_token_sampling_support_sizes")
CAP = 64
cluster = None


def sample(tokens=12, **extra):
    return {"max_new_tokens": tokens, "temperature": 1.0, "top_k": 8, "top_p": 0.95, "sampling_seed": 11,
            "ignore_eos": True, **extra}


def ask(path="/generate", accept=None, status=200, **fields):
    headers = {"Accept": accept} if accept else None
    reply = cluster.request("POST", path, {"rid": None, **fields}, headers=headers)
    equal(reply.status, status, reply.body[:500])
    return reply


def masked(**fields):
    return {"input_ids": PROMPT, "sampling_params": sample(), "return_sampling_mask": True, **fields}


# ---- one form of the arrays: {name: numpy array} ----

def from_lists(meta):
    """The JSON lists, as the arrays that the other forms must hold."""
    masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    flat = [x for row in logprobs for x in (row if isinstance(row, list) else [row])]
    arrays = {"lengths": np.array([len(row) for row in masks], np.int32),
              "token_ids": np.array([i for row in masks for i in row], np.int32),
              "logprobs": np.array(flat, np.float64).astype(np.float32)}
    if "output_token_sampling_mask_truncated" in meta:
        arrays["truncated"] = np.array(meta["output_token_sampling_mask_truncated"], np.uint8)
        arrays["support_sizes"] = np.array(meta["output_token_sampling_support_sizes"], np.int32)
    return arrays


def from_packed(meta):
    arrays = {}
    for name, a in meta["output_token_sampling_packed"].items():
        data = base64.b64decode(a["data"], validate=True)
        arrays[name] = np.frombuffer(data, DTYPES[a["dtype"]]) if data else np.zeros(0, DTYPES[a["dtype"]])
        equal(list(arrays[name].shape), a["shape"], name)
    check(not [key for key in LISTS if key in meta and "packed" not in key], "lists beside arrays")
    return arrays


def from_tensors(tensors, prefix=""):
    names = {"lengths": "sampling_mask_lengths", "token_ids": "sampling_mask_token_ids",
             "logprobs": "sampling_logprobs", "truncated": "sampling_mask_truncated",
             "support_sizes": "sampling_mask_support_sizes"}
    arrays = {name: tensors[prefix + tensor] for name, tensor in names.items() if prefix + tensor in tensors}
    if "truncated" in arrays:
        equal(arrays["truncated"].dtype, np.int32)
        arrays["truncated"] = arrays["truncated"].astype(np.uint8)
    return arrays


def same(actual, expected, what):
    equal(sorted(actual), sorted(expected), what)
    for name in expected:
        equal(actual[name].dtype, expected[name].dtype, f"{what}: {name}")
        equal(actual[name].tobytes(), expected[name].tobytes(), f"{what}: {name}")


def read_file(reply):
    """The tensors, by the library and by hand; and the JSON reply among them."""
    equal(reply.headers["Content-Type"], TENSORS)
    equal(int(reply.headers["Content-Length"]), len(reply.body))
    tensors = load_tensors(reply.body)
    size = int.from_bytes(reply.body[:8], "little")
    equal(size % 8, 0)
    header = json.loads(reply.body[8:8 + size])
    equal(header.pop("__metadata__"), {"format": "baton-1"})
    equal(list(header)[-1], "reply_json")
    end = 0
    for name, tensor in header.items():
        equal(tensor["data_offsets"][0], end, f"{name} begins where the one before ends")
        check(name == "reply_json" or end % 4 == 0, f"{name} is aligned")
        end = tensor["data_offsets"][1]
    equal(end, len(reply.body) - 8 - size, "the file ends with its last tensor")
    return tensors, json.loads(tensors.pop("reply_json").tobytes())


def bare(reply):
    """A reply without what other forms hold elsewhere, and without what differs between two requests."""
    if isinstance(reply, list):
        return [bare(item) for item in reply]
    reply = {key: value for key, value in reply.items() if key != "output_ids"}
    reply["meta_info"] = {key: value for key, value in reply["meta_info"].items()
                          if key not in LISTS + ("id", "e2e_latency", "response_sent_to_client_ts",
                                                 "cached_tokens")}
    return reply


def check_forms(**fields):
    """One request in all forms; gives its JSON."""
    lists = ask(**fields).json
    packed = ask(**fields, sampling_mask_format="packed").json
    tensors, reply = read_file(ask(accept=TENSORS, **fields))
    equal(bare(packed), bare(lists))
    equal(bare(reply), bare(lists))
    for index, item in enumerate(lists if isinstance(lists, list) else [lists]):
        prefix = f"{index}." if isinstance(lists, list) else ""
        equal(tensors[prefix + "output_ids"].tolist(), item["output_ids"])
        if "output_token_sampling_mask" in item["meta_info"]:
            expected = from_lists(item["meta_info"])
            other = packed[index] if isinstance(packed, list) else packed
            equal(other["output_ids"], item["output_ids"])
            same(from_packed(other["meta_info"]), expected, "packed")
            same(from_tensors(tensors, prefix), expected, "safetensors")
    return lists


@case
def all_forms_hold_the_same_bits():
    for mode in ("selected", "support"):
        for params in (sample(), sample(40, top_k=CAP, top_p=1), sample(5, temperature=0), sample(1, top_k=1)):
            reply = check_forms(**masked(sampling_params=params, sampling_logprobs_mode=mode))
            check_rows(reply["meta_info"], reply["output_ids"], mode)
            equal(reply["meta_info"]["output_token_weight_versions"], [[0, params["max_new_tokens"]]])
    both = check_forms(**masked(return_logprob=True, logprob_start_len=0, top_logprobs_num=3))
    equal(len(both["meta_info"]["output_token_logprobs"]), 12)


@case
def several_samples_and_lists_of_prompts():
    three = check_forms(**masked(sampling_params=sample(7, n=3)))
    equal(len(three), 3)
    batch = check_forms(**masked(input_ids=[PROMPT, PROMPT[:3]], return_sampling_mask=[True, False]))
    check("output_token_sampling_mask" not in batch[1]["meta_info"], "masks only where asked for")
    tensors, _ = read_file(ask(accept=TENSORS, **masked(input_ids=[PROMPT])))
    check("0.output_ids" in tensors, "a list of one is a list")


@case
def without_masks_there_are_ids_and_the_reply():
    tensors, reply = read_file(ask(accept=TENSORS, input_ids=PROMPT, sampling_params=sample()))
    equal(list(tensors), ["output_ids"])
    check("output_ids" not in reply, "the ids twice")
    equal(bare(reply), bare(ask(input_ids=PROMPT, sampling_params=sample()).json))


@case
def zero_rows():
    reply = check_forms(**masked(sampling_params=sample(0)))
    check(not [key for key in reply["meta_info"] if "sampling" in key], "keys without a row")
    packed = ask(**masked(sampling_params=sample(0)), sampling_mask_format="packed").json
    check(not [key for key in packed["meta_info"] if "sampling" in key], "keys without a row")
    tensors, _ = read_file(ask(accept=TENSORS, **masked(sampling_params=sample(0))))
    equal({name: (str(t.dtype), t.shape) for name, t in tensors.items()},
          {"output_ids": ("int32", (0,)), "sampling_mask_lengths": ("int32", (0,)),
           "sampling_mask_token_ids": ("int32", (0,)), "sampling_logprobs": ("float32", (0,))})


@case
def bounded_masks():
    for mode in ("selected", "support"):
        reply = check_forms(**masked(sampling_params=sample(20, top_k=-1, top_p=1), sampling_mask_mode="bounded",
                                     sampling_logprobs_mode=mode))
        meta = reply["meta_info"]
        truncated, sizes = (meta["output_token_sampling_mask_truncated"],
                            meta["output_token_sampling_support_sizes"])
        check(all(truncated), "the whole vocabulary is wider than the cap")
        for token, row, size in zip(reply["output_ids"], meta["output_token_sampling_mask"], sizes):
            check(token in row and len(row) == CAP < size, f"{token}, {len(row)} of {size}")
    narrow = check_forms(**masked(sampling_mask_mode="bounded"))["meta_info"]
    check(not any(narrow["output_token_sampling_mask_truncated"]), "nothing was cut")
    equal(narrow["output_token_sampling_support_sizes"],
          [len(row) for row in narrow["output_token_sampling_mask"]])


@case
def an_overflow():
    """Of one sample it is the status, in JSON; among several each tensor has the rows before it."""
    wide = masked(sampling_params=sample(30, top_k=-1, top_p=0.6))
    refused = ask(accept=TENSORS, status=400, **wide)
    equal(refused.headers["Content-Type"], "application/json")
    check("--sampling-mask-max-tokens" in refused.json["error"]["message"], refused.body)
    # Supports of 62 to 66 ids: some of the samples overflow, at some token, and others do not.
    some = masked(sampling_params=sample(30, top_k=-1, top_p=0.475, n=8))
    replies = check_forms(**some)
    failed = [s for s in replies if s["meta_info"]["finish_reason"]["type"] == "abort"]
    check(0 < len(failed) < 8, f"{len(failed)} of 8 failed")
    check(any(s["output_ids"] for s in failed), "rows before a failure")
    partial = check_forms(**masked(sampling_params=sample(30, top_k=-1, top_p=0.49),
                                   on_mask_overflow="return_partial", sampling_logprobs_mode="support"))
    equal(partial["meta_info"]["finish_reason"]["type"], "abort")
    check(partial["meta_info"]["sampling_mask_required"] > CAP, "what would have sufficed")
    check(0 < len(partial["output_ids"]) < 30, "the tokens before it")


@case
def streams():
    for fields in (masked(), masked(sampling_logprobs_mode="support", sampling_params=sample(20)),
                   masked(sampling_params=sample(9, n=2))):
        lists = ask(stream=True, **fields).events
        packed = ask(stream=True, sampling_mask_format="packed", **fields).events
        for index in {event.get("index") for event in lists}:
            last = [event for event in lists if event.get("index") == index][-1]
            events = [event for event in packed if event.get("index") == index]
            for event in events:
                rows = event["meta_info"]["output_token_sampling_mask_length"]
                now = from_packed(event["meta_info"])
                equal(len(now["lengths"]), rows, "rows so far")
                equal(event["meta_info"]["output_token_weight_versions"], [[0, rows]])
            same(from_packed(events[-1]["meta_info"]), from_lists(last["meta_info"]), "the last event")


@case
def incremental_streams():
    fields = masked(sampling_logprobs_mode="support", sampling_params=sample(25), sampling_mask_format="packed")
    whole = from_packed(ask(**fields).json["meta_info"])
    with Cluster(tiny_model(), options=["--router-options", "--incremental-streaming-output"]) as other:
        events = other.generate(stream=True, **fields).events
    parts = [from_packed(event["meta_info"]) for event in events]
    check(len(parts) > 10, "an event for each token")
    same({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole, "all events")
    equal(sum(tokens for event in events for _, tokens in event["meta_info"]["output_token_weight_versions"]), 25)


@case
def chats_and_completions():
    body = {"model": "m", "max_tokens": 9, "seed": 5, "ignore_eos": True, "top_k": 6, "return_sampling_mask": True,
            "sampling_logprobs_mode": "support", "return_token_ids": True}
    chat, completions = "/v1/chat/completions", "/v1/completions"
    for path, prompt, n, choices in ((chat, {"input_ids": PROMPT}, 1, 1), (chat, {"input_ids": PROMPT}, 2, 2),
                                     (completions, {"prompt": PROMPT}, 1, 1),
                                     (completions, {"prompt": [PROMPT]}, 1, 1),
                                     (completions, {"prompt": [PROMPT, [7]]}, 2, 4)):
        fields = {**body, **prompt, "n": n}
        lists = ask(path, **fields, return_meta_info=True).json["choices"]
        packed = ask(path, **fields, return_meta_info=True, sampling_mask_format="packed").json["choices"]
        tensors, reply = read_file(ask(path, accept=TENSORS, **fields))
        equal(len(reply["choices"]), choices)
        for index in range(choices):
            prefix = f"{index}." if choices > 1 else ""
            expected = from_lists(lists[index]["meta_info"])
            same(from_packed(packed[index]["meta_info"]), expected, "packed")
            same(from_tensors(tensors, prefix), expected, "safetensors")
            equal(tensors[prefix + "output_ids"].tolist(), lists[index]["response_token_ids"])
            for key in ("message", "text"):
                equal(reply["choices"][index].get(key), lists[index].get(key))
            check("response_token_ids" not in reply["choices"][index], "the ids twice")


@case
def what_accept_says():
    fields = {"input_ids": PROMPT, "sampling_params": sample(2)}
    for accept in ("*/*", "application/*", "application/json", "text/html", "application/json, " + TENSORS + ";q=0.5",
                   TENSORS + ";q=0", "", ";;,q"):
        equal(ask(accept=accept or None, **fields).headers["Content-Type"], "application/json", accept)
    for accept in (TENSORS, "Application/X-Safetensors", "application/json, " + TENSORS, TENSORS + ", */*;q=0.1"):
        read_file(ask(accept=accept, **fields))
    refused = ask(accept=TENSORS, status=400, stream=True, **fields)
    check(TENSORS in refused.json["error"]["message"], refused.body)
    refused = ask("/v1/chat/completions", accept=TENSORS, status=400, input_ids=PROMPT, stream=True)
    check(TENSORS in refused.json["message"], refused.body)
    equal(ask(accept=TENSORS, status=400, text=1).headers["Content-Type"], "application/json")


@case
def bad_values_are_refused_by_name():
    for field, value in (("sampling_mask_format", "arrow"), ("sampling_mask_format", 1), ("sampling_mask_format", ""),
                         ("sampling_mask_mode", "loose"), ("sampling_mask_mode", True)):
        reply = ask(status=400, **masked(**{field: value}))
        check(field in reply.json["error"]["message"], reply.body)


@case
def the_client_of_the_docs():
    path = ROOT / "docs" / "examples" / "trainer_client.py"
    said = subprocess.run([sys.executable, "-B", str(path), cluster.url, "Once upon a time"], check=True,
                          capture_output=True, text=True).stdout
    check("32 tokens drawn from" in said, said)
    spec = importlib.util.spec_from_file_location("trainer_client", path)
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    body = masked(sampling_logprobs_mode="support")
    reply, *arrays = client.packed(cluster.url, body)
    sample_of = client.checked(*arrays)
    equal(sample_of["ids"].tolist(), reply["output_ids"])
    selected = ask(**{**body, "sampling_logprobs_mode": "selected"}).json["meta_info"]
    equal(sample_of["selected"].tobytes(),
          np.array(selected["output_token_sampling_logprobs"]).astype(np.float32).tobytes())
    # It notices what is wrong: a token that is not in its row, a row without its mass.
    ids, lengths, token_ids, logprobs = arrays
    for broken in ((ids + 1, lengths, token_ids, logprobs), (ids, lengths, token_ids, logprobs - 1),
                   (ids, lengths[:-1], token_ids, logprobs)):
        try:
            client.checked(*broken)
        except (AssertionError, IndexError):
            continue
        raise AssertionError("the client takes a broken reply")


@case
def the_client_in_the_text():
    """The listing of docs/trainer.md, run as it stands."""
    text = (ROOT / "docs" / "trainer.md").read_text()
    listing = text[text.index("```python\n") + 10:]
    listing = listing[:listing.index("```")]
    check(len([line for line in listing.splitlines() if line]) <= 20, "a client of 20 lines")
    said = subprocess.run([sys.executable, "-B", "-c", listing, cluster.url, "Once upon a time"], check=True,
                          capture_output=True, text=True).stdout
    check(" tokens drawn from " in said, said)


@case
def long_lists_beside_the_arrays():
    """Megabytes of JSON, whose length is found out in slices before the file begins."""
    reply = check_forms(**masked(sampling_params=sample(200, n=4), return_logprob=True, top_logprobs_num=128))
    check(len(json.dumps(reply)) > 2 << 20, "enough for several slices")


@case
def a_reply_larger_than_its_memory():
    """Rows that were spilled to the file are read in every form."""
    reply = check_forms(**masked(sampling_params=sample(200, n=16, top_k=CAP, top_p=1),
                                 sampling_logprobs_mode="support"))
    equal(len(reply), 16)


if __name__ == "__main__":
    with Cluster(tiny_model(), options=["--router-options", f"--sampling-mask-max-tokens {CAP} "
                                        "--reply-memory 65536"]) as cluster:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
