"""Unmodified clients: curl and the openai package."""

import json
import socket
import subprocess

import openai

from harness import Cluster, case, check, check_rows, equal, run_cases, tiny_model

cluster = None


def curl(*arguments):
    return subprocess.run(["curl", "-sS", "--max-time", "60", *arguments], check=True,
                          capture_output=True, text=True).stdout


def client():
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=60)


MESSAGES = [{"role": "user", "content": "Say something."}]


@case
def curl_without_a_content_type():
    reply = json.loads(curl(cluster.url + "/generate", "-d",
                            '{"text":"a b c","sampling_params":{"max_new_tokens":3,"ignore_eos":true}}'))
    equal(reply["meta_info"]["completion_tokens"], 3)


@case
def curl_streams_line_by_line():
    lines = curl("-N", cluster.url + "/generate", "-d", '{"text":"a","stream":true,"sampling_params":'
                 '{"max_new_tokens":4,"ignore_eos":true}}').splitlines()
    data = [l for l in lines if l]
    equal(data[-1], "data: [DONE]")
    check(all(l.startswith("data: {") for l in data[:-1]), data)
    equal(json.loads(data[-2][6:])["meta_info"]["completion_tokens"], 4)


@case
def curl_expects_100_continue_and_sends_chunks():
    body = json.dumps({"text": "a " * 300, "sampling_params": {"max_new_tokens": 1}})
    for extra in (("-H", "Expect: 100-continue"), ("-H", "Transfer-Encoding: chunked")):
        equal(curl("-o", "/dev/null", "-w", "%{http_code}", *extra, cluster.url + "/generate", "-d", body),
              "200")


@case
def curl_keeps_the_connection():
    out = curl("-w", "%{num_connects} ", "-o", "/dev/null", "-o", "/dev/null", cluster.url + "/health",
               cluster.url + "/v1/models")
    equal(out.split(), ["1", "0"], "the second request reuses the connection")


@case
def openai_chat():
    reply = client().chat.completions.create(model="any", messages=MESSAGES, max_tokens=5, seed=1,
                                             extra_body={"ignore_eos": True})
    equal(reply.usage.completion_tokens, 5)
    equal(reply.choices[0].finish_reason, "length")
    chunks = list(client().chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=5, seed=1, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    equal(text, reply.choices[0].message.content)
    equal(chunks[-1].usage.completion_tokens, 5)


@case
def openai_choices():
    fields = dict(model="any", messages=MESSAGES, max_tokens=6, seed=3, temperature=1.0,
                  extra_body={"ignore_eos": True})
    one = client().chat.completions.create(**fields)
    three = client().chat.completions.create(n=3, **fields)
    equal([c.index for c in three.choices], [0, 1, 2])
    equal(three.choices[0].message.content, one.choices[0].message.content)
    equal(three.usage.completion_tokens, 18)
    equal(three.usage.prompt_tokens, one.usage.prompt_tokens)
    texts = {0: "", 1: "", 2: ""}
    reasons = {}
    for chunk in client().chat.completions.create(n=3, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    equal(texts, {c.index: c.message.content for c in three.choices})
    equal(reasons, {c.index: c.finish_reason for c in three.choices})


@case
def openai_top_logprobs_and_biases():
    fields = dict(model="any", messages=MESSAGES, max_tokens=4, temperature=1.0, seed=3, logprobs=True,
                  top_logprobs=5, extra_body={"ignore_eos": True})
    reply = client().chat.completions.create(**fields)
    content = reply.choices[0].logprobs.content
    equal(len(content), 4)
    for token in content:
        equal(len(token.top_logprobs), 5)
        values = [top.logprob for top in token.top_logprobs]
        equal(values, sorted(values, reverse=True))
        check(token.logprob <= values[0], "a token above the largest")
        if token.logprob >= values[-1]:
            check((token.bytes, token.logprob) in [(t.bytes, t.logprob) for t in token.top_logprobs],
                  "the drawn token is among the largest")
    streamed = []
    for chunk in client().chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    equal([t.model_dump() for t in streamed], [t.model_dump() for t in content])
    forced = client().chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=4, temperature=1.0, logit_bias={"77": 100},
        frequency_penalty=0.0, presence_penalty=0.0, extra_body={"ignore_eos": True})
    equal(forced.choices[0].message.content, chr(77) * 4)


@case
def openai_errors_are_its_own_exceptions():
    try:
        client().chat.completions.create(model="any", messages=MESSAGES, temperature=-1)
        raise AssertionError("temperature -1 was accepted")
    except openai.BadRequestError as error:
        check("temperature" in str(error), str(error))


@case
def openai_models_and_leaving_a_stream():
    check(client().models.list().data[0].id, "no model id")
    for n in (1, 4):
        stream = client().chat.completions.create(model="any", messages=MESSAGES, max_tokens=300, n=n,
                                                  stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        cluster.wait_at_rest()


@case
def openai_reads_masks_from_extra_fields():
    reply = client().chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=3, temperature=1.0,
        extra_body={"top_k": 5, "return_sampling_mask": True, "return_meta_info": True,
                    "return_token_ids": True, "ignore_eos": True})
    choice = reply.choices[0].model_dump()
    equal(len(choice["meta_info"]["output_token_sampling_mask"]), 3)
    equal(len(choice["response_token_ids"]), 3)


def mask_fields(**extra):
    return {"top_k": 5, "return_sampling_mask": True, "sampling_logprobs_mode": "support",
            "return_meta_info": True, "return_token_ids": True, "ignore_eos": True, **extra}


def take_choice(whole, choice):
    """Adds what a chunk says of a choice, read from the package's extra fields."""
    more = choice.model_dump()
    whole["ids"] += more.get("response_token_ids") or []
    meta = more.get("meta_info") or {}
    whole["rows"] += meta.get("output_token_sampling_mask", [])
    whole["values"] += meta.get("output_token_sampling_logprobs", [])
    if meta:
        whole["length"] = meta["output_token_sampling_mask_length"]
    whole["reason"] = choice.finish_reason


def empty_choice():
    return {"text": "", "ids": [], "rows": [], "values": [], "length": None, "reason": None}


@case
def openai_streams_masks_of_a_chat():
    fields = dict(model="any", messages=MESSAGES, max_tokens=7, temperature=1.0, seed=4, n=2,
                  extra_body=mask_fields())
    reply = client().chat.completions.create(**fields)
    told = {0: empty_choice(), 1: empty_choice()}
    for chunk in client().chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            told[choice.index]["text"] += choice.delta.content or ""
            take_choice(told[choice.index], choice)
    for choice in reply.choices:
        whole = choice.model_dump()
        equal(told[choice.index], {
            "text": choice.message.content, "ids": whole["response_token_ids"],
            "rows": whole["meta_info"]["output_token_sampling_mask"],
            "values": whole["meta_info"]["output_token_sampling_logprobs"], "length": 7, "reason": "length"})


@case
def openai_completions():
    fields = dict(model="any", prompt=["Say something.", "And more"], max_tokens=6, temperature=1.0, seed=2, n=2,
                  logprobs=3, extra_body=mask_fields())
    reply = client().completions.create(**fields)
    equal([c.index for c in reply.choices], [0, 1, 2, 3])
    equal(reply.object, "text_completion")
    equal(reply.usage.completion_tokens, 24)
    told = {i: {**empty_choice(), "tokens": [], "offsets": []} for i in range(4)}
    chunks = list(client().completions.create(stream=True, stream_options={"include_usage": True}, **fields))
    for chunk in chunks:
        for choice in chunk.choices:
            whole = told[choice.index]
            whole["text"] += choice.text
            whole["tokens"] += choice.logprobs.tokens
            whole["offsets"] += choice.logprobs.text_offset
            take_choice(whole, choice)
    equal(chunks[-1].usage.completion_tokens, 24)
    for choice in reply.choices:
        whole = choice.model_dump()
        equal(len(choice.logprobs.top_logprobs), 6)
        for value, name, tops in zip(choice.logprobs.token_logprobs, choice.logprobs.tokens,
                                     choice.logprobs.top_logprobs):
            equal(tops[name], value)
            check(3 <= len(tops) <= 4 and max(tops.values()) >= value, tops)
        equal(told[choice.index], {
            "text": choice.text, "ids": whole["response_token_ids"],
            "rows": whole["meta_info"]["output_token_sampling_mask"],
            "values": whole["meta_info"]["output_token_sampling_logprobs"], "length": 6, "reason": "length",
            "tokens": choice.logprobs.tokens, "offsets": choice.logprobs.text_offset})


@case
def openai_scores_a_prompt():
    reply = client().completions.create(model="any", prompt=[5, 9, 33, 70], max_tokens=0, echo=True, logprobs=1)
    logprobs = reply.choices[0].logprobs
    equal(logprobs.token_logprobs[0], None)
    check(all(x <= 0 for x in logprobs.token_logprobs[1:]) and len(logprobs.tokens) == 4, logprobs)
    equal(reply.usage.completion_tokens, 0)


@case
def openai_completions_have_its_errors():
    for fields, word in (({"prompt": "a", "best_of": 4}, "best_of"), ({"prompt": [[1], [-1]]}, "[1]: prompt[0]"),
                         ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a" * 100000}, "context length")):
        for stream in (False, True):
            try:
                client().completions.create(model="any", stream=stream, **fields)
                raise AssertionError(f"{fields} was accepted")
            except openai.BadRequestError as error:
                check(word in str(error), str(error))


IDS = [5, 9, 33, 70, 12, 8, 41]


@case
def trainers():
    """Bodies as trainers send them, and what they read of the answer."""
    def ask(**fields):
        reply = cluster.generate(input_ids=IDS, **fields)
        equal(reply.status, 200, reply.body[:300])
        meta = reply.json["meta_info"]
        if fields.get("return_logprob"):
            equal([x[1] for x in meta["output_token_logprobs"]], reply.json["output_ids"])
            equal(len(meta["output_token_logprobs"]), meta["completion_tokens"])
        check(meta["finish_reason"]["type"] in ("length", "stop"), meta["finish_reason"])
        return reply.json
    rollout = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16, "stop": None,
               "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
               "spaces_between_special_tokens": False}
    equal(ask(return_logprob=True, sampling_params=rollout)["meta_info"]["weight_version"], "default")
    masked = ask(rid="0f", extra_key="a", lora_path=None, return_logprob=True, return_sampling_mask=True,
                 sampling_logprobs_mode="support", return_outputs_via_store=False,
                 sampling_params={**rollout, "top_p": 0.97, "top_k": 50})
    check_rows(masked["meta_info"], masked["output_ids"], "support")
    for row, values, (full, token, _) in zip(masked["meta_info"]["output_token_sampling_mask"],
                                             masked["meta_info"]["output_token_sampling_logprobs"],
                                             masked["meta_info"]["output_token_logprobs"]):
        check(full <= values[row.index(token)] <= 0, "selected below the vocabulary's, or above 0")
    ask(image_data=None, stream=False, return_logprob=True,
        sampling_params={"temperature": 0.0, "top_k": 100000000, "max_new_tokens": 4, "stop_token_ids": [1, None],
                         "frequency_penalty": 0.0})
    stored = cluster.generate(input_ids=IDS, return_outputs_via_store=True, return_sampling_mask=True)
    equal(stored.status, 400)
    check("return_outputs_via_store" in stored.json["error"]["message"], stored.body)
    info = cluster.get("/server_info").json
    equal((info["sampling_mask_max_tokens"], info["speculative_algorithm"]), (4096, None))


def until_closed(data):
    with socket.create_connection((cluster.host, cluster.port), timeout=60) as s:
        s.sendall(data)
        answer = b""
        while chunk := s.recv(65536):
            answer += chunk
    return answer


def over_http(version, fields, extra=""):
    body = json.dumps({"input_ids": IDS, "return_sampling_mask": True, "sampling_logprobs_mode": "support",
                       "sampling_params": {"max_new_tokens": 6, "top_k": 8, "sampling_seed": 3, "ignore_eos": True},
                       **fields}).encode()
    return f"POST /generate HTTP/{version}\r\nHost: a\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


def rows_of(text):
    meta = json.loads(text)["meta_info"]
    return meta.get("output_token_sampling_packed") or meta["output_token_sampling_mask"]


@case
def masks_over_any_http():
    """HTTP/1.0 has no chunks: a stream ends with its connection. Pipelined requests are answered in order."""
    expected = {form: rows_of(cluster.request("POST", "/generate", over_http(
        "1.1", {"sampling_mask_format": form}).split(b"\r\n\r\n", 1)[1]).body) for form in ("json", "packed")}
    for form in expected:
        for stream in (False, True):
            head, body = until_closed(over_http("1.0", {"sampling_mask_format": form, "stream": stream})).split(
                b"\r\n\r\n", 1)
            check(b"chunked" not in head and b"Connection: close" in head, head)
            if stream:
                check(body.endswith(b"\n\ndata: [DONE]\n\n"), body[-100:])
                body = body.split(b"\n\n")[-3].removeprefix(b"data: ")
            equal(rows_of(body), expected[form], f"{form}, stream {stream}")
    forms = ["json", "packed", "json", "packed"]
    asked = [over_http("1.1", {"sampling_mask_format": f, "rid": f"p{i}"},
                       "Connection: close\r\n" if i == 3 else "") for i, f in enumerate(forms)]
    answers = until_closed(b"".join(asked)).split(b"HTTP/1.1 200 OK\r\n")[1:]
    bodies = [answer.split(b"\r\n\r\n", 1)[1] for answer in answers]
    equal([json.loads(body)["meta_info"]["id"] for body in bodies], ["p0", "p1", "p2", "p3"])
    equal([rows_of(body) for body in bodies], [expected[f] for f in forms])


if __name__ == "__main__":
    with Cluster(tiny_model()) as cluster:
        try:
            run_cases()
        except SystemExit as end:
            status = end.code
    raise SystemExit(status)
