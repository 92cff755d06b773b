"""The sampler against an implementation of its own in double precision: random rows of logits with
many ties, every parameter. Supports are equal except where a limit is met so closely that rounding
decides; log-probabilities agree to rounding; the token is the one that the noise chooses."""

import math
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integration"))
from harness import TEST_BIN, case, check, equal, run_cases

VOCABULARY = 400
CASES = 1500
CLOSE = 1e-5  # what a limit may be missed by in single precision
MASK64 = (1 << 64) - 1


def f32(x):
    """x rounded to single precision; out of range is an infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def murmur(seed, position, column):
    h = 0
    for k in (seed & 0xFFFFFFFF, seed >> 32, position, column):
        k = k * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        h ^= k * 0x1B873593 & 0xFFFFFFFF
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & 0xFFFFFFFF
    return h ^ h >> 16


def noise(h):
    inner = max(math.log(h / 4294967295.0), -sys.float_info.max) if h else -sys.float_info.max
    return -math.log(-min(inner, -(2.0**-32)))


def make_case(draw, number):
    """A row of logits on a grid, so that ties are exact, and parameters, as a dictionary."""
    step = draw.choice((1 / 64, 1 / 4, 1))
    spread = draw.choice((0.5, 2, 6))
    logits = [round(draw.gauss(0, spread) / step) * step for _ in range(VOCABULARY)]
    if number % 5 == 0:
        for _ in range(VOCABULARY // 2):
            logits[draw.randrange(VOCABULARY)] = -math.inf
    ids = [draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 4, 40, 300)))]
    if number % 3 == 0:
        ids = [i % 10 for i in ids]
    has_penalty = draw.random() < 0.6
    params = {
        "name": f"c{number}",
        "ids": ids,
        "temperature": draw.choice((1, 0.5, 0.75, 1.25, 2)),
        "top_p": draw.choice((1, 1, 0.95, 0.75, 0.3)),
        "top_k": draw.choice((0, 0, 1, 2, 5, 50, 399, 1000)),
        "min_p": draw.choice((0, 0, 0.01, 0.09, 0.3, 1)),
        "filter": draw.choice(("joint", "rank")),
        "frequency_penalty": draw.choice((0, 0.5, -0.25, 2)) if has_penalty else 0,
        "presence_penalty": draw.choice((0, 0.5, -1)) if has_penalty else 0,
        "repetition_penalty": draw.choice((1, 1.25, 0.5, 2)) if has_penalty else 1,
        "bias": {draw.randrange(VOCABULARY): draw.randrange(-40, 41) / 8
                 for _ in range(draw.choice((0, 0, 1, 20)))},
        "stop": [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 2, 30)))],
        "min_new_tokens": draw.choice((0, 10, 1000)),
        "vocab_limit": draw.choice((0, 0, 399, 250)),
        "seed": draw.randrange(1 << 64),
        "mask": "support",
        "bounded": number % 2,
        "cap": draw.choice((1, 2, 7, 60)) if number % 2 else 0,
        "logprob": 1,
        "top": draw.choice((0, 1, 20, 128)),
        "logprob_ids": [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 3)))],
        "prompt_logprobs_from": 0,
    }
    return params, logits


def case_line(params):
    words = []
    for key, value in params.items():
        if isinstance(value, dict):
            value = ",".join(f"{i}:{b}" for i, b in value.items())
        elif isinstance(value, list):
            value = ",".join(map(str, value))
        if value != "":
            words.append(f"{key}={value}")
    return " ".join(words) + f" max_new_tokens={max(1, params['min_new_tokens'])}\n"


def process(params, logits):
    """Step 1: each operation is exact in double precision before it is rounded."""
    limit = params["vocab_limit"] or VOCABULARY
    banned = set(params["stop"]) if len(params["ids"]) < params["min_new_tokens"] else set()
    out = []
    for i, x in enumerate(logits[:limit]):
        count = params["ids"].count(i)
        if count:
            x = f32(x - params["frequency_penalty"] * count)
            x = f32(x - params["presence_penalty"])
            factor = params["repetition_penalty"]
            x = f32(x / factor) if x > 0 else f32(x * factor)
        x = f32(x + params["bias"].get(i, 0))
        out.append(-math.inf if i in banned else x)
    return out


def support_of(params, x):
    """Ids in order, and whether rounding may decide otherwise."""
    top_k, top_p, min_p = params["top_k"] or VOCABULARY, params["top_p"], params["min_p"]
    z = [f32(v / params["temperature"]) for v in x]
    top = max(z)
    weights = [math.exp(v - top) for v in z]
    order = sorted((i for i in range(len(z)) if weights[i] > 2.0**-126),
                   key=lambda i: (-z[i], i))
    if params["top_k"] == 1:
        return [min(range(len(x)), key=lambda i: (-x[i], i))], weights, False
    total = sum(weights)
    is_close = any(0 < z[a] - z[b] < CLOSE for a, b in zip(order, order[1:]))
    is_close |= any(abs(weights[i] - min_p) < CLOSE * min_p for i in order if z[i] < top)
    is_close |= any(2.0**-127 < w < 2.0**-125 for w in weights)
    is_rank = params["filter"] == "rank"

    def before(r):
        """How many ranks, and which mass, count before rank r."""
        if is_rank:
            return r, sum(weights[i] for i in order[:r])
        greater = [i for i in order if z[i] > z[order[r]]]
        return len(greater), sum(weights[i] for i in greater)

    kept = [r for r in range(len(order)) if before(r)[0] < top_k]
    if not is_rank and min_p > 0:
        total = sum(weights[order[r]] for r in kept)
    support = []
    for r in kept:
        mass = before(r)[1] / total
        is_close |= top_p < 1 and abs(mass - top_p) < CLOSE
        is_inside = top_p == 1 or (mass <= top_p if is_rank else mass < top_p)
        if is_inside and weights[order[r]] >= min_p:
            support.append(order[r])
    return support, weights, is_close


def expected_token(params, support, weights):
    """The winner, and by how much."""
    by_rank = params["top_k"] != 0 or (params["filter"] == "rank" and
                                     (params["top_p"] < 1 or params["min_p"] > 0))
    scores = []
    for rank, i in enumerate(support):
        h = murmur(params["seed"], len(params["ids"]) - 1, rank if by_rank else i)
        scores.append((math.log(weights[i]) + noise(h), i))
    scores.sort(reverse=True)
    return scores[0][1], scores[0][0] - scores[1][0] if len(scores) > 1 else math.inf


def log_softmax(values):
    top = max(values)
    total = math.log(sum(math.exp(v - top) for v in values))
    return [v - top - total for v in values]


def parse(line):
    """The parts of a printed row."""
    words = line.split()
    out = {"token": int(words[words.index("token") + 1]),
           "logprob": float.fromhex(words[words.index("logprob") + 1])}
    part = None
    for word in words[words.index("logprob") + 2:]:
        if word in ("support", "top", "ids", "selected", "size"):
            part, number = out.setdefault(word, []), int if word == "size" else float.fromhex
        elif part is not None and ":" in word:
            key, value = word.split(":")
            part.append((int(key), float.fromhex(value)))
        elif part is not None:
            part.append(number(word))
    return out


def near(actual, expected, what):
    if actual != expected:
        check(abs(actual - expected) <= 2e-6 * max(1.0, abs(expected)),
              f"{what}: {actual} is not {expected}")


def check_logprobs(params, row, values):
    """values: the logits whose log-softmax it is."""
    name = params["name"]
    wanted = log_softmax(values)
    wanted += [-math.inf] * (VOCABULARY - len(values))
    near(row["logprob"], wanted[row["token"]], name)
    found = [(i, v) for i, v in row.get("top", []) if i >= 0]
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:params["top"]]
    equal([i for i, _ in found], best, f"{name}, the largest")
    equal([i for i, _ in row.get("ids", [])], params["logprob_ids"], f"{name}, chosen ids")
    for i, value in found + row.get("ids", []):
        near(value, wanted[i], f"{name}, id {i}")


def check_row(params, logits, row):
    """Returns whether the case is too close to call."""
    x = process(params, logits)
    support, weights, is_close = support_of(params, x)
    check_logprobs(params, row, [v / params["temperature"] for v in x])
    if is_close:
        return True
    mass = sum(weights[i] for i in support)
    if params["bounded"]:
        equal(row["size"], [len(support)], f"the size of {params}")
    kept = support[:params["cap"] or len(support)]
    if row["token"] not in kept:
        check(row["token"] in support, f"the token of {params}")
        kept[-1] = row["token"]
    equal([i for i, _ in row["support"]], kept, f"the support of {params}")
    for i, value in row["support"]:
        near(value, math.log(weights[i] / mass), params["name"])
    equal(row["selected"], [v for i, v in row["support"] if i == row["token"]], params["name"])
    token, margin = support[0], 1
    if params["top_k"] != 1:
        token, margin = expected_token(params, support, weights)
    if margin > CLOSE:
        equal(row["token"], token, f"the token of {params}")
    return False


def run_rows(made):
    """The rows and the scores that the sampler gives, by name."""
    with tempfile.NamedTemporaryFile() as file:
        for _, logits in made:
            file.write(struct.pack(f"<{VOCABULARY}f", *logits))
        file.flush()
        done = subprocess.run([TEST_BIN / "baton-draw", file.name, str(VOCABULARY)], text=True,
                              input="".join(case_line(params) for params, _ in made),
                              capture_output=True, timeout=120)
    equal(done.returncode, 0, done.stderr)
    found = {"row": {}, "prompt": {}}
    for line in done.stdout.splitlines():
        name, kind, _ = line.split(maxsplit=2)
        found[kind][name] = parse(line)
    return found["row"], found["prompt"]


@case
def random_rows_agree():
    draw = random.Random(20)
    made = [make_case(draw, number) for number in range(CASES)]
    rows, scores = run_rows(made)
    close = 0
    for params, logits in made:
        name = params["name"]
        close += check_row(params, logits, rows[name])
        check_logprobs(params, scores[name], logits[:params["vocab_limit"] or VOCABULARY])
        equal(scores[name]["token"], params["ids"][0], name)
    print(f"# {CASES} rows, {close} too close to call")
    check(close < CASES // 20, "too many are too close to call")


run_cases()
