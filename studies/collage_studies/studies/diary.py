"""Three sick runs: what terminal, dashboard and alert reported, when, and what cured them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import collage_agent as collage
import torch
from collage_demo.corpus import standard_library
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import TrainingLoop, without_residuals

from collage_monitor.client import Client
from collage_monitor.errors import CollageError
from collage_monitor.local import token_path
from collage_monitor.wire import Incident
from collage_studies.number_words import UNDEFINED, listed, number
from collage_studies.study import (
    Curve,
    MarkdownTable,
    Page,
    Picture,
    Plot,
    PlotCurve,
    Record,
    ReportTarget,
    Study,
    Trial,
)
from collage_studies.training_trial import run_training

__all__ = ["STUDY", "picture_of"]

MENDED: Final = Plan("split-master", "bfloat16")
REFERENCE: Final = Plan("plain", "float32")
DECREMENT: Final = "state_decrement_ratio/exp_avg_sq"
LOSS: Final = "validation_loss"
CURVES: Final = (LOSS, "edq_ratio", DECREMENT)
SHAPE: Final = {"batch_size": 8, "length": 64, "layers": 2, "width": 32, "warm_up_steps": 40}
QUICK: Final = {"batch_size": 8, "length": 32, "layers": 1, "width": 32, "warm_up_steps": 10}
PACE: Final = 1.0
"""Seconds per step while the run waits for an alert: alerts wait for minutes, and this training ends in one."""
PATIENCE: Final = {"A small rate": 1200, "A resume": 200, "A second moment": 1500}
"""The most steps spent waiting. The three alerts wait for 10 minutes, not at all, and for 15 minutes."""
_SENTENCE_SECONDS: Final = 60.0

Ending = Literal["left alone", "mended"]


@dataclass(frozen=True)
class Story:
    """A training that falls ill: its plan, its rate and β₂, and whether a resume drops its residuals."""

    title: str
    introduction: str
    plan: Plan
    rate: float
    beta2: float
    dropped: bool = False


STORIES: Final = (
    Story(
        "A small rate",
        "A model is trained in plain bfloat16. Its learning rate is so small that most updates are less than half "
        "the distance between neighbouring bfloat16 numbers. The loss falls, and nothing looks broken.",
        Plan("plain", "bfloat16"),
        5e-5,
        0.95,
    ),
    Story(
        "A resume",
        "A run under Collage light is resumed from a checkpoint. The script saved the weights and the states of "
        "torch's AdamW, but not the residuals.",
        Plan("light", "bfloat16"),
        1e-3,
        0.95,
        dropped=True,
    ),
    Story(
        "A second moment",
        "A run under Collage light has β₂ = 0.999, the usual value. Its weights keep every update. But its second "
        "moment is a single bfloat16 number, which cannot decay.",
        Plan("light", "bfloat16"),
        1e-3,
        0.999,
    ),
)


def trials(quick: bool) -> Sequence[Trial]:
    """Each story, and the same training in fp32; quick: only the resume, because its alert does not wait."""
    # The first step after the resume is a measured one.
    steps = {"before": 59, "after": 50} if quick else {"before": 519, "after": 600}
    chosen = [story for story in STORIES if story.dropped or not quick]
    return [
        Trial(
            name=f"{story.title}, {kind}",
            plan=REFERENCE if kind == "fp32" else story.plan,
            recipe=Recipe(
                learning_rate=story.rate,
                betas=(0.9, story.beta2),
                steps=2000 if kind == "fp32" else steps["before"],
                **(QUICK if quick else SHAPE),  # type: ignore[arg-type]
            ),
            settings={"story": story.title}
            if kind == "fp32"
            else {"story": story.title, "patience": 20 if quick else PATIENCE[story.title], **steps},
            curves=CURVES,
        )
        for kind in ("sick", "fp32")[: 1 if quick else None]
        for story in chosen
    ]


def run(trial: Trial, reporting: ReportTarget) -> Record:
    """The story, or its fp32 training."""
    if trial.plan == REFERENCE:
        return run_training(trial, reporting)
    story = next(story for story in STORIES if story.title == trial.settings["story"])
    return _Patient(trial, story, reporting).record()


class _Patient:
    """A run that falls ill, raises an alert, and continues both unchanged and converted."""

    def __init__(self, trial: Trial, story: Story, reporting: ReportTarget) -> None:
        assert trial.recipe is not None
        self._trial, self._story, self._reporting, self._recipe = trial, story, reporting, trial.recipe
        self._corpus = standard_library()
        self._folder = reporting.folder / "diary" / f"{trial.name} {time.time():.0f}"
        self._folder.mkdir(parents=True)
        self._values: dict[str, float | None] = {}
        self._words: dict[str, str] = {}
        self._curves: dict[str, Curve] = {}

    def record(self) -> Record:
        """The record: numbers, and the texts that the product showed."""
        losses: list[tuple[int, float]] = []
        loop = TrainingLoop(self._story.plan, self._recipe, self._corpus, _into(losses))
        heard: list[Incident] = []
        with self._begun("sick") as reported:
            handle = loop.watch(first_step=1)
            last = loop.take(range(1, self._recipe.steps + 1))
            whole = self._saved(loop, last, "before")
            ill_since = time.time() if self._story.dropped else time.time() - loop.clock.seconds
            if self._story.dropped:
                content = torch.load(whole)
                loop.load(content["model"], without_residuals(content["optimizer"]))
                handle = loop.watch(first_step=last + 1)
            collage.on_alert(heard.append, every_seconds=1.0)
            awaited = range(last + 1, last + 1 + self._trial.settings["patience"])
            last = loop.take(awaited, stop=lambda: self._waits(heard))
            at_alert = self._saved(loop, last, "at the alert")
            self._words["terminal"] = str(handle)
            self._keep_words(reported.run_id, ill_since)
        self._values["steps"] = float(last)
        end = (last + self._trial.settings["after"]) // 50 * 50  # Where every run validates.
        self._curves["loss/sick"] = _curve(losses)
        self._go_on("left alone", at_alert, self._story.plan, end)
        # A residual that was dropped is in no later checkpoint: go back to the last whole one.
        mended = self._converted(whole if self._story.dropped else at_alert)
        self._go_on("mended", mended, MENDED, end)
        return Record(
            trial=self._trial,
            versions={},
            cpu_seconds=0.0,
            run_id=reported.run_id,
            values=self._values,
            curves=self._curves,
            words=self._words,
        )

    def _begun(self, name: str) -> Any:
        return collage.init(
            "studies",
            f"{self._story.title}, {name}",
            group=self._reporting.group,
            seed=self._recipe.seed,
            config={"story": self._story.title, "part": name},
            server_url=self._reporting.server_url,
            dir=self._reporting.folder,
        )

    def _waits(self, heard: Sequence[Incident]) -> bool:
        if not heard:
            time.sleep(PACE)
        return bool(heard)

    def _saved(self, loop: TrainingLoop, step: int, name: str) -> Path:
        path = self._folder / f"{name}.pt"
        (optimizer,) = loop.optimizers
        content = {"model": loop.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(content, path)
        return path

    def _converted(self, checkpoint: Path) -> Path:
        """Convert with the same command as a user, and keep its output."""
        written = self._folder / "converted.pt"
        arguments = ["convert", str(checkpoint), "--to", MENDED.strategy, "--output", str(written)]
        program = [sys.executable, "-c", "from collage_monitor.command import main; main()", *arguments]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        said = done.stdout.replace(str(self._folder), "checkpoints")
        self._words["convert"] = said.strip()
        return written

    def _go_on(self, how: Ending, checkpoint: Path, plan: Plan, end: int) -> None:
        losses: list[tuple[int, float]] = []
        content = torch.load(checkpoint)
        loop = TrainingLoop(plan, self._recipe, self._corpus, _into(losses))
        loop.load(content["model"], content["optimizer"])
        with self._begun(how) as reported:
            loop.watch(first_step=content["step"] + 1)
            loop.take(range(content["step"] + 1, end + 1))
        self._values[f"loss/{how}"] = losses[-1][1]
        self._values["end"] = float(end)
        self._curves[f"loss/{how}"] = _curve(losses)
        with self._client() as client:
            (found,) = client.compare([reported.run_id], "edq_ratio").runs
        for name in ("edq_ratio", DECREMENT):
            value = found.merged.get(name)
            self._values[f"{name}/{how}"] = value if isinstance(value, float) else None

    def _keep_words(self, run_id: str, ill_since: float) -> None:
        """Keep the first alert, and the dashboard's sentence for the run at that time."""
        with self._client() as client:
            incidents = sorted(client.incidents(run_id=run_id).events, key=lambda found: found.started_at)
            if incidents:
                first = incidents[0]
                self._words |= {"alert": first.alert, "incident": first.incident_id, "reason": first.text}
                self._values["alert_step"] = None if first.step is None else float(first.step)
                self._values["alert_seconds"] = first.started_at - ill_since
            others = {entry.alert for entry in incidents} - {self._words.get("alert")}
            self._words["others"] = ", ".join(sorted(others))
            self._words["sentence"] = _sentence(client, run_id)

    def _client(self) -> Client:
        assert self._reporting.server_url is not None
        token = token_path(self._reporting.folder).read_text(encoding="ascii").strip()
        return Client(self._reporting.server_url, token)


def _into(losses: list[tuple[int, float]]) -> Callable[[int, float, float], None]:
    return lambda step, _loss, validation: losses.append((step, validation))


def _curve(losses: Sequence[tuple[int, float]]) -> Curve:
    return Curve([step for step, _ in losses], [loss for _, loss in losses])


def _sentence(client: Client, run_id: str) -> str:
    """The dashboard's sentence, once the server has computed it; empty after a minute."""
    deadline = time.monotonic() + _SENTENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            found = client.overview(run_id)
        except CollageError:
            found = None
        if found is not None and found.headline:
            return found.headline
        time.sleep(0.5)
    return ""


def page(records: Sequence[Record]) -> Page:
    """Each story in the order of events, with the texts of the record."""
    references = {r.trial.settings["story"]: r for r in records if r.trial.plan == REFERENCE}
    sick = {r.trial.settings["story"]: r for r in records if r.trial.plan != REFERENCE}
    evidence: list[str | MarkdownTable | Plot | Picture] = []
    verdicts = []
    for story in STORIES:
        if story.title not in sick:
            continue
        record, reference = sick[story.title], references.get(story.title)
        evidence += [f"### {story.title}", *_story(story, record, reference)]
        verdicts.append(_outcome(story, record))
    return Page(
        " ".join(verdicts),
        evidence,
        [
            f"Each story is a single run. After step {sick[STORIES[1].title].trial.settings['before']} each step "
            f"takes {PACE:g} s until the alert, because these alerts wait for minutes and a training this small "
            "ends sooner. So only the minutes until an alert apply to other trainings, not the number of steps.",
            "The first step after the resume was a measured one. Residuals are full again after a step or two, so "
            "the alert can miss a resume whose first step is not measured.",
            "A run continues with the same batches whether it is left alone or cured.",
        ],
    )


def _story(story: Story, record: Record, reference: Record | None) -> list[str | MarkdownTable | Plot | Picture]:
    words, values = record.words, record.values
    others = [f"`{name}`" for name in words["others"].split(", ") if name and name != words.get("alert")]
    found: list[str | MarkdownTable | Plot | Picture] = [story.introduction]
    if "alert" in words:
        found += [
            f"**The alert.** {_when(record)} `{words['alert']}` fired with this text:",
            _quoted(words["reason"]),
            *([f"{listed(others)} fired as well."] if others else []),
            Picture(picture_of(story.title), f"The incident's page: {story.title.lower()}"),
        ]
    else:
        found.append(f"**The alert.** None fired by step {values['steps']:,.0f}.")
    sentence = _quoted(words["sentence"]) if words["sentence"] else "> (none within a minute)"
    found += ["**The dashboard** showed this sentence for the run:", sentence]
    found += ["**The terminal** printed this (`print(handle)`):", f"```text\n{words['terminal']}\n```"]
    back = "went back to the checkpoint before the resume" if story.dropped else "took the checkpoint at the alert"
    found += [
        f"**The cure.** We {back}, converted it, and continued under `{MENDED.strategy}`:",
        f"```text\n{words['convert']}\n```",
    ]
    return [*found, _endings(record, reference), _plot(story, record, reference)]


def _when(record: Record) -> str:
    step, seconds = record.values.get("alert_step"), record.values.get("alert_seconds")
    at = "" if step is None else f"At step {step:,.0f}, "
    since = f"{_duration(seconds or 0.0)} after the run fell ill,"
    return f"{at}{since}" if at else since.capitalize()


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{max(seconds, 0.0):.0f} seconds"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())


def picture_of(title: str) -> str:
    """The file of a story's picture of the dashboard."""
    return f"diary-{title.lower().replace(' ', '-')}.png"


def _at(curve: Curve, step: float) -> float | None:
    known = dict(zip(curve.steps, curve.values, strict=True))
    return known.get(int(step))


def _endings(record: Record, reference: Record | None) -> MarkdownTable:
    values, end = record.values, record.values["end"] or 0.0
    rows = [
        [
            how,
            number(values[f"edq_ratio/{how}"]),
            number(values[f"{DECREMENT}/{how}"]),
            number(values[f"loss/{how}"], 5),
        ]
        for how in ("left alone", "mended")
    ]
    if reference is not None:
        merged = [number(reference.merged.get(name)) for name in ("edq_ratio", DECREMENT)]
        rows.append(["fp32 from the start", *merged, number(_at(reference.curves[LOSS], end), 5)])
    head = ["after the alert", "EDQ", "second moment's decay", f"validation loss at step {end:,.0f}"]
    return MarkdownTable(head, rows)


def _plot(story: Story, record: Record, reference: Record | None) -> Plot:
    curves = {name.partition("/")[2]: curve for name, curve in record.curves.items() if name.startswith("loss/")}
    end = record.values["end"] or 0.0
    if reference is not None:
        curves["fp32"] = reference.curves[LOSS]
    drawn = {}
    for name, curve in curves.items():
        known = [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if v is not None and s <= end]
        drawn[name] = PlotCurve([step for step, _ in known], [value for _, value in known])
    return Plot(
        file=picture_of(f"{story.title} loss"),
        title=f"{story.title}: validation loss",
        x="step",
        y="nats a byte",
        curves=drawn,
    )


def _outcome(story: Story, record: Record) -> str:
    words, values = record.words, record.values
    alert = f"`{words['alert']}` {_fired(record)}" if "alert" in words else "no alert fired"
    alone, mended = values["loss/left alone"], values["loss/mended"]
    if alone is None or mended is None:
        return f"**{story.title}.** {alert[:1].upper()}{alert[1:]}."
    word = "lower than" if mended < alone else "higher than" if mended > alone else "as high as"
    ends = f"the validation loss ends {word} if left alone ({mended:.4f} against {alone:.4f})"
    changes = [
        _change(what, *(number(values[f"{name}/{how}"]) for how in ("left alone", "mended")))
        for name, what in (("edq_ratio", "EDQ"), (DECREMENT, "the second moment's decay"))
        if values[f"{name}/left alone"] is not None
    ]
    return (
        f"**{story.title}.** {alert[:1].upper()}{alert[1:]}. After converting to `{MENDED.strategy}`, "
        f"{listed([*changes, ends])}."
    )


def _change(what: str, before: str, after: str) -> str:
    return f"{what} stays at {after}" if before == after else f"{what} goes from {before} to {after}"


def _fired(record: Record) -> str:
    step = record.values.get("alert_step")
    return f"fired at step {UNDEFINED if step is None else format(step, ',.0f')}"


STUDY: Final = Study(
    name="diary",
    title="A diary of three sick runs",
    short="Each of three sick runs raised an alert while it trained. Converted to `split-master`, all three keep "
    "their updates and their second moment decays; the loss improves where most updates had been lost.",
    question="What do dashboard, terminal and alert report about a run that falls ill, and when? Does it recover?",
    method="Three small trainings fall ill in ways that people meet. Each reports to a server, which evaluates the "
    "default alerts. When an alert reaches the training (`on_alert`), the training saves a checkpoint. From there "
    "the run continues twice, once unchanged and once converted by `collage-monitor convert`. The words of alerts, "
    "dashboard and terminal are quoted from the records.",
    trials=trials,
    run=run,
    page=page,
    repeat_metrics=(),
)
