"""What people ask daily is answered within three clicks from the table of runs.

What changed at a step is asked in `test_change.py`, what happened in the night in `test_incidents.py`.
"""

import re

import numpy as np
import pytest
from PIL import Image

from tests.dashboard.generated import GeneratedRun
from tests.reference.seeds import mean

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.usefixtures("evaluated")]

MOST_CLICKS = 3
RATES = {"rate 3e-4": 3e-4, "rate 1e-3": 1e-3}
OF_RATES = {"rate 3e-4": 2.75, "rate 1e-3": 2.5}
OF_KAHAN = {1: (2.5, 2.4375), 2: (2.5625, 2.5078125), 3: (2.4375, 2.3671875)}
"""Validation losses by seed: plain's, and Kahan's."""


def ending_at(loss, name, strategy, **more):
    """A run with this validation loss."""
    return GeneratedRun(name, strategy, logs=lambda step: {"validation_loss": loss}, **more)


@pytest.fixture(scope="module")
def runs():
    """Two learning rates, and two strategies with three seeds each."""
    rates = [
        ending_at(OF_RATES[name], name, "plus", run_id=f"run-{place}", group="rates", config={"lr": rate})
        for place, (name, rate) in enumerate(RATES.items())
    ]
    seeds = [
        ending_at(losses[place], f"{strategy} {seed}", strategy, seed=seed, group="kahan")
        for seed, losses in OF_KAHAN.items()
        for place, strategy in enumerate(("plain", "kahan"))
    ]
    return [*rates, *seeds]


class Asker:
    """Counts the clicks of who asks, from the table on."""

    def __init__(self, page):
        self.page, self.clicks = page, 0

    def click(self, locator):
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        locator.click()

    def tick(self, name):
        self.click(self.page.get_by_role("checkbox", name=f"Pick {name} to compare", exact=True))

    def compare(self, count):
        self.click(self.page.get_by_role("link", name=f"Compare {count} runs"))

    def group(self, name):
        """The runs of a group, side by side."""
        self.click(self.page.locator(".bar").get_by_role("link", name="Strategies"))
        self.click(self.page.locator(".rail summary"))
        self.click(self.page.locator(".rail").get_by_role("link", name=f"demo / {name}"))

    def answer(self, selector, form):
        """The first text of the selector that has this form."""
        found = self.page.locator(selector).filter(has_text=re.compile(form)).first
        found.wait_for()
        match = re.search(form, found.inner_text().replace("\u2212", "-"))
        assert match is not None
        return match


@pytest.fixture
def asker(goto):
    return Asker(goto("/runs", ".ag-row .run-cell a"))


@pytest.mark.nightly
def test_which_learning_rate(asker):
    for name in RATES:
        asker.tick(name)
    asker.compare(2)
    said = asker.answer(
        "#compare-advice .answer", r"The loss with lr ([\d.]+) is lower by ([\d.]+); it may be chance"
    )
    assert float(said[1]) == RATES["rate 1e-3"]
    assert float(said[2]) == OF_RATES["rate 3e-4"] - OF_RATES["rate 1e-3"]


@pytest.mark.nightly
def test_which_layer_first_and_a_picture_for_others(asker, runs):
    run = next(run for run in runs if run.name == "plain 1")
    asker.click(asker.page.get_by_role("link", name="plain 1", exact=True))
    asker.click(asker.page.get_by_role("tab", name="Layers"))
    row = asker.page.locator(".layers-grid .ag-row[row-index='0'] [col-id='layer']")
    row.wait_for()
    sent = [run.totals(step) for step in run.measured]
    lost = sum(totals["intended_squared_sum"] - totals["intended_effective_sum"] for totals in sent)
    assert row.inner_text() == run.layers[int(np.argmax(lost))].name
    page = asker.page
    page.go_back()
    page.wait_for_selector("#run-panel .hm image", state="attached")
    with page.expect_download() as download:
        asker.click(page.get_by_role("button", name="Updates lost by layer as PNG"))
    assert download.value.suggested_filename.startswith("collage-plain-1")
    with Image.open(download.value.path()) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) >= 300


def test_is_kahan_worth_its_two_bytes_and_does_it_hold_over_seeds(asker):
    asker.group("kahan")
    worth = r"Kahan · bfloat16's loss is (\S+) lower than Plain · bfloat16's for 2 bytes more"
    said = asker.answer("#compare-worth", rf"{worth} \(95 %: (\S+) to (\S+), 3 pairs\)")
    gap, half, _ = mean([kahan - plain for plain, kahan in OF_KAHAN.values()])
    told = [float(number) for number in said.groups()]
    assert told == pytest.approx([abs(gap), abs(gap) - half, abs(gap) + half], rel=2e-2)
    for strategy, place in (("Plain", 0), ("Kahan", 1)):
        row = asker.page.locator("#compare-strategies tr", has_text=f"{strategy} · bfloat16 (3 runs)")
        row.locator(".detail").first.wait_for()
        middle, _, spread = mean([losses[place] for losses in OF_KAHAN.values()])
        asker.page.get_by_role("columnheader", name="Loss", exact=True).wait_for()
        heads = asker.page.locator("#compare-strategies th").all_inner_texts()
        cell = row.locator("td").nth(heads.index("Loss"))
        value, off = re.findall(r"[\d.]+", cell.inner_text())
        assert float(value) == pytest.approx(middle, abs=6e-3)
        assert float(off) == pytest.approx(spread, abs=6e-3)


@pytest.mark.nightly
def test_numbers_into_pandas(asker, server_url, runs):
    asker.click(asker.page.get_by_text("Export to pandas"))
    code = asker.page.locator(".pandas pre").inner_text()
    names = {"token": server_url[1].read_text().strip()}
    exec(code, names)
    names["client"].close()
    frame = names["frame"]
    run = next(run for run in runs if run.name == "plain 1")
    own = frame[(frame["run"] == run.run_id) & frame["layer"].isna()].sort_values("step")
    totals = run.model_totals(run.measured[-1])
    expected = totals["intended_effective_sum"] / totals["intended_squared_sum"]
    assert own["edq_ratio"].dropna().iloc[-1] == pytest.approx(float(expected), rel=1e-6)


def test_what_is_opened_before_the_application_is_there_stays_open(page, dashboard_url):
    """A menu of the words that stand in for the page closed with them."""
    held = []
    page.route("**/dash_renderer*.js*", lambda route: held.append(route))
    page.goto(f"{dashboard_url}/run/run-0", wait_until="commit")
    page.locator("#opening .rail summary", has_text="Groups").click()
    page.locator("#opening .rail details[open]").wait_for()
    for route in held:
        route.continue_()
    page.locator("#opening").wait_for(state="detached")
    page.locator(".rail details[open] a", has_text="demo / ").first.wait_for()
