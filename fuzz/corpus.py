#!/usr/bin/env python3
"""Packs a fuzz target's inputs into one readable file, and unpacks them for cargo-fuzz.

    fuzz/corpus.py unpack TARGET DIR   writes each input of corpus/TARGET.txt as a file of DIR
    fuzz/corpus.py pack TARGET DIR     adds the files of DIR; those named crash-* count as failures

A line is an input, in the escapes of a Rust byte string. A line that begins with `#` is a comment.
"""

import hashlib
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent / "corpus"
FAILED = "# Inputs that failed once."
KEPT = "# Inputs that reach code of their own (cargo fuzz cmin)."
PLAIN = {0x5C: r"\\", 0x0A: r"\n", 0x0D: r"\r", 0x09: r"\t"}


def escape(data):
    """The line of an input. What an editor could change at either end is written as a number."""
    parts = [PLAIN.get(byte) or (chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}") for byte in data]
    for end in (0, -1):
        if parts and parts[end] in " #":
            parts[end] = f"\\x{data[end]:02x}"
    return "".join(parts)


def unescape(line):
    """The input of a line."""
    back = {text: bytes([byte]) for byte, text in PLAIN.items()}
    tokens = re.findall(r"\\x[0-9a-f]{2}|\\.|.", line)
    return b"".join(back.get(t) or (bytes([int(t[2:], 16)]) if t[:2] == "\\x" else t.encode()) for t in tokens)


def read(target):
    """Lines that failed, and lines that are kept."""
    path = HERE / f"{target}.txt"
    failed, kept = [], []
    current = kept
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("#"):
            current = failed if line == FAILED else kept
        else:
            current.append(line)
    return failed, kept


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack"):
        sys.exit(__doc__)
    _, command, target, folder = sys.argv
    failed, kept = read(target)
    if command == "unpack":
        os.makedirs(folder, exist_ok=True)
        for line in failed + kept:
            data = unescape(line)
            pathlib.Path(folder, hashlib.sha1(data).hexdigest()).write_bytes(data)
        return
    for file in sorted(pathlib.Path(folder).iterdir()):
        line = escape(file.read_bytes())
        if line not in failed and line not in kept:
            (failed if file.name.startswith("crash-") else kept).append(line)
    lines = ([FAILED] + sorted(failed) if failed else []) + [KEPT] + sorted(set(kept) - set(failed))
    (HERE / f"{target}.txt").write_text("\n".join(lines) + "\n")


main()
