"""No page is longer than people read at once; the prose check finds what readers stumbled over, and no more."""

import pytest

from tests.docs.blocks import DOCS
from tools import prose
from tools.prose import MOST_FIRST_WORDS, MOST_WORDS, comments, drawn, faults, main, paragraphs
from tools.sizes import BUDGETS, GENERATED, HELD_TABLES, against_budgets, page_words

LONG = " ".join(["word"] * (MOST_WORDS + 1)) + "."


@pytest.mark.parametrize(
    "text",
    [
        "They stay bit for bit what they are without it.",
        "It has not been run for want of a device.",
        "The same for whoever asks.",
        "Meant for it is PostgreSQL.",
        "Nothing of it needs an option.",
        "The best of those that nothing speaks against.",
        "It leads there, by pages of any name too.",
        "Of each project that was published its runs and its table.",
        "What is said of a run: its verdict.",
        "What was known of the watch.",
        "What became of one report.",
        "All that is stored of a run.",
        "It is made anew at each step.",
        LONG,
    ],
)
def test_what_is_hard_is_found(text):
    assert list(faults(text))


@pytest.mark.parametrize(
    "text",
    [
        "The gap does not appear in every setting.",
        "They are bit-identical with and without it.",
        "Use PostgreSQL for this. No options are needed.",
        "The runs and the table of each published project. Of course it says what is missing.",
        f"A long list in brackets ({'word ' * 60}) is skipped by the eye.",
        f"{'word ' * 30}ends. {'Word ' * 30}ends.",
    ],
)
def test_what_is_plain_is_left_alone(text):
    assert not list(faults(text))


def test_a_page_begins_with_a_short_sentence_and_a_docstring_says_more_than_the_name():
    first = f"# Title\n\n{'word ' * (MOST_FIRST_WORDS + 1)}ends.\n"
    assert [line for line, _ in prose.of_page(first)] == [3]
    assert not list(prose.of_page("# Title\n\nShort. " + first.partition("\n\n")[2]))
    assert list(prose.of_module('def run():\n    """A run."""\n'))
    assert not list(prose.of_module('def run():\n    """The run that nobody has ended."""\n'))


def test_code_tables_and_entries_are_told_apart():
    assert not list(prose.of_page(f"Short.\n\n```sh\n{LONG}\n```\n\n| {LONG} |\n\n    {LONG}\n"))
    halves = f"- {'word ' * 30}\n- {'word ' * 30}\n"
    assert not list(prose.of_page(f"Short.\n\n{halves}"))
    assert [line for line, _ in prose.of_page(f"Short.\n\n{halves}- {LONG}\n")] == [5]


@pytest.mark.parametrize(
    ("subject", "found"),
    [
        ("Keep a run stale when only its description is edited", 0),
        ("Demo: compute products in fp32 on a CPU", 0),
        ("Process embedded fields, need nothing", 0),
        ("Need no seed", 0),
        ("x" * 72, 0),
        ("x" * 73, 1),
        ("README: the demo's minutes", 1),
        ("Added a test", 1),
        ("Keeps a run stale", 1),
        ("Sealing: adding levels", 1),
        ("Of a chunk " + "x" * 72, 2),
    ],
)
def test_the_subject_of_a_commit_is_short_and_says_what_to_do(subject, found):
    assert len(list(prose.of_subject(subject))) == found


@pytest.mark.slow
def test_what_is_written_passes_and_a_seed_draws_the_same_sentences_of_every_kind(monkeypatch, capsys):
    """Of all pages and of one folder's modules: `make check` looks into every module."""
    monkeypatch.setattr(prose, "FOLDERS", ("collage_monitor/command",))
    monkeypatch.setattr(prose, "subjects", list)
    assert main([]) == 0, capsys.readouterr().out
    monkeypatch.setattr(prose, "subjects", lambda: ["1234abc Fixed it"])
    assert main([]) == 1
    assert "commit 1234abc: begin with what to do" in capsys.readouterr().out
    found = drawn(8, seed=3)
    assert found == drawn(8, seed=3) != drawn(8, seed=4)
    assert found[1].startswith("docs/studies/")
    assert ".py: " in found[2]
    texts = [" ".join(text.split()) for path in prose._modules() for _, text in comments(path.read_text())]
    assert any(found[3].partition(".py: ")[2] in text for text in texts)


def test_a_sentence_is_not_torn_where_its_line_ends():
    """A wrapped line that began with a few words and a colon was read as an entry of its own, without them."""
    page = "Servers are killed with\nSIGKILL: at any moment.\nNext one.\nstep: of the alert.\n"
    whole = ["Servers are killed with SIGKILL: at any moment. Next one.", "step: of the alert."]
    assert [text for _, text in paragraphs(page)] == whole
    assert [text for _, text in paragraphs("- one: two\n- three\n1. four")] == ["one: two", "three", "four"]


MOST_WORDS_A_PAGE = 1500
LENGTHS = {page: words for page, words in page_words().items() if page.startswith("docs/")}


@pytest.mark.parametrize("page", LENGTHS)
def test_a_page_can_be_read_at_once(page):
    assert LENGTHS[page] <= MOST_WORDS_A_PAGE


def test_what_is_excused_is_there_and_held_where_it_says():
    for page, holder in HELD_TABLES.items():
        assert page in LENGTHS
        assert (DOCS.parent / holder).is_file()
    assert all((DOCS.parent / name).exists() for name in GENERATED)


@pytest.mark.parametrize(("count", "above", "loose"), [(1001, 1, 0), (1000, 0, 0), (990, 0, 0), (989, 0, 1)])
def test_budgets_hold_and_only_fall(count, above, loose):
    """A count above its budget is a breach; a budget more than 1 % above its count should fall."""
    found = against_budgets(BUDGETS | {"tests": count}, BUDGETS | {"tests": 1000})
    assert [len(lines) for lines in found] == [above, loose]
