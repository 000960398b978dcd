"""What a lost share costs: docs and alert say what the studies' records say, and each training counts once."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from collage_demo.recipe import Plan, Recipe
from collage_studies.catalogue import STUDY_NAMES
from collage_studies.lost_share import END, START, evidence, main, replace_between_markers
from collage_studies.study import Record
from collage_studies.summary import records_of

from collage_monitor.alerts import alert
from tests.studies.records import FP32, PLAIN, training

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "false-alarms.md"


@pytest.fixture(scope="module")
def text():
    return evidence({name: records_of(name, DOCS / "studies") for name in STUDY_NAMES})


def test_the_page_is_what_the_records_say(text):
    told = "python -m collage_studies.lost_share --write docs/false-alarms.md"
    page = PAGE.read_text()
    assert told in page
    assert page == replace_between_markers(page, text), told


def test_the_alert_quotes_what_the_page_says(text):
    count, most = text.partition(" configurations end above fp32 beyond chance, by up to ")[::2]
    count, most = count.rpartition(", ")[2], most.partition(" nats")[0]
    quoted = f"In our studies {count} such settings ended above fp32, by up to {most} nats"
    assert quoted in alert("CollageUpdatesLost").meaning


def test_the_command_writes_between_the_markers(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    done = CliRunner().invoke(main, ["--studies", str(DOCS / "studies"), "--write", str(page)])
    assert done.exit_code == 0, done.output
    assert done.output == f"{text}\n"
    assert page.read_text() == f"before\n{START}\n{text}\n{END}\nafter\n"
    with pytest.raises(ValueError, match="unpack"):
        replace_between_markers("a page without markers\n", text)


def trainings(plan, lost, extra, *, rate, edq=1.0):
    """Three seeds that end above fp32 by `extra`, in nats, and these fp32 runs."""
    return [
        training(
            own,
            seed,
            recipe=Recipe(learning_rate=rate),
            loss=2.0 + seed + more * (1 + seed / 100),
            merged={"lost_update_ratio": share, "edq_ratio": arrived, "lost_window_ratio/8": share / 2},
        )
        for own, more, share, arrived in ((FP32, 0.0, 0.0, 1.0), (plan, extra, lost, edq))
        for seed in (1, 2, 3)
    ]


def told(*more):
    return evidence(
        {
            "quality": trainings(PLAIN, 0.3, 0.1, rate=1e-3, edq=0.8),
            "strategies": trainings(PLAIN, 0.04, 0.0, rate=1e-2),
            "beta2": trainings(Plan("stochastic", "bfloat16"), 0.6, 0.0, rate=1e-1),
            "finetuning": [record for records in more for record in records],
        }
    )


def test_rows_and_sentences_follow_from_the_numbers():
    text = told()
    assert "9 trainings of 3 configurations" in text
    assert "| to nearest | up to 4 % | 1 | 1.000 | +0.000 | 0 |" in text
    assert "| to nearest | 30 % | 1 | 0.800 | +0.102 | 1 |" in text
    assert "| at random | up to 60 %" not in text
    assert "| at random | 60 % | 1 | 1.000 | +0.000 | 0 |" in text
    assert "no configuration loses between 4 % and 30 %. Above 25 %, 1 of 1 configurations end above fp32" in text
    assert "Among the 1 below, these end above fp32 beyond chance by 0.001 or more: none." in text
    assert "it is below 0.9, the bound of `CollageEdqLow`, in only 1 of those 1." in text
    assert "over 8 steps stochastic (GPT, rate 0.1, β₂ 0.999) had lost 30 %" in text


@pytest.mark.parametrize(
    ("name", "lost", "extra", "said"),
    [
        ("e5m2 triple", 0.2, 0.01, "more: e5m2 triple (GPT, rate 0.0001, β₂ 0.999), 20 % lost, +0.0102 ["),
        ("e5m2 triple", 0.2, 0.01, "no configuration loses between 20 % and 30 %."),
        ("plain", 0.5, 0.0, "1 of 2 configurations"),
        ("plain", 0.5, 0.0, "do not show a higher loss for plain (GPT, rate 0.0001, β₂ 0.999) (gaps of +0.000)."),
        # Expansions that round at random are not to nearest.
        ("e4m3 pair, rounded at random", 0.2, 0.01, "no configuration loses between 4 % and 30 %"),
        ("e4m3 pair, rounded at random", 0.2, 0.01, "| at random | 20 to 60 % | 2 |"),
    ],
)
def test_what_the_bound_misjudges_is_named(name, lost, extra, said):
    assert said in told(trainings(Plan(name, "bfloat16"), lost, extra, rate=1e-4))


def test_a_training_that_two_studies_ran_counts_once():
    """Its seeds would name two runs each, and gaps would not be of pairs. A field of the recipe is younger."""
    again = msgspec.to_builtins(trainings(PLAIN, 0.3, 0.1, rate=1e-3, edq=0.8))
    for record in again:
        record["trial"]["name"] += ", again"
        del record["trial"]["recipe"]["windows"]
    text = told(msgspec.json.decode(msgspec.json.encode(again), type=list[Record]))
    assert "9 trainings of 3 configurations" in text
    assert text.partition("Lost updates")[2] == told().partition("Lost updates")[2]
