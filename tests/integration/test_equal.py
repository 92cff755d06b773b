"""What clients get over HTTP equals one process doing both roles (baton-oracle), to the bit: ids, rows
and log-probabilities, alone and all at once, 1x1 and 2x2, over tcp and shared memory; the text is the
same everywhere and whole UTF-8."""

import json
import pathlib
import random
import struct
import subprocess

from harness import IS_FEW, TEST_BIN, Cluster, case, check, demo_model, equal, in_threads, run_cases, tiny_model


def make_requests(vocabulary, count, most, prompt, seed):
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        mode = (None, "selected", "support")[number % 3]
        request = {
            "input_ids": [draw.randrange(vocabulary) for _ in range(draw.randrange(1, prompt))],
            "return_logprob": number % 2 == 0,
            "sampling_params": {"max_new_tokens": draw.randrange(1, most), "ignore_eos": True,
                                "temperature": draw.choice((0.7, 1.0, 1.4)),
                                "top_p": draw.choice((1.0, 0.9)), "top_k": draw.choice((1, 5, 50, 200)),
                                "sampling_seed": draw.randrange(2**62), "skip_special_tokens": False}}
        if mode:
            request |= {"return_sampling_mask": True, "sampling_logprobs_mode": mode}
        requests.append(request)
    return requests


def oracle(model, requests, vocabulary):
    """What baton-oracle prints, in the shape of replies."""
    lines = []
    for number, request in enumerate(requests):
        params = request["sampling_params"]
        lines.append(
            f"name={number} ids={','.join(map(str, request['input_ids']))} "
            f"max_new_tokens={params['max_new_tokens']} temperature={params['temperature']} "
            f"top_p={params['top_p']} top_k={params['top_k']} seed={params['sampling_seed']} "
            f"logprob={int(request['return_logprob'])} vocab_limit={vocabulary} "
            f"mask={request.get('sampling_logprobs_mode', 'off')}\n")
    done = subprocess.run([TEST_BIN / "baton-oracle", "--model", model], input="".join(lines),
                          capture_output=True, text=True, timeout=600)
    equal(done.returncode, 0, done.stderr)
    expected = [{"ids": [], "masks": [], "logprobs": [], "full": []} for _ in requests]
    for line in done.stdout.splitlines():
        words = line.split()
        if words[1] != "row":
            continue
        entry, mode = expected[int(words[0])], requests[int(words[0])].get("sampling_logprobs_mode")
        token = int(words[4])
        entry["ids"].append(token)
        fields = dict(zip(words[5::2], words[6::2])) if "support" not in words else dict(
            zip(words[5 : words.index("support") : 2], words[6 : words.index("support") : 2]))
        if "logprob" in fields:
            entry["full"].append(float.fromhex(fields["logprob"]))
        if mode:
            row = [pair.split(":") for pair in words[words.index("support") + 1 :]]
            entry["masks"].append([int(pair[0]) for pair in row])
            entry["logprobs"].append([float.fromhex(pair[1]) for pair in row] if mode == "support"
                                     else float.fromhex(fields["selected"]))
    return expected


def compare(reply, request, expected, what):
    equal(reply.status, 200, f"{what}: {reply.body[:300]!r}")
    meta = reply.json["meta_info"]
    equal(reply.json["output_ids"], expected["ids"], what)
    if request["return_logprob"]:
        equal([t[0] for t in meta["output_token_logprobs"]], expected["full"], what)
    if "return_sampling_mask" in request:
        equal(meta["output_token_sampling_mask"], expected["masks"], what)
        equal(meta["output_token_sampling_logprobs"], expected["logprobs"], what)
        check(all(struct.unpack("f", struct.pack("f", x))[0] == x
                  for row in meta["output_token_sampling_logprobs"]
                  for x in (row if isinstance(row, list) else [row])), "float32 values")
    else:
        check("output_token_sampling_mask" not in meta, what)


def tokenizer_vocabulary(folder):
    """Ids with text: the model's vocabulary may be larger, and padding ids are never drawn."""
    whole = json.loads(pathlib.Path(folder, "tokenizer.json").read_text())
    ids = [*whole["model"]["vocab"].values(), *(t["id"] for t in whole["added_tokens"])]
    return max(ids) + 1


EVERYWHERE = ((1, 1, "tcp"), (1, 1, "shm"), (2, 2, "tcp"), (2, 2, "shm"))


def equal_everywhere(model, requests, vocabulary, worker_options=(), where=EVERYWHERE):
    texts = None
    expected = None
    for prefill, decode, tls in where:
        with Cluster(model, prefill, decode, ucx_tls=tls, shared=worker_options) as cluster:
            if expected is None:
                expected = oracle(model, requests, vocabulary)
            what = f"{prefill}x{decode} {tls}"
            alone = [cluster.generate(**r) for r in requests]
            together = in_threads([lambda r=r: cluster.generate(**r) for r in requests])
            for i, request in enumerate(requests):
                compare(alone[i], request, expected[i], f"{what} alone, request {i}")
                compare(together[i], request, expected[i], f"{what} together, request {i}")
                equal(together[i].json["text"], alone[i].json["text"], f"{what}, text {i}")
            here = [reply.json["text"] for reply in alone]
            equal(here, texts or here, f"{what}, texts")
            texts = here
    return expected, texts


@case
def tiny_models_of_every_family():
    for family in ("llama", "qwen2", "qwen3"):
        model = tiny_model(family)
        expected, _ = equal_everywhere(model, make_requests(250, 9, 30, 90, 1),
                                       tokenizer_vocabulary(model))
        check(max(len(row) for e in expected for row in e["masks"]) > 100, "wide supports occur")


@case
def the_demo_model_and_its_text():
    import gguf
    model = demo_model()
    tokens = gguf.GGUFReader(model).fields["tokenizer.ggml.tokens"]
    # With few, one kind of cluster; pd_equals_oracle takes the smallest one, over tcp.
    requests = make_requests(40000, 3, 9, 50, 2) if IS_FEW else make_requests(40000, 6, 16, 100, 2)
    expected, texts = equal_everywhere(model, requests, len(tokens.data), ["--kv-bytes", "64M"],
                                       EVERYWHERE[-1:] if IS_FEW else EVERYWHERE)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(b): b for b in printable}
    alphabet |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    for entry, text in zip(expected, texts):
        pieces = [bytes(tokens.parts[tokens.data[i]]).decode() for i in entry["ids"]]
        raw = b"".join(bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece)
                       else piece.encode() for piece in pieces)
        equal(text, raw.decode(errors="replace"), "the detokeniser's text")


if __name__ == "__main__":
    run_cases()
