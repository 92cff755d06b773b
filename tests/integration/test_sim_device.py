"""The sim device in real clusters: rows that fit together, the same on any number of workers, with other
pages, chunks and transports, streamed or not; and what of its options is refused, by name."""

import math
import pathlib
import random
import re
import subprocess
import tempfile

from harness import BIN, Cluster, case, check, check_rows, equal, in_threads, run_cases, tiny_model, wait_until

QUICK = ["--sim-step-us", "1000"]


def sim(prefill=1, decode=1, shared=(), options=(), **more):
    return Cluster(tiny_model(), prefill, decode, options=["--device", "sim", *options],
                   shared=[*QUICK, *shared], **more)


def make_requests(count, seed):
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        mode = (None, "selected", "support")[number % 3]
        request = {
            "input_ids": [draw.randrange(200) for _ in range(draw.choice((1, 5, 40, 90)))],
            "return_logprob": number % 2 == 0, "top_logprobs_num": 3 * (number % 4 == 0),
            "sampling_params": {"max_new_tokens": draw.choice((1, 7, 40)), "ignore_eos": True,
                                "temperature": draw.choice((0.7, 1.0)), "top_k": draw.choice((1, 5, 200)),
                                "min_new_tokens": draw.choice((0, 1)),
                                "sampling_seed": draw.randrange(2**62), "skip_special_tokens": False}}
        if mode:
            request |= {"return_sampling_mask": True, "sampling_logprobs_mode": mode}
        requests.append(request)
    return requests


def essence(reply):
    """What must be equal everywhere: all but names and times."""
    meta = reply["meta_info"]
    return {"text": reply["text"], "output_ids": reply["output_ids"], "finish_reason": meta["finish_reason"],
            **{key: value for key, value in meta.items() if key.startswith(("output_", "input_"))}}


def answers(cluster, requests, stream=False):
    def ask(request):
        reply = cluster.generate(**request, stream=stream)
        equal(reply.status, 200, reply.body)
        return essence(reply.events[-1] if stream else reply.json)

    return in_threads([lambda r=r: ask(r) for r in requests])


@case
def answers_are_the_same_everywhere():
    requests = make_requests(24, 5)
    with sim() as cluster:
        expected = answers(cluster, requests)
        equal(answers(cluster, requests, stream=True), expected, "streamed")
        equal(answers(cluster, requests[::-1])[::-1], expected, "in another order")
    for request, reply in zip(requests, expected):
        mode = request.get("sampling_logprobs_mode")
        equal(len(reply["output_ids"]), request["sampling_params"]["max_new_tokens"])
        if mode:
            check_rows({**reply, "completion_tokens": len(reply["output_ids"])}, reply["output_ids"], mode,
                       request["sampling_params"]["top_k"])
    with sim(2, 2, shared=["--sim-check-pages", "--page-tokens", "16"], ucx_tls="shm") as cluster:
        equal(answers(cluster, requests), expected, "2x2, other pages, checked, shared memory")
    with sim(1, 2, shared=["--chunk-tokens", "32", "--sim-token-us", "20"]) as cluster:
        equal(answers(cluster, requests), expected, "1x2, other chunks, another time")


@case
def values_over_the_vocabulary_are_never_above():
    with sim(shared=["--sim-support", "20"]) as cluster:
        for mode in ("selected", "support"):
            meta = cluster.generate(input_ids=[3, 4, 5], return_sampling_mask=True, return_logprob=True,
                                    sampling_logprobs_mode=mode, top_logprobs_num=5,
                                    sampling_params={"max_new_tokens": 30, "top_k": 4096,
                                                     "ignore_eos": True}).json["meta_info"]
            rows, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
            equal([len(row) for row in rows], [20] * 30, "widths")
            for (full, token, _), top, row, value in zip(meta["output_token_logprobs"],
                                                         meta["output_top_logprobs"], rows, logprobs):
                selected = value if mode == "selected" else value[row.index(token)]
                check(full <= selected, f"{full} is above {selected}")
                equal([entry[1] for entry in top], row[:5], "the largest are the first of the support")


@case
def widths_are_what_was_asked_for():
    widths = []
    with sim() as cluster:
        for prompt in range(8):
            meta = cluster.generate(input_ids=[prompt], return_sampling_mask=True, sampling_params={
                "max_new_tokens": 100, "top_k": 200, "ignore_eos": True, "sampling_seed": 8}).json["meta_info"]
            widths += [len(row) for row in meta["output_token_sampling_mask"]]
        cut = cluster.generate(input_ids=[1], return_sampling_mask=True, sampling_params={
            "max_new_tokens": 100, "top_k": 3, "ignore_eos": True, "sampling_seed": 8}).json["meta_info"]["output_token_sampling_mask"]
    equal(sorted(widths)[len(widths) // 2], 2, "the median of realistic supports")
    check(4 < sum(widths) / len(widths) < 14 and max(widths) > 30, f"{sum(widths)} ids, at most {max(widths)}")
    equal(max(len(row) for row in cut), 3, "top_k cuts them")
    with sim(shared=["--sim-support", "50"],
             options=["--router-options", "--sampling-mask-max-tokens 40"]) as cluster:
        reply = cluster.generate(input_ids=[1], return_sampling_mask=True,
                                 sampling_params={"max_new_tokens": 5, "top_k": 40, "ignore_eos": True})
        equal([len(row) for row in reply.json["meta_info"]["output_token_sampling_mask"]], [40] * 5)


@case
def prompts_are_scored():
    with sim() as cluster:
        whole = cluster.generate(input_ids=[1, 2, 3, 4, 5], return_logprob=True, logprob_start_len=0,
                                 sampling_params={"max_new_tokens": 2}).json["meta_info"]["input_token_logprobs"]
        part = cluster.generate(input_ids=[1, 2, 3, 4, 5], return_logprob=True, logprob_start_len=3,
                                sampling_params={"max_new_tokens": 2}).json["meta_info"]["input_token_logprobs"]
    equal([entry[1] for entry in whole], [1, 2, 3, 4, 5])
    check(all(math.isfinite(entry[0]) and entry[0] < 0 for entry in whole[1:]), whole)
    equal(part[-1], whole[-1])


def start_worker(program, *arguments):
    return subprocess.run([BIN / f"baton-{program}", *map(str, arguments)], capture_output=True, text=True,
                          timeout=60, stdin=subprocess.DEVNULL)


@case
def workers_that_would_not_draw_alike_are_refused():
    with sim() as cluster:
        control = cluster.get("/server_info").json["control_address"]
        for program in ("prefill", "decode"):
            for option, value, field in (("--sim-seed", 2, "model_fingerprint"),
                                         ("--sim-support", 20, "model_fingerprint"),
                                         ("--sim-vocab", 151937, "model_fingerprint"),
                                         ("--sim-kv-bytes", 512, "kv_layout")):
                done = start_worker(program, "--device", "sim", option, value, "--router", control)
                equal(done.returncode, 3, done.stderr)
                check(field in done.stderr, f"{field} is not in {done.stderr!r}")
        done = start_worker("decode", "--model", tiny_model(), "--router", control)
        equal(done.returncode, 3, done.stderr)
        check("kv_layout" in done.stderr or "numerics" in done.stderr, done.stderr)


@case
def a_vocabulary_below_the_tokenizers_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        ports = pathlib.Path(folder, "ports")
        router = subprocess.Popen([BIN / "baton-router", "--model", tiny_model(), "--http", "127.0.0.1:0",
                                   "--control", "127.0.0.1:0", "--port-file", ports], stderr=subprocess.DEVNULL)
        try:
            _, control = wait_until(lambda: ports.exists() and ports.read_text().split(), "ports")
            done = start_worker("decode", "--device", "sim", "--sim-vocab", 100, "--router", control)
            equal(done.returncode, 3, done.stderr)
            check("the tokenizer does not fit the model" in done.stderr, done.stderr)
        finally:
            router.terminate()
            equal(router.wait(timeout=30), 0, "the router's exit status")


@case
def options_are_refused_by_name():
    for program in ("prefill", "decode"):
        for arguments, sentence in (
            (["--device", "sim", "--model", tiny_model()], "--model is not for --device sim"),
            (["--device", "cuda", "--model", tiny_model()], "--device cuda is not built yet"),
            (["--device", "gpu"], "'gpu' is not one of host, sim, cuda (option --device)"),
            (["--model", tiny_model(), "--sim-step-us", 5], "--sim-step-us is for --device sim only"),
            ([], "option --model is required with --device host"),
            (["--device", "sim", "--sim-support", 0], "--sim-support is realistic, or 1 to 131072 ids"),
            (["--device", "sim", "--sim-support", "wide"], "not 'wide'"),
            (["--device", "sim", "--sim-support", 30, "--sim-vocab", 20], "or 1 to 20 ids"),
            (["--device", "sim", "--sim-kv-bytes", 250], "--sim-kv-bytes 250 is not a multiple of 8"),
            (["--device", "sim", "--sim-vocab", 0], "--sim-vocab"),
        ):
            done = start_worker(program, *arguments)
            equal(done.returncode, 2, f"{arguments}: {done.stderr}")
            check(sentence in done.stderr, f"{sentence!r} is not in {done.stderr!r}")


@case
def what_it_kept_is_logged():
    with sim(shared=["--sim-report-ms", "1"]) as cluster:
        reply = cluster.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 50, "ignore_eos": True})
        equal(reply.json["meta_info"]["completion_tokens"], 50)

        def steps():
            log = pathlib.Path(cluster.folder.name, "decode0.log").read_text()
            return [int(count) for count in re.findall(r" info  decode: sim: (\d+) steps, ", log)]

        # One for each token but the first, which prefill drew.
        wait_until(lambda: sum(steps()) == 49, "the steps in the log")


run_cases()
