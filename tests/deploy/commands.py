"""Checks of what the documentation has readers type: each command of the quick start and of deploy/README.md is tried as
far as that goes without a cluster, each command of Tessera that a page names is there with its options, and each block of
values or configuration is what it says it is."""

import functools
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import yaml

import engine
from engine import CHART, ROOT, ChartError, objects
from registry import check

PAGES = ["docs/quick-start.md", "deploy/README.md"]
# Whose TOML configures the simulator.
OTHERS = {"simulator.md"}
# Begins as a command does and is none: what the shim's file has in it.
NO_COMMANDS = {"tessera page abi"}
TESSERA = os.environ.get("TESSERA", "tessera")


def blocks(page):
    """The fenced blocks of a page: language and text."""
    return re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", (ROOT / page).read_text())


def commands(text, prompt):
    """The commands of a block, each with what it reads from a here document; output is left out."""
    lines, found = iter(text.splitlines()), []
    for line in lines:
        if prompt and not line.startswith("$ "):
            continue
        line = line.removeprefix("$ ")
        while line.endswith("\\"):
            line = line[:-1] + next(lines).strip()
        stdin = None
        if here := re.search(r"<<'(\w+)'", line):
            stdin = "\n".join(iter(lambda: next(lines), here[1]))
            line = line.replace(here[0], "")
        if line.strip() and not line.startswith("#"):
            found.append((line, stdin))
    return found


def values_of(text):
    """A block of YAML, if it is values of the chart: their keys are known."""
    read = engine.load(text)
    known = engine.load((CHART / "values.yaml").read_text())
    if not isinstance(read, dict) or not set(read) & set(known):
        return None
    return read if all(isinstance(value, type(known[key])) for key, value in read.items() if key in known) else None


def put(values, assignment):
    """As --set does."""
    path, _, value = assignment.partition("=")
    *above, last = path.split(".")
    for key in above:
        values = values.setdefault(key, {})
    values[last] = engine.load(value)


def helm(words, files):
    """Renders what the command would install."""
    values, namespace, rest = {}, "default", []
    words = iter(words[1:])
    for word in words:
        if word in ("--namespace", "-n"):
            namespace = next(words)
        elif word in ("--set",):
            put(values, next(words))
        elif word == "-f":
            values |= files[next(words)]
        elif word in ("-s",):
            assert (CHART / next(words)).is_file()
        elif not word.startswith("-"):
            rest.append(word)
    assert rest[0] in ("install", "upgrade", "template", "uninstall"), rest
    if rest[0] != "uninstall":
        release, chart = rest[1:]
        assert (ROOT / chart).resolve() == CHART or chart.startswith("oci://"), chart
        objects(values, namespace=namespace, release=release)


def helped(words):
    """`tessera` has this command with these options."""
    names = []
    for word in words:
        if not re.fullmatch(r"[a-z][a-z-]*", word):
            break
        names.append(word)
    run = None
    while names:  # the last may be an argument
        run = subprocess.run([TESSERA, *names, "--help"], capture_output=True, text=True, check=False)
        if run.returncode == 0 and f"Usage: tessera {' '.join(names)}" in run.stdout:
            break
        names.pop()
    assert names, f"tessera has no {words}"
    for option in [word for word in words if word.startswith("--")]:
        assert option in run.stdout, f"tessera {' '.join(names)} has no {option}"


def made():
    """Names of what the chart makes, by kind, with and without the clean-up."""
    items = objects({}) + objects({"cleanup": {"enabled": True}})
    return {(item["kind"].lower(), item["metadata"]["name"]) for item in items} | {("namespace", "tessera")}


def kubectl(words, stdin):
    """The objects are there by these names; what runs in the plugin's pod is a command of ours."""
    if "--" in words:
        at = words.index("--")
        assert words[at + 1] == "tessera" or words[:2] == ["kubectl", "exec"], words
        if words[at + 1] == "tessera":
            helped(words[at + 2 :])
        words = words[:at]
    for word in words:
        if named := re.fullmatch(r"(daemonset|configmap|ds)/(\S+)", word):
            assert (named[1].replace("ds", "daemonset"), named[2]) in made(), word
        if re.fullmatch(r"[\w./-]+\.(yaml|toml)", word) and "/" in word:
            assert (ROOT / word).is_file(), word
    if "edit" in words:
        assert tuple(words[words.index("edit") + 1 :]) in made(), words
    if stdin:
        for document in engine.load_all(stdin):
            assert document["apiVersion"] and document["kind"] and document["metadata"]["name"]


def sed(words):
    """Runs it: the manifest's images are the reader's, every one."""
    out = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    images = re.findall(r"(?m)^\s*image: (.*)$", out)
    assert images and all(image.startswith("REGISTRY/") for image in images), images


def tried(line, stdin, files):
    for part in re.split(r" (?:\||&&) (?=[a-z])", line):
        words = shlex.split(re.sub(r"\$\([^)]*\)", "SUBSTITUTED", part), comments=True)
        if words[0] == "helm":
            helm(words, files)
        elif words[0] == "kubectl":
            kubectl(words, stdin)
        elif words[0] == "sed":
            sed(words)
        elif words[0] in ("docker", "buildah"):
            assert words[1] in ("build", "push", "bud"), words
            assert "-f" not in words or (ROOT / words[words.index("-f") + 1]).is_file(), words
        elif words[0] == "tessera":
            helped(words[1:])
        else:
            raise AssertionError(f"how is `{words[0]}` tried? Say so in tests/deploy/commands.py")


@check
def documented_commands_work():
    """As far as they can without a cluster."""
    count = 0
    for page in PAGES:
        files = {}
        for language, text in blocks(page):
            if language == "yaml" and (values := values_of(text)):
                files[text.splitlines()[0].lstrip("# ").strip()] = values
            if language not in ("console", "sh"):
                continue
            for line, stdin in commands(text, prompt=language == "console"):
                try:
                    tried(line, stdin, files)
                except (AssertionError, ChartError, KeyError, subprocess.CalledProcessError) as error:
                    raise AssertionError(f"{page}: {line}\n{error!r}") from error
                count += 1
    assert count > 20, count


@functools.cache
def usage(program, *names):
    """The help of a command, if there is that command."""
    with tempfile.TemporaryDirectory() as directory:
        link = Path(directory) / program.replace(" ", "-")
        link.symlink_to(Path(TESSERA).resolve())
        run = subprocess.run([link, *names, "--help"], capture_output=True, text=True, check=False)
    there = run.returncode == 0 and f"Usage: {' '.join([program, *names])}" in run.stdout
    return run.stdout if there else None


def named(page):
    """What a page says to type, in backquotes and in blocks."""
    text = page.read_text()
    for block in re.findall(r"(?ms)^```\w*\n(.*?)^```$", text):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ ") or not block.startswith("$ "))
    text = re.sub(r"(?ms)^```\w*\n(.*?)^```$", "", text)
    yield from re.findall(r"(?m)^ {4}(\S.*)$", text)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))


def is_there(line):
    """Whether `tessera`, or kubectl's plugin, knows the command of a line and its options; None: the line is another's."""
    if not (found := re.match(r"(?:target/(?:debug|release)/|.* -- )?(kubectl tessera|tessera) ([a-z-].*)", line)):
        return None
    program, words = found[1], re.split(r" (?:[|#&]|--(?= )|…| )|\)$", found[2])[0].split()
    names = []
    for word in words:
        name = word.split("|")[0]
        if not re.fullmatch(r"[a-z][a-z-]*", name) or usage(program, *names, name) is None:
            break
        names.append(name)
    assert names, f"{program} has no {words[0]}"
    text = usage(program, *names)
    rest = words[len(names) :]
    if "\nCommands:\n" in text and rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
        raise AssertionError(f"{program} {' '.join(names)} has no {rest[0]}")
    for option in re.findall(r"(?<=[ \[])--?[a-z][a-z-]*", " " + " ".join(rest)):
        assert re.search(rf"(?m)^\s.*(?<![\w-]){option}(?![\w-])", text), f"{program} {' '.join(names)} has no {option}"
    return True


@check
def documented_blocks_end():
    """A block is pasted whole: only its last command may go on until somebody ends it, and what needs a container comes
    after a wait for it."""
    endless = re.compile(r"\blogs\b.*\s(-f|--follow)\b|\btail\b.*\s-f\b|\bget\b.*\s(-w|--watch)\b|\bport-forward\b|\btessera (top|serve)\b")
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/README.md")]
    for page in pages:
        for language, text in blocks(page.relative_to(ROOT)):
            if language != "sh":
                continue
            lines = [line.partition(" #")[0].rstrip() for line, _ in commands(text, prompt=False)]
            for number, line in enumerate(lines):
                assert number == len(lines) - 1 or not endless.search(line) or line.endswith("&"), f"{page}: does not end: {line}"
                if made := re.match(r"kubectl logs .*\b(\w+)$", line):
                    before = "\n".join(lines[:number])
                    assert f"pod/{made[1]}" in before or "kubectl apply" not in before, f"{page}: not waited for: {line}"


@check
def named_commands_are_there():
    """With their options, on every page."""
    count, wrong = 0, []
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "deploy/README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        for line in set(named(page)) - NO_COMMANDS:
            try:
                count += is_there(line) is not None
            except AssertionError as error:
                wrong.append(f"{page.relative_to(ROOT)}: {line}: {error}")
    assert not wrong, "\n".join(wrong)
    assert count > 100, count


@check
def documented_values_and_configurations_are_accepted():
    """YAML for the chart is accepted by its schema and makes a configuration that the plugin accepts; so is TOML. In all
    of the documentation."""
    found = {"yaml": 0, "toml": 0}
    for page in sorted(ROOT.glob("docs/**/*.md")) + [ROOT / "deploy/README.md"]:
        for language, text in blocks(page.relative_to(ROOT)):
            try:
                if language == "yaml" and not re.search(r"(?m)^(kind|---)", text) and (values := values_of(text)):
                    for item in objects(values):
                        if item["kind"] == "ConfigMap" and "config.toml" in item["data"]:
                            accepted(item["data"]["config.toml"])
                elif language == "toml" and page.name not in OTHERS:
                    accepted(text)
                else:
                    continue
            except (AssertionError, ChartError, yaml.YAMLError) as error:
                raise AssertionError(f"{page.relative_to(ROOT)}: {error}\n{text}") from error
            found[language] += 1
    assert found["yaml"] > 1 and found["toml"], found


def accepted(text):
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        run = subprocess.run([TESSERA, "-c", file.name, "config", "check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
