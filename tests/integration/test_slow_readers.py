"""Clients that do not read, or slowly, while the sim device makes wide rows for them: the router's memory
stays below a bound that its options give, its descriptors are one file a reply, and nothing is lost."""

import json
import socket

from harness import BIN, Cluster, case, check, descriptors, equal, resident_kib, run_cases, tiny_model, wait_until

WIDTH = 300  # the tiny tokenizer has 320 ids
ROW = 40 + 8 * WIDTH  # bytes of a record in the router
TOKENS = 3500
MIB = 1 << 20
# Of each connection: up to 256 KiB wait for the socket, in blocks that are at least half full; the text being
# made (128 KiB), the window through which its file is read (64 KiB), rows that a frame's end cut. Of the
# process: blocks that lie idle, the threads' own, what an allocator keeps.
EACH = 2 * 256 * 1024 + 128 * 1024 + 64 * 1024 + 2 * ROW
OWN = 24 * MIB
IS_SANITIZED = b"__asan_init" in (BIN / "baton-router").read_bytes()


def cluster_of(reply_memory):
    router = f"--reply-memory {reply_memory} --incremental-streaming-output"
    return Cluster(tiny_model(), options=["--device", "sim", "--router-options", router],
                   shared=["--sim-step-us", "50", "--sim-support", str(WIDTH), "--page-tokens", "32"])


def wanted(seed, **more):
    return {"input_ids": [5, 6, 7], "return_sampling_mask": True, "sampling_logprobs_mode": "support",
            "sampling_mask_format": "packed",
            "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True, "top_k": WIDTH,
                                "sampling_seed": seed, "skip_special_tokens": False}, **more}


def ask_and_wait(cluster, body, accept="*/*", window=4096):
    """A connection on which a request was sent and nothing is read."""
    data = json.dumps(body).encode()
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    s.settimeout(60)
    s.connect((cluster.host, cluster.port))
    s.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAccept: %s\r\nContent-Length: %d\r\n\r\n"
              % (accept.encode(), len(data)) + data)
    return s


def read_all(s, look=lambda: None):
    answer, seen = bytearray(), 0
    while chunk := s.recv(1 << 18):
        answer += chunk
        if len(answer) >= seen + 2 * MIB:
            seen = len(answer)
            look()
    s.close()
    head, _, rest = bytes(answer).partition(b"\r\n\r\n")
    check(head.startswith(b"HTTP/1.1 200 "), head)
    if b"chunked" not in head:
        return rest
    body = bytearray()
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            return bytes(body)
        body += rest[:count]
        rest = rest[count + 2:]


def events_of(body):
    check(body.endswith(b"data: [DONE]\n\n"), body[-100:])
    return [json.loads(part[6:]) for part in body.split(b"\n\n")[:-2]]


def decode_of(cluster):
    return next(w for w in cluster.workers() if w["role"] == "decode")


def all_wait(cluster, count):
    """Every sequence has drawn its window's worth and waits for credit."""
    worker = decode_of(cluster)
    pages = worker["pages_total"] - worker["pages_free"]
    return worker["attempts"] == count and worker["sequences_running"] == 0 and pages >= 3 * count


def check_memory(cluster, base_kib, bound, what):
    if IS_SANITIZED:
        return  # what is resident there is the sanitizer's: shadows, red zones, what was freed
    grown = (resident_kib(cluster.pids("router")[0]) - base_kib) * 1024
    check(grown <= bound, f"{what}: the router grew by {grown >> 20} MiB, more than {bound >> 20}")


@case
def streams_that_nobody_reads_hold_what_the_options_say():
    count = 40
    with cluster_of("8M") as cluster:
        router = cluster.pids("router")[0]
        expected = cluster.generate(**wanted(1)).json["output_ids"]
        base, files = resident_kib(router), descriptors(router)
        bound = 8 * MIB + count * EACH + OWN
        check(bound < count * (MIB + EACH), "windows that are held in memory would be below the bound")
        sockets = [ask_and_wait(cluster, wanted(k + 1, stream=True), window=1 << 18 if k == 0 else 4096)
                   for k in range(count)]
        wait_until(lambda: all_wait(cluster, count), "all streams stall", 120)
        check_memory(cluster, base, bound, f"{count} stalled streams")
        check(descriptors(router) <= files + 2 * count + 2, "a connection and a file each")
        # One begins to read: its rows are all there, in order, while the others wait.
        events = events_of(read_all(sockets[0]))
        equal([i for e in events for i in e["output_ids"]], expected, "what was read late")
        lengths = [e["meta_info"]["output_token_sampling_packed"]["lengths"]["shape"][0] for e in events]
        equal(sum(lengths), TOKENS, "rows")
        check_memory(cluster, base, bound, "while one reads")
        for s in sockets[1:]:
            s.close()
        cluster.wait_at_rest(60)
        wait_until(lambda: descriptors(router) <= files + 1, "no file and no connection is left")


@case
def a_whole_reply_is_held_in_memory_and_file():
    tensors = "application/x-safetensors"
    with cluster_of("2M") as cluster:
        router = cluster.pids("router")[0]
        request = wanted(3)
        del request["sampling_mask_format"]
        fast = cluster.request("POST", "/generate", request, headers={"Accept": tensors}).body
        base, files = resident_kib(router), descriptors(router)
        bound = 2 * MIB + EACH + OWN // 2
        check(2 * bound < 4 * TOKENS * ROW, "the rows would be below the bound")
        # Several samples: their rows are four times as many.
        request["sampling_params"]["n"] = 4
        slow = ask_and_wait(cluster, request, tensors, window=1 << 18)
        wait_until(lambda: decode_of(cluster)["attempts"] == 1, "it runs")
        wait_until(lambda: decode_of(cluster)["attempts"] == 0, "it is drawn to the end", 120)
        check_memory(cluster, base, bound, "a whole reply that nobody reads")
        check(descriptors(router) <= files + 3, "more than a file and a connection for four samples")
        body = read_all(slow, lambda: check_memory(cluster, base, bound, "while it is read"))
        check(len(body) > 4 * TOKENS * 8 * WIDTH, f"only {len(body)} bytes")
        # The first sample's ids are those of the request alone, behind a header of another length.
        ids = arrays(body)["0.sampling_mask_token_ids"]
        equal(ids == arrays(fast)["sampling_mask_token_ids"], True, "the supports of the first sample")
        wait_until(lambda: descriptors(router) <= files + 1, "the file is gone")


def arrays(body):
    header = int.from_bytes(body[:8], "little")
    names = json.loads(body[8:8 + header])
    names.pop("__metadata__")
    return {name: body[8 + header + a["data_offsets"][0]:8 + header + a["data_offsets"][1]]
            for name, a in names.items()}


if __name__ == "__main__":
    run_cases()
