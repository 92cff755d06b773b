"""The cluster record's refusals, processes that die, clients that leave, slow readers."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading

from harness import (BIN, Cluster, Skip, case, check, descriptors, equal, in_threads, is_alive, resident_kib,
                     run_cases, tiny_model, wait_until)

LONG = {"max_new_tokens": 400, "ignore_eos": True, "top_k": 8, "sampling_seed": 3}
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
MIDDLING = 800  # tokens; seconds of decode


def control_address(cluster):
    text = pathlib.Path(cluster.folder.name, "router.log").read_text()
    return re.search(r"workers join at (\S+)", text).group(1)


def extra_worker(cluster, program, *arguments, model=None):
    command = [str(BIN / f"baton-{program}"), "--model", str(model or tiny_model()), "--router",
               control_address(cluster), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def refusal(cluster, program, *arguments, field, values, model=None):
    done = extra_worker(cluster, program, *arguments, model=model)
    equal(done.returncode, 3, done.stderr)
    line = next((l for l in done.stderr.splitlines() if field in l), "")
    check(line, f"{field} is not named: {done.stderr!r}")
    for value in values:
        check(str(value) in line, f"{value!r} is not in {line!r}")
    return line


@case
def differing_workers_are_refused_by_name():
    with Cluster(tiny_model(), shared=["--sampling-mask-max-tokens", "64"]) as cluster:
        host = socket.gethostname()
        line = refusal(cluster, "decode", "--sampling-mask-max-tokens", 128,
                       field="sampling_mask_max_tokens", values=(128, 64))
        check(line.count(host) >= 1 or line.count("127.0.0.1") >= 1, f"no host in {line!r}")
        refusal(cluster, "prefill", "--sampling-mask-max-tokens", 32,
                field="sampling_mask_max_tokens", values=(32, 64))
        refusal(cluster, "decode", "--page-tokens", 16, field="page_tokens", values=(16, 32))
        refusal(cluster, "prefill", "--kv-dtype", "f32", field="kv_dtype", values=("f32", "bf16"))
        refusal(cluster, "decode", "--weights", "int8", field="numerics", values=("/int8", "host/exact/"))
        refusal(cluster, "decode", "--kv-checksum", "off", field="kv_checksum", values=("off", "full"))
        done = extra_worker(cluster, "decode", model=tiny_model("llama"))
        equal(done.returncode, 3, done.stderr)
        check("kv_layout" in done.stderr or "fingerprint" in done.stderr, done.stderr)
        equal(cluster.generate(input_ids=[1, 2], sampling_params=SHORT).status, 200, "it goes on")


def with_larger_tokenizer(folder):
    """A copy of the tiny model whose tokenizer has more ids than the model's vocabulary."""
    copy = pathlib.Path(folder, "larger")
    shutil.copytree(tiny_model(), copy)
    path = copy / "tokenizer.json"
    whole = json.loads(path.read_text())
    first = json.loads((copy / "config.json").read_text())["vocab_size"]
    whole["added_tokens"].append({"id": first + 7, "content": "<|one too many|>", "special": True,
                                  "single_word": False, "lstrip": False, "rstrip": False,
                                  "normalized": False})
    path.write_text(json.dumps(whole))
    return copy


@case
def a_tokenizer_that_does_not_fit_is_refused_by_name():
    with tempfile.TemporaryDirectory() as folder:
        larger = with_larger_tokenizer(folder)
        ports = pathlib.Path(folder, "ports")
        router = subprocess.Popen([BIN / "baton-router", "--model", larger, "--http", "127.0.0.1:0",
                                   "--control", "127.0.0.1:0", "--port-file", ports],
                                  stderr=subprocess.DEVNULL)
        try:
            _, control = wait_until(lambda: ports.exists() and ports.read_text().split(), "ports")
            for model, needle in ((larger, "does not fit the model"),
                                  (tiny_model(), "tokenizer")):
                for program in ("prefill", "decode"):
                    done = subprocess.run([BIN / f"baton-{program}", "--model", model, "--router", control],
                                          capture_output=True, text=True, timeout=60)
                    equal(done.returncode, 3, done.stderr)
                    check(needle in done.stderr, f"{needle!r} is not in {done.stderr!r}")
        finally:
            router.terminate()
            equal(router.wait(timeout=30), 0, "the router's exit status")


@case
def the_routers_cap_governs():
    with Cluster(tiny_model(), options=["--router-options", "--sampling-mask-max-tokens 16"]) as cluster:
        equal(cluster.get("/server_info").json["sampling_mask_max_tokens"], 16)
        refused = cluster.generate(input_ids=[1, 2], return_sampling_mask=True,
                                   sampling_params={"top_k": 17, **SHORT})
        equal(refused.status, 400)
        check("--sampling-mask-max-tokens=16" in refused.body.decode(), refused.body)
        full = cluster.generate(input_ids=[1, 2], return_sampling_mask=True,
                                sampling_logprobs_mode="support",
                                sampling_params={"top_k": 16, "temperature": 100.0, **SHORT})
        equal([len(r) for r in full.json["meta_info"]["output_token_sampling_mask"]], [16] * 4)


@case
def what_a_client_did_is_no_warning():
    with Cluster(tiny_model(), options=["--router-options", "--sampling-mask-max-tokens 3"]) as cluster:
        for stream in (False, True):  # everything ties at this temperature
            reply = cluster.generate(input_ids=[1, 2], return_sampling_mask=True, stream=stream,
                                     sampling_params={"top_k": 2, "temperature": 1e9, **SHORT})
            equal(reply.status, 400)
            check("exceeds --sampling-mask-max-tokens=3" in reply.json["error"]["message"], reply.body)
        for _ in range(3):
            open_stream(cluster).close()
        cluster.wait_at_rest()
        for name in ("router", "prefill0", "decode0"):
            text = pathlib.Path(cluster.folder.name, f"{name}.log").read_text()
            check(" warn " not in text and " error " not in text, text)


def open_stream(cluster, params=LONG, **fields):
    """A raw socket that has read the first event of a stream."""
    body = json.dumps({"input_ids": [1, 2, 3], "stream": True, "sampling_params": params, **fields}).encode()
    s = socket.create_connection((cluster.host, cluster.port), timeout=30)
    s.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = b""
    while b"data: " not in answer:
        chunk = s.recv(4096)
        check(chunk, f"the stream ended early: {answer!r}")
        answer += chunk
    return s


@case
def clients_that_leave_release_everything():
    with Cluster(tiny_model()) as cluster:
        pids = cluster.pids("router") + cluster.pids("decode") + cluster.pids("prefill")
        cluster.generate(input_ids=[1], sampling_params=SHORT)
        before = [descriptors(p) for p in pids]
        for how in ("close", "reset", "half"):
            sockets = [open_stream(cluster, return_sampling_mask=True) for _ in range(4)]
            for s in sockets:
                if how == "reset":
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if how == "half":
                    s.shutdown(socket.SHUT_WR)
                else:
                    s.close()
            cluster.wait_at_rest()
            for s in sockets:
                s.close()
        body = json.dumps({"input_ids": [1] * 300, "sampling_params": LONG}).encode()
        for _ in range(5):  # not streaming: gone before the answer
            s = socket.create_connection((cluster.host, cluster.port))
            s.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            s.close()
        cluster.wait_at_rest()
        wait_until(lambda: all(descriptors(p) <= b + 1 for p, b in zip(pids, before)), "descriptors")


@case
def a_reader_that_stops_stalls_only_itself():
    with Cluster(tiny_model()) as cluster:
        router = cluster.pids("router")[0]
        stalled = open_stream(cluster, {**LONG, "top_k": 256, "temperature": 50.0},
                              return_sampling_mask=True, sampling_logprobs_mode="support")
        resident = resident_kib(router)
        for _ in range(5):
            equal(cluster.generate(input_ids=[4, 5], sampling_params=SHORT).status, 200)
        check(resident_kib(router) < resident + 64 * 1024, "the router's memory grew with a slow reader")
        stalled.close()


@case
def a_killed_worker_stops_the_cluster_by_default():
    for program in ("prefill", "decode", "router"):
        cluster = Cluster(tiny_model())
        pids = cluster.pids("router") + cluster.pids("decode") + cluster.pids("prefill")
        os.kill(cluster.pids(program)[0], signal.SIGKILL)
        check(cluster.process.wait(timeout=30) != 0, "exit status 0 after a death")
        text = cluster.log_path.read_text()
        check(program in text and "SIGKILL" in text, f"the log does not say who and why: {text!r}")
        wait_until(lambda: not any(is_alive(p) for p in pids), "no process is left")


@case
def clients_are_told_that_the_router_stops():
    with Cluster(tiny_model(), on_death="restart") as cluster:
        replies = []

        def ask(stream):
            try:
                replies.append(cluster.generate(input_ids=[1, 2], stream=stream, sampling_params={
                    **LONG, "max_new_tokens": 2000}))
            except OSError:
                return
        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False) * 3]
        for thread in threads:
            thread.start()
        wait_until(lambda: cluster.get("/server_info").json["requests_running"] == 6, "all run")
        os.kill(cluster.pids("router")[0], signal.SIGTERM)
        for thread in threads:
            thread.join()
        equal(len(replies), 6, "a connection was cut without a word")
        for reply in replies:
            if reply.status == 503 or reply.headers["Content-Type"] == "application/json":
                continue  # not begun, or done in time
            reason = reply.events[-1]["meta_info"]["finish_reason"]
            check(reason["type"] == "length" or reason["message"] == "the router is stopping", reason)

        def is_back():
            try:
                return cluster.get("/health").status == 200
            except OSError:
                return False
        wait_until(is_back, "the router serves again")


@case
def a_killed_cluster_script_leaves_no_process():
    cluster = Cluster(tiny_model())
    pids = cluster.pids("router") + cluster.pids("decode") + cluster.pids("prefill")
    cluster.process.kill()
    cluster.process.wait()
    wait_until(lambda: not any(is_alive(p) for p in pids), "children die with the script")


@case
def two_workers_that_die_together_are_both_restarted():
    with Cluster(tiny_model(), prefill=2, on_death="restart") as cluster:
        before = cluster.pids("prefill")
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all_ready(cluster, *before), "both are new, and ready")
        equal(cluster.generate(input_ids=[1, 2], sampling_params=SHORT).status, 200)


def all_ready(cluster, *dead):
    """Every process of the script is a ready worker of the router, and the dead are not among them."""
    pids = sorted(cluster.pids("prefill") + cluster.pids("decode"))
    ready = sorted(w["pid"] for w in cluster.workers() if w["is_ready"])
    return len(pids) == cluster.worker_count and pids == ready and not set(dead) & set(pids)


def survives(program, tls):
    with Cluster(tiny_model(), prefill=2, decode=2, on_death="restart", ucx_tls=tls) as cluster:
        want = {"input_ids": list(range(1, 60)), "return_sampling_mask": True,
                "sampling_params": {**LONG, "max_new_tokens": 60}}
        expected = cluster.generate(**want).json["output_ids"]
        for _ in range(2):
            victim = cluster.pids(program)[0]
            workers = {pid for name in ("prefill", "decode") for pid in cluster.pids(name)} - {victim}
            running = [lambda: cluster.generate(**want) for _ in range(8)]
            running.append(lambda: os.kill(victim, signal.SIGKILL))
            replies = in_threads(running)[:-1]
            for reply in replies:
                check(reply.status in (200, 503) if program == "prefill" else reply.status == 200,
                      f"{reply.status} {reply.body[:200]!r}")
                if reply.status == 200:
                    equal(reply.json["output_ids"], expected, "a retried answer")
            check(all(is_alive(p) for p in workers), "a surviving worker was harmed")
            wait_until(lambda: all_ready(cluster, victim), "restarted")
            equal(cluster.generate(**want).json["output_ids"], expected, "after the restart")


@case
def killed_prefill_is_survived_tcp():
    survives("prefill", "tcp")


@case
def killed_prefill_is_survived_shm():
    survives("prefill", "shm")


@case
def killed_decode_is_survived_tcp():
    survives("decode", "tcp")


@case
def killed_decode_is_survived_shm():
    survives("decode", "shm")


def whole_requests():
    """Of every endpoint and shape that is answered when complete: (path, body, Accept)."""
    def drawn(seed, **more):
        return {"max_new_tokens": MIDDLING, "ignore_eos": True, "top_k": 8, "sampling_seed": seed, **more}
    masks = {"return_sampling_mask": True, "sampling_logprobs_mode": "support", "return_logprob": True}
    ids = [list(range(k, k + 9)) for k in range(1, 40, 7)]
    return [
        ("/generate", {"rid": "a", "input_ids": ids[0], "sampling_params": drawn(1), **masks}, None),
        ("/generate", {"rid": "b", "input_ids": ids[1], "sampling_params": drawn(2, n=3), **masks,
                       "logprob_start_len": 0}, None),
        ("/generate", {"rid": "c", "input_ids": ids[2:5], **masks, "sampling_mask_format": "packed",
                       "sampling_params": [drawn(3), drawn(4, n=2), drawn(5)]}, None),
        ("/generate", {"rid": "d", "input_ids": ids[5], "sampling_params": drawn(6, n=2), **masks},
         "application/x-safetensors"),
        ("/v1/chat/completions", {"rid": "e", "messages": [{"role": "user", "content": "a"}], "n": 2, "seed": 7,
                                  "max_tokens": MIDDLING, "ignore_eos": True, "logprobs": True, "top_logprobs": 2},
         None),
        ("/v1/completions", {"rid": "f", "prompt": ids[:2], "max_tokens": MIDDLING, "ignore_eos": True, "seed": 8,
                             "logprobs": 1, "echo": True}, None),
    ]


def whole_reply(cluster, path, body, accept):
    """Its bytes without the times; a safetensors file ends with its JSON, whose length the times may change."""
    reply = cluster.request("POST", path, body, headers={"Accept": accept} if accept else None)
    equal(reply.status, 200, reply.body[:500])
    data = reply.body
    if accept:
        header = int.from_bytes(data[:8], "little")
        at = json.loads(data[8:8 + header])["reply_json"]["data_offsets"][0]
        data = data[8 + header:]
        check(at > MIDDLING * 8, "the file has no rows")
    times = rb'"(e2e_latency|response_sent_to_client_ts|created)":[-0-9.e]+'
    check(re.search(times, data), "a reply without a time")
    return re.sub(times, rb'"\1":0', data)


def kill_in_the_middle(cluster):
    """All of whole_requests at once on two decode workers; the one that has the most is killed when these are
    well into their rows, which travel by fifties. The replies, in order."""
    def the_busiest():
        decodes = [w for w in cluster.workers() if w["role"] == "decode"]
        check(len(decodes) == 2, f"decode workers: {decodes}")
        busiest = max(decodes, key=lambda w: w["sequences_running"])
        # Three pages of each, by its own count: at least 64 tokens.
        used = busiest["pages_total"] - busiest["pages_free"]
        return busiest["sequences_running"] >= 5 and used >= 3 * busiest["sequences_running"] and busiest

    def kill():
        os.kill(wait_until(the_busiest, "one draws many of the samples")["pid"], signal.SIGKILL)

    return in_threads([lambda r=r: whole_reply(cluster, *r) for r in whole_requests()] + [kill])[:-1]


@case
def a_killed_decode_is_not_seen_in_whole_replies():
    """What is answered when complete is drawn again elsewhere, from the first token: the same bytes."""
    with Cluster(tiny_model(context=4096), decode=2, on_death="restart") as cluster:
        expected = [whole_reply(cluster, *request) for request in whole_requests()]
        before = cluster.get("/server_info").json["retries_total"]
        equal(before, 0, "retries before anything happened")
        replies = kill_in_the_middle(cluster)
        for (path, body, _), reply, want in zip(whole_requests(), replies, expected):
            check(reply == want, f"{path} {body['rid']} is another one: {first_difference(reply, want)}")
        check(cluster.get("/server_info").json["retries_total"] > 0, "the dead worker had nothing")
        wait_until(lambda: all_ready(cluster), "restarted")


def first_difference(mine, other):
    at = next((i for i, (a, b) in enumerate(zip(mine, other)) if a != b), min(len(mine), len(other)))
    return f"at {at}: {mine[max(0, at - 60):at + 60]!r}, not {other[max(0, at - 60):at + 60]!r}"


@case
def names_and_ipv6_are_addresses():
    with Cluster(tiny_model(), options=["--http", "localhost:0"]) as cluster:
        check(cluster.address.startswith("localhost:"), cluster.address)
        equal(cluster.generate(input_ids=[1, 2], sampling_params=SHORT).status, 200)
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        raise Skip(f"no IPv6 on this machine: {error}")
    with Cluster(tiny_model(), options=["--http", "[::1]:0", "--control", "[::1]:0"]) as cluster:
        check(cluster.address.startswith("[::1]:"), cluster.address)
        equal(cluster.generate(input_ids=[1, 2], sampling_params=SHORT).status, 200)


@case
def pools_smaller_than_the_context_serve_what_fits():
    # 8 pages of 32 tokens on both sides; the model's context is longer. The last token needs no page.
    with Cluster(tiny_model(), shared=["--kv-pages", "8"]) as cluster:
        def ask(prompt, tokens):
            return cluster.generate(input_ids=[5] * prompt,
                                    sampling_params={"max_new_tokens": tokens, "ignore_eos": True})
        equal(ask(200, 57).json["meta_info"]["completion_tokens"], 57)
        reply = ask(200, 58)
        equal(reply.status, 400)
        check("8" in reply.json["error"]["message"], reply.body)
        equal(ask(256, 0).status, 200)
        equal(ask(257, 0).status, 400)
        equal(ask(10, None).json["meta_info"]["completion_tokens"], 247, "no limit: what the pool has")
        chat = cluster.request("POST", "/v1/chat/completions",
                               {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
        equal(chat.json["usage"]["total_tokens"], 257, "a chat without max_tokens")
        replies = in_threads([lambda i=i: ask(10 + 3 * i, 40) for i in range(48)])
        equal([r.status for r in replies], [200] * 48, "they wait for pages")


@case
def a_prompt_may_fill_the_pages_to_the_last_token():
    with Cluster(tiny_model(), shared=["--kv-pages", "8"]) as cluster:
        full = cluster.generate(input_ids=[3] * 256, sampling_params={"max_new_tokens": 1})
        equal(full.status, 200, full.body)
        over = cluster.generate(input_ids=[3] * 256, sampling_params={"max_new_tokens": 2})
        equal(over.status, 400, over.body)


@case
def ignored_deaths_leave_the_rest_serving():
    with Cluster(tiny_model(), prefill=2, on_death="ignore") as cluster:
        victim = cluster.pids("prefill")[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(cluster.workers()) == 2, "the router notices")
        equal(cluster.generate(input_ids=[1, 2], sampling_params=SHORT).status, 200)
        wait_until(lambda: "SIGKILL" in cluster.log_path.read_text(), "the log says why")
        check("line " not in cluster.log_path.read_text(), "the shell's own words are in the log")


@case
def requests_wait_for_workers_that_come_back():
    """All workers die; a request that comes meanwhile is served by their successors."""
    with Cluster(tiny_model(), on_death="restart") as cluster:
        for pid in cluster.pids("prefill") + cluster.pids("decode"):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not cluster.workers(), "the router notices")
        equal(cluster.generate(input_ids=[1, 2], sampling_params=SHORT).status, 200)


@case
def workers_find_a_restarted_router():
    """A stream with masks is cut where it is: without an end nobody takes it for a whole reply."""
    masked = {"input_ids": [1, 2, 3], "return_sampling_mask": True, "sampling_params": LONG}
    with Cluster(tiny_model(), on_death="restart") as cluster:
        workers = cluster.pids("prefill") + cluster.pids("decode")
        http, control = cluster.address, control_address(cluster)
        expected = cluster.generate(**masked).json
        stream = open_stream(cluster, {**LONG, "max_new_tokens": 2000}, return_sampling_mask=True)
        os.kill(cluster.pids("router")[0], signal.SIGKILL)
        told = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := stream.recv(65536):
                told += chunk
        check(b"[DONE]" not in told and not told.endswith(b"\r\n0\r\n\r\n"), told[-200:])
        stream.close()

        def is_back():
            try:
                return cluster.get("/health").status == 200
            except OSError:
                return False
        wait_until(lambda: not is_back(), "the router is gone")
        wait_until(is_back, "the router serves again")
        equal(cluster.pids("prefill") + cluster.pids("decode"), workers, "the workers stayed")
        equal(cluster.generate(input_ids=[1, 2], sampling_params=SHORT).status, 200)
        again = cluster.generate(**masked).json
        for key in ("output_token_sampling_mask", "output_token_sampling_logprobs"):
            equal(again["meta_info"][key], expected["meta_info"][key], key)
        equal((cluster.address, control_address(cluster)), (http, control))


if __name__ == "__main__":
    run_cases()
