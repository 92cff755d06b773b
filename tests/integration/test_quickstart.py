"""deploy/quickstart itself."""

import os
import pathlib
import signal
import subprocess
import tempfile

from harness import BIN, ROOT, case, check, children_of, demo_model, equal, is_alive, run_cases, wait_until

QUICKSTART = str(ROOT / "deploy" / "quickstart")
SCRATCH = tempfile.TemporaryDirectory(prefix="baton-test.")  # where quickstart keeps logs of failures
ENVIRONMENT = dict(os.environ, BATON_BIN=str(BIN), TMPDIR=SCRATCH.name)


@case
def once_answers_with_masks_and_stops():
    model = demo_model()
    done = subprocess.run([QUICKSTART, "--once", "--http", "127.0.0.1:0", "--model", model],
                          capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
    equal(done.returncode, 0, done.stdout + done.stderr)
    check("Paris" in done.stdout, done.stdout)
    check(done.stdout.count("curl -s") == 2, "two curl lines")
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith('"')]
    check(any(int(row[-2]) > 1 for row in rows), f"no support above 1: {rows}")
    check(all(float(row[-1]) <= 0 for row in rows), f"a positive log-probability: {rows}")


@case
def stays_up_until_interrupted_and_leaves_nothing():
    model = demo_model()
    process = subprocess.Popen([QUICKSTART, "--http", "127.0.0.1:0", "--model", model],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    for line in process.stderr:
        if "serving until Ctrl-C" in line:
            break
    cluster = [pid for pids in children_of(process.pid).values() for pid in pids]
    family = cluster + [pid for c in cluster for pids in children_of(c).values() for pid in pids]
    check(len(family) >= 4, f"too few processes: {family}")
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    wait_until(lambda: not any(is_alive(pid) for pid in family), "no process is left")


@case
def a_model_that_is_none_ends_with_a_sentence():
    for model, needle in (("/none/such.gguf", "/none/such.gguf"), (str(pathlib.Path(__file__)), "neither a GGUF file")):
        done = subprocess.run([QUICKSTART, "--once", "--http", "127.0.0.1:0", "--model", model],
                              capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
        check(done.returncode != 0, f"{model} was accepted")
        check(needle in done.stderr, f"{needle!r} is not in {done.stderr[-2000:]!r}")


if __name__ == "__main__":
    run_cases()
