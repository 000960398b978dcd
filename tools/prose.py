"""The prose check: pages and docstrings are plain English. `python tools/prose.py` lists the exceptions.

Each rule is one that readers stumbled over. A page's code and tables are left out. `python tools/prose.py --draw 60
--seed 7` prints that many sentences to be read by a person, as many of each kind: pages, studies, docstrings, what
command and dashboard say.
"""

import argparse
import ast
import random
import re
import sys
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
    """Line and fault of each docstring; one or two words say no more than the name."""
    for line, text in docstrings(source):
        yield from ((line, fault) for fault in faults(text))
        if len(text.split()) < 3 and text[:1].isupper() and text.endswith("."):
            yield line, f"{text!r} says no more than the name"


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


def strings(source: str) -> Iterator[str]:
    """The texts of a module for people: its strings that are sentences, without docstrings."""
    tree = ast.parse(source)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        said = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
        if isinstance(said, str) and re.match(r"[A-Z].*\.\s*$", said, re.DOTALL):
            yield " ".join(said.split())


def _pages() -> list[Path]:
    return [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


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
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
