"""The prose check: pages, docstrings and comments are plain English, and the subject of a commit is an order.

`python tools/prose.py` lists the exceptions. Each rule is one that readers stumbled over. A page's code and tables
are left out. `python tools/prose.py --draw 60 --seed 7` prints that many sentences to be read by a person, as many
of each kind: pages, studies, docstrings, comments, what command and dashboard say.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("collage_monitor", "agent", "server", "dashboard", "studies", "tools", "benchmarks")
MOST_WORDS, MOST_FIRST_WORDS = 45, 35
PHRASES = {
    r"bit for bit what": "bit-identical",
    r"for want of": "without, or: not yet, because",
    r"\bnone else\b": "and no other",
    r"\band else\b": "or else, otherwise",
    r"\bwhosoever\b|\bfor whoever\b": "for any caller",
    r"\bno more than that\b": "only",
    r"\bNothing of it\b": "no …",
    r"\bnothing speaks against\b": "no problem was found",
    r"\b[Tt]he way of an?\b": "how … flows",
    r"\bis told (?:so|in)\b": "is reported",
    r"\bsaid then\b": "at the time",
    r"\bas often as that may\b": "as often as …",
    r"\bin as many words\b": "explicitly",
    r"\bwhat stands left of\b": "left of",
    r"\bdoes not mean that it\b": "not every",
    r"\bMeant for (?:it|this) is\b": "use … for this",
    r"\bby pages of any name\b": "any web page",
    r"\bwhat it took for\b": "what it had counted as",
    r"(?:^|[.!?] )Of (?:an?|the|each|all|some|many|more|one|two|several|what|those|these)\b": "the subject first",
    r"\b[Ww]hat (?:is|was|are|were) (?:asked|told|said|kept|known|stored) of\b": "a noun, as: the facts",
    r"\b[Ww]hat (?:became|becomes|came) of\b": "the outcome, the results",
    r"\b[Aa]ll that is (?:asked|told|said|kept|known|stored) of\b": "all data of …",
    r"\banew\b": "again",
}
"""What readers stumble over, and what to write instead."""
MOST_SUBJECT_CHARACTERS = 72
LAST_FREE_COMMIT = "c37266a89443a0b2ab04ff9d4e2c694b0fefa6d5"
"""Commits up to this one keep their subjects."""
_NO_ORDER = re.compile(
    r"(?:an?|all|and|each|for|from|in|it|its|more|no|of|on|one|our|some|that|the|this|to|what|when|where|who)\b"
    r"|(?!(?:embed|feed|focus|need|seed|speed|bring|ping)\b)\w+(?:ed|ing|[^s]s)\b",
    re.IGNORECASE,
)
"""What a subject that gives no order begins with."""
_AREA = re.compile(r"^[\w -]{1,30}: ")
_FOR_TOOLS = re.compile(r"#(?:!| (?:noqa|type|mypy|ruff|fmt)\b)")
_FENCE = re.compile(r"^ *```.*?^ *```\s*$", re.DOTALL | re.MULTILINE)
_BLOCKED = re.compile(r"^(?:\|[ :-]|#|<|!\[|    |[├└│]|\S.*\S {3,}\S)")
_MARK = re.compile(r"^(?:[-*] |\d+\. )")
_ENTRY = re.compile(r"^[\w, ]{1,60}: ")
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
_ENDS = (".", "!", "?", ":", ")")
"""A line that does not end so goes on in the next one, whatever that begins with."""
_END = re.compile(r"(?<=[.!?])[\"')*”]*\s+")


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph and entry of a list; code, tables and headings are left out."""
    text = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), page)
    begun, words = 0, [""]
    for number, line in enumerate([*text.splitlines(), ""], 1):
        entry = _ENTRY.match(line.strip()) and words[-1].endswith(_ENDS)
        new = not line.strip() or _BLOCKED.match(line) or _MARK.match(line.strip()) or entry
        if new and words != [""]:
            yield begun, " ".join(words)
            words = [""]
        if line.strip() and not _BLOCKED.match(line):
            begun = number if words == [""] else begun
            words = [*(word for word in words if word), _MARK.sub("", line.strip())]


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; text in backticks or brackets counts as one word."""
    plain = re.sub(r"`[^`]*`", "`code`", _LINK.sub(r"\1", text))
    return [sentence for sentence in _END.split(re.sub(r"\([^()]*\)", "", plain)) if sentence.strip()]


def faults(text: str) -> Iterator[str]:
    """The faults of a paragraph that make it hard to read."""
    for pattern, better in PHRASES.items():
        if found := re.search(pattern, text):
            yield f"{found[0]!r}; better: {better}"
    for sentence in sentences(text):
        count = len(sentence.split())
        if count > MOST_WORDS:
            yield f"a sentence of {count} words: {sentence.strip()[:60]} …"


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """Line and fault of each paragraph of a page; its first sentence must be short."""
    for place, (line, paragraph) in enumerate(paragraphs(text)):
        yield from ((line, fault) for fault in faults(paragraph))
        first = next(iter(sentences(paragraph)), "")
        if not place and len(first.split()) > MOST_FIRST_WORDS:
            yield line, f"a page begins with {len(first.split())} words in one sentence"


def of_module(source: str) -> Iterator[tuple[int, str]]:
    """Line and fault of each comment and docstring; a docstring of one or two words says no more than the name."""
    for line, text in comments(source):
        yield from ((line, fault) for fault in faults(text))
    for line, text in docstrings(source):
        yield from ((line, fault) for fault in faults(text))
        if len(text.split()) < 3 and text[:1].isupper() and text.endswith("."):
            yield line, f"{text!r} says no more than the name"


def of_subject(subject: str) -> Iterator[str]:
    """The faults of a commit's first line."""
    if len(subject) > MOST_SUBJECT_CHARACTERS:
        yield f"{len(subject)} characters: {subject!r}"
    if _NO_ORDER.match(_AREA.sub("", subject)):
        yield f"begin with what to do: {subject!r}"


def drawn(count: int, seed: int) -> list[str]:
    """Sentences of each kind in turn, each with its file; those of fewer than four words are left out."""
    random.seed(seed)
    studies = [page for page in _pages() if "studies" in page.parts]
    pages = [page for page in _pages() if "studies" not in page.parts and "api" not in page.parts]
    told = [path for path in _modules() if "command" in path.parts or "collage_dashboard" in path.parts]
    kinds = [
        [(page, text) for page in pages for _, text in paragraphs(page.read_text())],
        [(page, text) for page in studies for _, text in paragraphs(page.read_text())],
        [(path, text) for path in _modules() for _, text in docstrings(path.read_text())],
        [(path, text) for path in _modules() for _, text in comments(path.read_text())],
        [(path, text) for path in told for text in strings(path.read_text())],
    ]
    found = [
        [
            f"{path.relative_to(ROOT)}: {line}"
            for path, text in kind
            for line in _END.split(text)
            if line.count(" ") > 2
        ]
        for kind in kinds
    ]
    return [random.choice(found[place % len(found)]) for place in range(count)]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph of a module's docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for _, text in paragraphs(ast.get_docstring(node) or ""):
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph of a module's comments; those for tools are left out."""
    alone = [""] * source.count("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _FOR_TOOLS.match(token.string):
            line, text = token.start[0], token.string.lstrip("#").removeprefix(" ")
            if token.line.lstrip().startswith("#"):
                alone[line - 1] = text
            else:
                yield line, text
    yield from paragraphs("\n".join(alone))


def strings(source: str) -> Iterator[str]:
    """The texts of a module for people: its strings that are sentences, without docstrings."""
    tree = ast.parse(source)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        said = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
        if isinstance(said, str) and re.match(r"[A-Z].*\.\s*$", said, re.DOTALL):
            yield " ".join(said.split())


def subjects() -> list[str]:
    """Id and subject of each commit that is checked; none without their history, as in a shallow clone."""
    asked = ["git", "log", "--no-merges", "--format=%h %s", f"{LAST_FREE_COMMIT}..HEAD"]
    try:
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return []


def _pages() -> list[Path]:
    patterns = ("docs/**/*.md", "agent/*.md", "server/*.md", "*.md")
    return [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]


def _modules() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def main(arguments: list[str]) -> int:
    """Print every fault, 1 if there is one; or the sentences that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.draw:
        print(*drawn(options.draw, options.seed), sep="\n")
        return 0
    found = [(page, *fault) for page in _pages() for fault in of_page(page.read_text())]
    found += [(module, *fault) for module in _modules() for fault in of_module(module.read_text())]
    for path, line, fault in found:
        print(f"{path.relative_to(ROOT)}:{line}: {fault}")
    commits = [entry.partition(" ") for entry in subjects()]
    wrong = [f"commit {name}: {fault}" for name, _, subject in commits for fault in of_subject(subject)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(found or wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
