"""The part of tests/bench/run that is not about building; see there."""

import argparse
import os
import re
import subprocess
import sys

import measure
import report

PARTS = ("prompts", "generation", "capture", "contended")


def numbers(text):
    return [int(part) for part in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(prog="tests/bench/run")
    parser.add_argument("--binary", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--folder", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--demo", default="", help=argparse.SUPPRESS)
    parser.add_argument("--command", default="tests/bench/run", help=argparse.SUPPRESS)
    parser.add_argument("--models", default="smollm2-bf16,qwen3-bf16,smollm2-q8_0,qwen3-q8_0", help="names of make_models.py, or NAME=FILE")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER", help="a build of llama.cpp")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", default="", help="instruction set: portable, avx2, avx512")
    parser.add_argument("--prompts", type=numbers, default=[512, 4096])
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens before the generated ones")
    parser.add_argument("--ceiling-mib", type=int, default=512, help=argparse.SUPPRESS)
    parser.add_argument("--busy-core", type=int, default=0)
    parser.add_argument("--markdown", default="", metavar="FILE", help="write the page there, not to standard output")
    return parser.parse_args()


def without_paths(command):
    """The command as others would type it: folders of this machine do not belong on the page."""
    command = re.sub(r" --markdown[ =]\S+", "", command)
    return re.sub(r"=\S*/\S*", "=FOLDER", command)


def find_models(options):
    models, made = {}, []
    for text in options.models.split(","):
        name, _, path = text.partition("=")
        if not path:
            made.append(name)
        models[name] = path or os.path.join(options.folder, name + ".gguf")
    missing = [name for name in made if not os.path.exists(models[name])]
    if missing:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "make_models.py")
        subprocess.run([sys.executable, script, options.folder, options.demo, *missing], check=True)
    return models


def main():
    options = parse()
    options.command = without_paths(options.command)
    options.parts = options.parts.split(",")
    for part in options.parts:
        if part not in PARTS:
            sys.exit(f"no part '{part}': one of {', '.join(PARTS)}")
    for batch in options.batches:
        measure.STEPS.setdefault(batch, 8)
    options.peers = dict(text.split("=", 1) if "=" in text else ("llama.cpp", text) for text in options.peer)
    options.models = find_models(options)
    page = report.make_page(measure.measure(options), options)
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(page)
    else:
        print(page, end="")


main()
