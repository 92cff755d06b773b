"""Every line of bad input: a clear error on the right side, and nothing lost or leaked afterwards."""

import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import tempfile

from harness import (BIN, ROOT, Cluster, case, check, descriptors, equal, run_cases, tiny_model,
                     wait_until)

cluster = None
PROMPT = [5, 9, 33]


def settled(function):
    """After the case: pages, slots and requests are released, descriptors are back."""
    def wrapped():
        pids = cluster.pids("router") + cluster.pids("prefill") + cluster.pids("decode")
        before = {pid: descriptors(pid) for pid in pids}
        function()
        cluster.wait_at_rest()
        after = cluster.pids("router") + cluster.pids("prefill") + cluster.pids("decode")
        equal(after, pids, "processes")
        wait_until(lambda: all(descriptors(p) <= before[p] + 1 for p in pids), "descriptors are back")
        equal(cluster.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2}).status, 200)
    wrapped.__name__ = function.__name__
    return case(wrapped)


def refused(fields, *needles, status=400, path="/generate"):
    reply = cluster.request("POST", path, fields)
    equal(reply.status, status, f"{fields} -> {reply.body[:300]!r}")
    message = reply.json.get("error", {}).get("message") or reply.json["message"]
    for needle in needles:
        check(needle in message, f"{needle!r} is not in {message!r} for {fields}")
    if "stream" in fields:
        return
    streamed = {**fields, "stream": True}
    equal(cluster.request("POST", path, streamed).status, status, f"streamed {fields}")


@settled
def malformed_json():
    for body in (b"", b"{", b"[]", b"null", b'{"text":"a"} x', b'{"text":"a\xff"}', b'{"text":"\\ud83d"}',
                 b'{"text":"a",}', b"\x00", b"{" * 5000, b'{"a":' * 300 + b"1" + b"}" * 300,
                 b'{"text":"a","sampling_params":{"temperature":NaN}}',
                 b'{"text":"a","sampling_params":{"temperature":1e400}}'):
        reply = cluster.request("POST", "/generate", body)
        equal(reply.status, 400, f"{body[:60]!r} -> {reply.body[:200]!r}")
        check(reply.json, "the error is JSON")


@settled
def errors_that_quote_the_client_are_utf8():
    # The quotation is cut at some byte; every alignment of every length of a character is tried.
    for character in ("é", "日", "😀"):
        for padding in ("", "a", "aa", "aaa"):
            text = padding + character * 100
            for body in ({"text": "a", "sampling_params": {text: 1}}, {"input_ids": [text]},
                         {"text": "a", "sampling_params": {"stop": [text, 3]}},
                         {"text": "a", "sampling_params": {"stop_token_ids": [text]}}):
                reply = cluster.request("POST", "/generate", json.dumps(body, ensure_ascii=False).encode())
                equal(reply.status, 400)
                json.loads(reply.body.decode("utf-8", "strict"))


@settled
def wrong_types_and_shapes():
    for fields in ({}, {"text": 5}, {"input_ids": "x"}, {"input_ids": [1, "2"]}, {"input_ids": [True]},
                   {"input_ids": [1.5]}, {"text": "a", "input_ids": [1]}, {"text": None},
                   {"text": "a", "stream": "yes"}, {"text": "a", "return_sampling_mask": 1},
                   {"text": "a", "sampling_params": 3}, {"text": "a", "sampling_params": [1]},
                   {"text": "a", "sampling_params": {"temperature": "hot"}},
                   {"text": "a", "sampling_params": {"max_new_tokens": -1}},
                   {"text": "a", "sampling_params": {"max_new_tokens": 1.5}},
                   {"text": "a", "sampling_params": {"max_new_tokens": True}},
                   {"text": "a", "sampling_params": {"stop": 3}},
                   {"text": "a", "sampling_params": {"stop": [3]}},
                   {"text": "a", "sampling_params": {"stop_token_ids": ["a"]}},
                   {"text": "a", "sampling_params": {"ignore_eos": "no"}},
                   {"text": "a", "sampling_params": {"sampling_seed": "x"}},
                   {"text": "a", "sampling_logprobs_mode": "all", "return_sampling_mask": True}):
        refused(fields)


@settled
def values_out_of_range():
    for params, text in (({"temperature": -1}, "temperature must be a non-negative finite number, got -1"),
                         ({"top_p": 0}, "top_p must be in (0, 1], got 0"),
                         ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
                         ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0"),
                         ({"top_k": -2}, "top_k must be -1 (disable) or at least 1, got -2"),
                         ({"min_p": 2}, "min_p must be in [0, 1], got 2"),
                         ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2], got 3"),
                         ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2]"),
                         ({"n": 0}, "n must be in [1, 128], got 0"),
                         ({"n": 129}, "n must be in [1, 128], got 129"),
                         ({"min_new_tokens": 9, "max_new_tokens": 8},
                          "min_new_tokens must be in [0, max_new_tokens=8], got 9"),
                         ({"logit_bias": {"x": 1}}, "logit_bias must has keys in [0, "),
                         ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
                         ({"logit_bias": {"1": 1e39}}, "finite"),
                         ({"sampling_filter": "both"}, "sampling_filter must be 'joint' or 'rank'")):
        refused({"input_ids": PROMPT, "sampling_params": params}, text)
    for fields, text in (({"top_logprobs_num": 129}, "top_logprobs_num must be in [0, 128], got 129"),
                         ({"token_ids_logprob": [1 << 40]}, "token_ids_logprob"),
                         ({"token_ids_logprob": [1] * 1025}, "token_ids_logprob has more than 1024 ids"),
                         ({"logprob_start_len": len(PROMPT)}, "is beyond the prompt"),
                         ({"logprob_start_len": -2}, "logprob_start_len must be -1")):
        refused({"input_ids": PROMPT, "return_logprob": True, **fields}, text)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for fields, text in (({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be in [0, 20]"),
                         ({"top_logprobs": 3}, "only allowed when logprobs is true"),
                         ({"logit_bias": {"1": 101}}, "in [-100, 100]"),
                         ({"n": 200}, "n must be in [1, 128]")):
        refused({**chat, **fields}, text, path="/v1/chat/completions")


@settled
def unknown_sampling_keys_are_named():
    refused({"input_ids": PROMPT, "sampling_params": {"temprature": 1}}, "temprature")
    accepted = cluster.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, lora_path="",
                                stream_options={"x": 1}, unknown_field=3)
    equal(accepted.status, 200, "unknown top-level fields are ignored")


@settled
def not_built_yet_is_refused_by_name_and_neutral_values_pass():
    neutral = {"n": 1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0.0,
               "repetition_penalty": 1, "logit_bias": None, "min_new_tokens": 0, "regex": None,
               "json_schema": None, "stop": None, "stop_token_ids": None, "temperature": None,
               "top_k": -1, "max_new_tokens": 1, "spaces_between_special_tokens": False}
    reply = cluster.generate(input_ids=PROMPT, sampling_params=neutral, top_logprobs_num=0,
                             token_ids_logprob=None, logprob_start_len=-1)
    equal(reply.status, 200, reply.body)
    for key, value in (("regex", "a"), ("json_schema", "{}"), ("ebnf", "x"), ("stop_regex", "x"),
                       ("custom_params", {"a": 1})):
        refused({"input_ids": PROMPT, "sampling_params": {key: value}}, key)
    refused({"text": ["a", "b"], "sampling_params": [{}]}, "but there are 2 prompts")


@settled
def ids_out_of_range_and_empty_prompts():
    vocabulary = cluster.get("/server_info").json["vocab_size"]
    for ids in ([vocabulary], [-1], [2**31], [2**63], [1, 2, 10**30]):
        refused({"input_ids": ids})
    refused({"input_ids": []}, "input_ids cannot be empty")
    refused({"text": ""})


@settled
def prompts_longer_than_the_context():
    context = cluster.get("/v1/models").json["data"][0]["max_model_len"]
    refused({"input_ids": [3] * context},
            f"The input ({context} tokens) is longer than the model's context length ({context} tokens).")
    refused({"input_ids": [3] * (context - 5), "sampling_params": {"max_new_tokens": 6}},
            f"Requested token count exceeds the model's maximum context length of {context} tokens")
    equal(cluster.generate(input_ids=[3] * (context - 2), sampling_params={"max_new_tokens": 2,
                                                                          "ignore_eos": True}).status, 200)
    refused({"text": "word " * (40 * context)})


@settled
def masks_of_a_vocabulary_within_the_cap_need_no_filter():
    for params in ({"top_p": 0.95}, {"top_k": -1}, {"top_k": 4097}, {"top_k": 1 << 30}, {}):
        reply = cluster.generate(input_ids=PROMPT, return_sampling_mask=True,
                                 sampling_params={**params, "max_new_tokens": 1})
        equal(reply.status, 200, reply.body)
    for field, value in (("sampling_mask_format", "binary"), ("sampling_mask_mode", 1),
                         ("on_mask_overflow", ["abort"]), ("custom_logit_processor", "x")):
        refused({"input_ids": PROMPT, field: value}, field)
        refused({"input_ids": PROMPT, field: value, "return_sampling_mask": True}, field)


@settled
def chat_errors_have_both_shapes():
    for body in ({"model": "m"}, {"model": "m", "messages": []}, {"model": "m", "messages": "x"},
                 {"model": "m", "messages": [{"role": "wizard", "content": "a"}]},
                 {"model": "m", "messages": [{"role": "user", "content": 5}]},
                 {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 0},
                 {"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 300},
                 {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}):
        reply = cluster.request("POST", "/v1/chat/completions", body)
        equal(reply.status, 400, f"{body} -> {reply.body[:200]!r}")
        equal(reply.json["object"], "error")
        equal(reply.json["error"]["message"], reply.json["message"])


@settled
def http_that_is_not_strict():
    table = {
        b"GET /health HTTP/1.1\nHost: a\n\n": 400,
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n": 400,
        b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n": 400,
        b"GET /health HTTP/1.1\r\n\r\n": 400,
        b"GET /health HTTP/1.0\r\n\r\n": 400,
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n": 400,
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}": 400,
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: +2\r\n\r\n{}": 400,
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n": 400,
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n": 400,
        b"POST /generate HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n": 400,
        b"GET /hea\x80lth HTTP/1.1\r\nHost: a\r\n\r\n": 400,
        b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n": 400,
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200000 + b"\r\n\r\n": 431,
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n": 200,
    }
    for request, status in table.items():
        answer = cluster.raw(request)
        check(answer.startswith(b"HTTP/1.1 %d " % status), f"{request[:80]!r} -> {answer[:120]!r}")


def run_worker(program, *arguments, timeout=60):
    return subprocess.run([str(BIN / f"baton-{program}"), *map(str, arguments)], capture_output=True,
                          text=True, timeout=timeout, stdin=subprocess.DEVNULL)


@case
def bad_model_files_are_refused_in_one_sentence():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "empty.gguf").write_bytes(b"")
        (path / "text.gguf").write_text("I am not a model\n" * 100)
        good = pathlib.Path(tiny_model("llama", gguf=True))
        good = next(good.glob("*.gguf")) if good.is_dir() else good
        (path / "truncated.gguf").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
        (path / "folder").mkdir()
        shutil.copytree(tiny_model("qwen3"), path / "arch")
        config = json.loads((path / "arch" / "config.json").read_text())
        (path / "arch" / "config.json").write_text(json.dumps(
            {**config, "model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
        for name, needle in (("missing.gguf", "missing.gguf"), ("empty.gguf", "empty.gguf"),
                             ("text.gguf", "text.gguf"), ("truncated.gguf", "truncated.gguf"),
                             ("folder", "config.json"), ("arch", "amba")):
            for program in ("prefill", "decode", "router"):
                if program == "router" and name == "arch":
                    continue  # the router reads only the tokenizer
                if program == "router" and name == "truncated.gguf":
                    continue  # its tokenizer may be whole
                done = run_worker(program, "--model", path / name, *(
                    ("--http", "127.0.0.1:0", "--control", "127.0.0.1:0") if program == "router"
                    else ("--router", "127.0.0.1:1")))
                equal(done.returncode, 2, f"{program} {name}: {done.stderr}")
                text = needle if program != "router" or name != "folder" else "folder"
                check(text in done.stderr, f"{program} {name}: {done.stderr!r}")
                check(len(done.stderr.strip().splitlines()) <= 3, f"{program} {name}: {done.stderr!r}")


@case
def unknown_tensor_types_are_named():
    good = pathlib.Path(tiny_model("llama", gguf=True))
    good = next(good.glob("*.gguf")) if good.is_dir() else good
    content = bytearray(good.read_bytes())
    name = b"output_norm.weight"
    at = content.index(name) + len(name)
    dimensions = struct.unpack_from("<I", content, at)[0]
    at += 4 + 8 * dimensions
    for number, needle in ((4711, "4711"), (20, "IQ4_NL")):  # of nobody, and one that is not built
        struct.pack_into("<I", content, at, number)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.gguf")
            path.write_bytes(content)
            for program in ("prefill", "decode"):
                done = run_worker(program, "--model", path, "--router", "127.0.0.1:1")
                equal(done.returncode, 2, f"{program} {number}: {done.stderr}")
                check(name.decode() in done.stderr and needle in done.stderr, f"{program}: {done.stderr!r}")


@case
def every_program_explains_itself():
    for program in ("router", "prefill", "decode"):
        names = run_worker(program, "--list-options").stdout.split()
        check(len(names) > 10, f"{program} has {names}")
        explained = run_worker(program, "--help")
        equal(explained.returncode, 0, program)
        for name in names:
            check(f"--{name}" in explained.stdout, f"{program} --help does not name --{name}")
        printed = run_worker(program, "--print-config", "--model", "/some/model", "--log-level", "debug")
        equal(printed.returncode, 0, printed.stderr)
        check("log-level = debug" in printed.stdout, printed.stdout)
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            file.write(printed.stdout)
            file.flush()
            again = run_worker(program, "--print-config", "--config", file.name)
        equal(again.returncode, 0, again.stderr)
        values = [[line for line in text.splitlines() if not line.startswith("#")]
                  for text in (printed.stdout, again.stdout)]
        equal(values[1], values[0], f"{program}: the printed configuration read again")


@case
def worker_options_are_checked_before_the_model_is_loaded():
    for program in ("prefill", "decode"):
        for arguments, needle in ((["--router", "nohost"], "--router"), (["--router", "a:99999"], "--router"),
                                  (["--page-tokens", "17"], "--page-tokens")):
            done = run_worker(program, "--model", "/none/such", *arguments)
            equal(done.returncode, 2, done.stderr)
            check(needle in done.stderr and "/none/such" not in done.stderr, done.stderr)
        done = run_worker(program, "--model", tiny_model(), "--router", "127.0.0.1:1",
                          "--ucx-port-range", "70000-70001")
        equal(done.returncode, 2, done.stderr)
        check("70000-70001" in done.stderr.splitlines()[-1], done.stderr)


@case
def a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        for http, control in ((address, "127.0.0.1:0"), ("127.0.0.1:0", address)):
            done = run_worker("router", "--model", tiny_model(), "--http", http, "--control", control)
            equal(done.returncode, 2, done.stderr)
            check(address in done.stderr, done.stderr)


@case
def cluster_refuses_bad_options():
    for arguments, needle in ((["--model", "/none/such"], "/none/such"), ([], "--model"),
                              (["--model", str(ROOT), "--prefill", "0"], "--prefill"),
                              (["--model", tiny_model(), "--", "--no-such-option", "3"], "no-such-option"),
                              (["--model", tiny_model(), "--device", "tpu"], "tpu"),
                              (["--model", tiny_model(), "--frob"], "--frob")):
        done = subprocess.run([str(ROOT / "deploy" / "cluster"), *map(str, arguments)],
                              capture_output=True, text=True, timeout=60,
                              env=dict(os.environ, BATON_BIN=str(BIN)))
        check(done.returncode != 0, f"{arguments} was accepted")
        check(needle in done.stderr, f"{needle!r} is not in {done.stderr!r}")


if __name__ == "__main__":
    with Cluster(tiny_model()) as cluster:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
