"""What the integration tests share: TAP output, real clusters started by deploy/cluster on ports of
their own, HTTP over plain sockets and http.client, and the check that nothing is left afterwards.

Waiting is always for a condition with a deadline (wait_until), never for a fixed time."""

import atexit
import contextlib
import http.client
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BATON_BIN", ROOT / "build" / "bin"))
TEST_BIN = pathlib.Path(os.environ.get("BATON_TEST_BIN", ROOT / "build" / "tests"))
os.environ.setdefault("BT_WEIGHTS_CACHE", "off")
DEMO_MODEL = os.environ.get("BATON_DEMO_MODEL", "")
# Under a sanitizer, where a step takes ten times as long: tests repeat less than on the plain build.
IS_FEW = os.environ.get("BATON_FEW", "") == "1"

_cases = []


class Skip(Exception):
    """Raised by a case that cannot run here; the reason is printed."""


def case(function):
    """Registers a test case; its name is what TAP prints."""
    _cases.append(function)
    return function


def unless_few(function):
    """A case for where tests need not repeat less; elsewhere it says that it is left out."""
    if not IS_FEW:
        return case(function)
    print(f"# {function.__name__} is left out: BATON_FEW is set")
    return function


def processor_seconds():
    """Of this process and of those it has waited for, their children too."""
    return sum(os.times()[:4])


def run_cases():
    """Runs every registered case, prints TAP and exits."""
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    cases = [c for c in _cases if only in c.__name__]
    print(f"1..{len(cases)}", flush=True)
    failed = 0
    for number, function in enumerate(cases, 1):
        name = function.__name__
        start, used = time.monotonic(), processor_seconds()
        try:
            function()
            print(f"ok {number} - {name}", flush=True)
        except Skip as reason:
            print(f"ok {number} - {name} # SKIP {reason}", flush=True)
        except BaseException:  # a failed case must not hide the others
            failed += 1
            print(f"not ok {number} - {name}", flush=True)
            for line in traceback.format_exc().splitlines():
                print(f"# {line}", flush=True)
        print(f"# {name} took {time.monotonic() - start:.1f} s, {processor_seconds() - used:.1f} s of processors",
              flush=True)
    sys.exit(1 if failed else 0)


def equal(actual, expected, what=""):
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def wait_until(condition, what, seconds=30.0):
    """Polls until condition() is true; its value is returned. The pause is only politeness."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        select.select([], [], [], 0.02)


def children_of(pid):
    """Process ids of the direct children of pid, by name of their program."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = pathlib.Path("/proc", entry, "stat").read_text()
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            if int(stat[stat.rindex(")") + 2 :].split()[1]) == pid:
                found.setdefault(name, []).append(int(entry))
    return found


def is_alive(pid):
    with contextlib.suppress(OSError):
        stat = pathlib.Path("/proc", str(pid), "stat").read_text()
        return stat[stat.rindex(")") + 2] != "Z"
    return False


def resident_kib(pid):
    for line in pathlib.Path("/proc", str(pid), "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"no VmRSS for {pid}")


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self):
        """The JSON of every `data:` event; the stream must end with [DONE]."""
        check(self.body.endswith(b"data: [DONE]\n\n"), f"no [DONE] at the end: {self.body[-200:]!r}")
        parts = self.body.split(b"\n\n")
        check(parts[-1] == b"", "text behind the last event")
        for part in parts[:-1]:
            check(part.startswith(b"data: ") and b"\n" not in part, f"not one data line: {part!r}")
        return [json.loads(part[6:]) for part in parts[:-2]]


class Cluster:
    """A cluster of deploy/cluster with free ports. Use as a context manager: leaving it checks that it
    is at rest (nothing allocated), stops it, and checks that no process is left."""

    def __init__(self, model, prefill=1, decode=1, options=(), shared=(), ucx_tls=None, on_death=None):
        self.worker_count = prefill + decode
        self.folder = tempfile.TemporaryDirectory(prefix="baton-test.")
        command = [str(ROOT / "deploy" / "cluster"), "--model", str(model), "--prefill", str(prefill),
                   "--decode", str(decode), "--http", "127.0.0.1:0", "--control", "127.0.0.1:0",
                   "--log-dir", self.folder.name]
        if on_death:
            command += ["--on-death", on_death]
        command += list(options)
        shared = [*shared, "--heartbeat-ms", "100"]
        if ucx_tls:
            shared += ["--ucx-tls", ucx_tls]
        if shared:
            command += ["--", *shared]
        environment = dict(os.environ, BATON_BIN=str(BIN))
        self.log_path = pathlib.Path(self.folder.name, "cluster.log")
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log,
                                            stdin=subprocess.DEVNULL, env=environment)
        atexit.register(self._kill)
        line = self._read_ready()
        if not line.startswith("ready http://"):
            self.process.wait()
            raise AssertionError(f"no ready line: {line!r}\n{self.logs()}")
        self.address = line.strip().removeprefix("ready http://")
        host, port = self.address.rsplit(":", 1)
        self.host, self.port = host.strip("[]"), int(port)
        self.url = f"http://{self.address}"

    def _read_ready(self, seconds=120):
        fd = self.process.stdout.fileno()
        readable, _, _ = select.select([fd], [], [], seconds)
        return self.process.stdout.readline().decode() if readable else ""

    def _kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def logs(self):
        text = ""
        for path in sorted(pathlib.Path(self.folder.name).glob("*.log")):
            text += f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}\n"
        return text

    def pids(self, program):
        return sorted(children_of(self.process.pid).get(f"baton-{program}", []))

    def request(self, method, path, body=None, headers=None, timeout=120):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            if body is not None and not isinstance(body, (bytes, str)):
                body = json.dumps(body)
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path):
        return self.request("GET", path)

    def generate(self, **fields):
        return self.request("POST", "/generate", fields)

    def raw(self, data, timeout=20):
        """Sends bytes as they are and returns everything until the server closes."""
        with socket.create_connection((self.host, self.port), timeout=timeout) as s:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := s.recv(65536):
                    answer += chunk
            return answer

    def workers(self):
        return self.get("/server_info").json["workers"]

    def is_at_rest(self):
        info = self.get("/server_info").json
        if info["requests_running"] or info["requests_queued"]:
            return False
        return all(w["attempts"] == 0 and w["pages_free"] == w["pages_total"]
                   and w["rows_free"] == w["rows_total"] and w["sequences_running"] == 0
                   for w in info["workers"])

    def wait_at_rest(self, seconds=20):
        """Also by the workers' own counts: the router knows them from their heartbeats, and the
        second one from now was surely asked for after now."""
        now = {w["id"]: w["heartbeats"] for w in self.workers()}
        wait_until(lambda: all(w["heartbeats"] >= now.get(w["id"], 0) + 2 for w in self.workers()),
                   "two heartbeats of every worker", seconds)
        wait_until(self.is_at_rest, "every page, slot and request released", seconds)

    def stop(self):
        """SIGTERM; returns the exit status and checks that no process is left."""
        family = [pid for pids in children_of(self.process.pid).values() for pid in pids]
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=30)
        for pid in family:
            check(not is_alive(pid), f"process {pid} is still there after the cluster stopped")
        return status

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                self.wait_at_rest()
                equal(self.stop(), 0, "exit status of deploy/cluster after SIGTERM")
            else:
                print("# " + self.logs().replace("\n", "\n# "), flush=True)
        finally:
            self._kill()
            atexit.unregister(self._kill)
            self.folder.cleanup()


_tiny = {}


def tiny_model(family="qwen3", gguf=False, context=None):
    """A generated model of a few thousand weights, made once per run."""
    key = (family, gguf, context)
    if key not in _tiny:
        folder = tempfile.mkdtemp(prefix=f"baton-tiny-{family}.")
        atexit.register(lambda: subprocess.run(["rm", "-rf", folder], check=False))
        command = [str(TEST_BIN / "tiny-model"), family, folder] + (["--gguf"] if gguf else [])
        command += ["--context", str(context)] if context else []
        _tiny[key] = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return _tiny[key] or folder


def demo_model():
    if not DEMO_MODEL:
        raise Skip("BATON_DEMO_MODEL is not set")
    return DEMO_MODEL


def check_rows(meta, output_ids, mode, top_k=None):
    """The invariants of a reply with masks (one row per token)."""
    rows, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    equal(len(rows), len(output_ids), "rows")
    equal(len(logprobs), len(output_ids), "log-probabilities")
    equal(meta["output_token_sampling_mask_length"], meta["completion_tokens"], "mask length")
    for token, row, logprob in zip(output_ids, rows, logprobs):
        check(row and len(set(row)) == len(row), f"a row is empty or repeats an id: {row}")
        check(token in row, f"the drawn token {token} is not in its row {row}")
        if mode == "support":
            equal(len(logprob), len(row), "support log-probabilities")
            total = sum(2.718281828459045 ** x for x in logprob)
            check(abs(total - 1) < 1e-5, f"the support sums to {total}")
        else:
            check(isinstance(logprob, float) and logprob <= 1e-6, f"selected log-probability {logprob}")
        if top_k == 1:
            equal(row, [token], "greedy row")


def joined_runs(runs):
    """[[version, tokens], ...] of several events as one reply tells them."""
    joined = []
    for version, tokens in runs:
        if joined and joined[-1][0] == version:
            joined[-1][1] += tokens
        else:
            joined.append([version, tokens])
    return joined


def in_threads(functions):
    """Runs the functions at once and returns their results in order; the first exception is raised."""
    results, errors = [None] * len(functions), []

    def call(index, function):
        try:
            results[index] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i, f)) for i, f in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
