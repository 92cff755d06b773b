"""The mask pipeline of a Python server, re-created so that its cost can be measured in the same run on the same machine:
growing numpy arrays for each request, chunks pickled (protocol 5) as read-only buffers over Unix sockets through a second
process to a third, lists built there, the final reply printed by orjson. `--arrays` hands arrays to orjson instead of
lists, the best this shape can do.

    peer_pipeline.py --width N [--batch 256] [--steps 50] [--rounds 3] [--arrays]

Prints lines as bench_rows does: stage, width, bytes, wall and CPU nanoseconds of one emission; medians."""

import argparse
import multiprocessing
import pickle
import socket
import statistics
import struct
import time

import numpy
import orjson

VOCABULARY = 151936
HEAD = struct.Struct("<I")


class Rows:
    """The mask rows of one request: arrays that grow by doubling and are used again after an emission."""

    def __init__(self):
        self.ids = numpy.empty(0, numpy.int32)
        self.logprobs = numpy.empty(0, numpy.float32)
        self.lengths = []
        self.used = 0

    def append(self, ids, logprobs):
        count = len(ids)
        if self.used + count > len(self.ids):
            capacity = max(2 * len(self.ids), self.used + count)
            for name in ("ids", "logprobs"):
                old = getattr(self, name)
                grown = numpy.empty(capacity, old.dtype)
                grown[: self.used] = old[: self.used]
                setattr(self, name, grown)
        self.ids[self.used : self.used + count] = ids
        self.logprobs[self.used : self.used + count] = logprobs
        self.lengths.append(count)
        self.used += count

    def take(self):
        chunk = (numpy.array(self.lengths, numpy.int32), self.ids[: self.used], self.logprobs[: self.used])
        self.lengths = []
        self.used = 0
        return chunk


def send(connection, message):
    """The pickle, then its buffers, none of them copied here."""
    buffers = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [body, *(buffer.raw() for buffer in buffers)]
    connection.sendall(HEAD.pack(len(parts)) + b"".join(HEAD.pack(len(part)) for part in parts))
    for part in parts:
        connection.sendall(part)
    return sum(len(part) for part in parts)


def receive_exactly(connection, count):
    block = bytearray(count)
    view = memoryview(block)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return block


def receive(connection):
    head = receive_exactly(connection, HEAD.size)
    if head is None:
        return None
    (count,) = HEAD.unpack(head)
    sizes = struct.unpack(f"<{count}I", receive_exactly(connection, count * HEAD.size))
    parts = [receive_exactly(connection, size) for size in sizes]
    return pickle.loads(parts[0], buffers=parts[1:])


def timed(figures, stage, work, *arguments):
    wall, cpu = time.monotonic(), time.process_time()
    result = work(*arguments)
    figures.setdefault(stage, []).append((time.monotonic() - wall, time.process_time() - cpu))
    return result


def detokenizer(source, target, figures_to):
    """Has nothing to do with the rows, and receives and sends them all the same."""
    figures = {}

    def pass_on():
        message = receive(source)
        if message is not None:
            send(target, message)
        return message

    while timed(figures, "detokenizer", pass_on) is not None:
        pass
    target.close()
    figures["detokenizer"].pop()
    figures_to.send(figures)


def lists_of(lengths, values):
    flat = values.tolist()
    rows, at = [], 0
    for length in lengths:
        rows.append(flat[at : at + length])
        at += length
    return rows


def arrays_of(lengths, values):
    return numpy.split(values, numpy.cumsum(lengths)[:-1])


def manager(source, uses_arrays, figures_to):
    figures = {}
    rows_of = arrays_of if uses_arrays else lists_of

    def build(chunks):
        replies = []
        for lengths, ids, logprobs in chunks:
            # Floats are printed as the doubles they widen to.
            values = logprobs.astype(numpy.float64) if uses_arrays else logprobs
            replies.append({"mask": rows_of(lengths.tolist(), ids), "logprobs": rows_of(lengths.tolist(), values)})
        return replies

    def dump(replies):
        option = orjson.OPT_SERIALIZE_NUMPY if uses_arrays else 0
        return sum(len(orjson.dumps(reply, option=option)) for reply in replies)

    text_bytes = 0
    while True:
        chunks = timed(figures, "manager_receive", receive, source)
        if chunks is None:
            break
        replies = timed(figures, "manager_build", build, chunks)
        text_bytes = timed(figures, "json", dump, replies)
        del chunks, replies
    figures["manager_receive"].pop()
    figures_to.send((figures, text_bytes))


def scheduler(options, target):
    random = numpy.random.default_rng(1)
    ids = random.integers(0, VOCABULARY, (options.batch, options.width), dtype=numpy.int32)
    logprobs = -random.exponential(4.0, (options.batch, options.width)).astype(numpy.float32) - 4
    requests = [Rows() for _ in range(options.batch)]
    figures, sent = {}, 0

    def step():
        for request, row_ids, row_logprobs in zip(requests, ids, logprobs):
            request.append(row_ids, row_logprobs)

    def emit():
        return send(target, [request.take() for request in requests])

    for _ in range(options.rounds + 1):  # the first one warms
        for _ in range(options.steps):
            timed(figures, "step", step)
        sent = timed(figures, "scheduler", emit)
    return figures, sent


def medians(figures, stage, times=1):
    values = figures[stage][times:]
    return [statistics.median(pair[kind] for pair in values) * times * 1e9 for kind in (0, 1)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arrays", action="store_true")
    options = parser.parse_args()
    first, second = socket.socketpair(), socket.socketpair()
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    context = multiprocessing.get_context("fork")
    ends = [first[0], first[1], second[0], second[1]]

    def start(work, kept, *arguments):
        def run():
            for end in ends:
                if end not in kept:
                    end.close()
            work(*arguments)

        process = context.Process(target=run)
        process.start()
        return process

    children = [
        start(detokenizer, (first[1], second[0]), first[1], second[0], pipes[0][1]),
        start(manager, (second[1],), second[1], options.arrays, pipes[1][1]),
    ]
    for end in ends[1:]:
        end.close()
    figures, sent = scheduler(options, first[0])
    first[0].close()
    detokenizer_figures = pipes[0][0].recv()
    manager_figures, text_bytes = pipes[1][0].recv()
    for child in children:
        child.join()
    figures.update(detokenizer_figures)
    figures.update(manager_figures)
    name = "peer_arrays" if options.arrays else "peer"
    lines = [("append", sent, medians(figures, "step", options.steps))]
    lines += [(stage, sent, medians(figures, stage)) for stage in ("scheduler", "detokenizer", "manager_receive", "manager_build")]
    lines.append(("json", text_bytes, medians(figures, "json")))
    for stage, count, (wall, cpu) in lines:
        print(f"{name}_{stage}\t{options.width}\t{count}\t{wall:.0f}\t{cpu:.0f}")


if __name__ == "__main__":
    main()
