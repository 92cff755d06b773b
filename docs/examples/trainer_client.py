"""What a trainer needs of a reply: the drawn ids, and for each the ids it was drawn from.

    python3 docs/examples/trainer_client.py http://127.0.0.1:30000 "Once upon a time"

packed() and tensors() ask for the same arrays in two forms; docs/trainer.md explains them. Standard
library and numpy only."""

import base64
import json
import sys
import urllib.request

import numpy as np

DTYPES = {"int32": "<i4", "float32": "<f4", "uint8": "u1", "I32": "<i4", "F32": "<f4", "U8": "u1"}


def post(url, body, accept="application/json"):
    headers = {"Content-Type": "application/json", "Accept": accept}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return reply.read()


def packed(url, body):
    """The reply, and its arrays from base64."""
    reply = json.loads(post(url, {**body, "sampling_mask_format": "packed"}))
    found = {name: np.frombuffer(base64.b64decode(a["data"]), DTYPES[a["dtype"]])
             for name, a in reply["meta_info"]["output_token_sampling_packed"].items()}
    ids = np.array(reply["output_ids"], np.int32)
    return reply, ids, found["lengths"], found["token_ids"], found["logprobs"]


def tensors(url, body):
    """The same from a safetensors file (n = 1; safetensors.numpy.load reads it too)."""
    data = post(url, body, "application/x-safetensors")
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    names = ("reply_json", "output_ids", "sampling_mask_lengths", "sampling_mask_token_ids",
             "sampling_logprobs")
    found = [np.frombuffer(data, DTYPES[header[name]["dtype"]], header[name]["shape"][0],
                           start + header[name]["data_offsets"][0]) for name in names]
    return json.loads(found[0].tobytes()), *found[1:]


def checked(ids, lengths, token_ids, logprobs):
    """Flat, with offsets: token t was drawn from token_ids[offsets[t]:offsets[t + 1]]."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    assert len(lengths) == len(ids) and offsets[-1] == len(token_ids) == len(logprobs)
    row = np.repeat(np.arange(len(ids)), lengths)
    is_drawn = token_ids == ids[row]
    assert (np.bincount(row, is_drawn) == 1).all(), "each token is in its row, once"
    assert np.allclose(np.bincount(row, np.exp(logprobs.astype(float))), 1, rtol=0, atol=1e-5)
    return {"ids": ids, "offsets": offsets, "token_ids": token_ids, "logprobs": logprobs,
            "selected": logprobs[is_drawn]}


def main(url, text):
    body = {"text": text, "return_sampling_mask": True, "sampling_logprobs_mode": "support",
            "sampling_params": {"max_new_tokens": 32, "top_k": 50, "top_p": 0.95, "sampling_seed": 1}}
    reply, *arrays = packed(url, body)
    sample, same = checked(*arrays), checked(*tensors(url, body)[1:])
    assert all(np.array_equal(sample[name], same[name]) for name in sample)
    print(f"{reply['text']!r}: {len(sample['ids'])} tokens drawn from {len(sample['token_ids'])}, "
          f"log-probability {sample['selected'].sum():.3f}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), sys.argv[2])
