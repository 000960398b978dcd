"""How often the alerts cry wolf, and how soon they wake: many healthy trainings, and sick ones.

`python -m tests.alerts.study --healthy 300 --seeds 5 --json FILE --traces FOLDER` trains, evaluates, and prints the
tables of docs/false-alarms.md. What FILE holds already is not done again. A trace that FOLDER holds is not trained
again, only judged: begin a new FILE after a change of the alerts.
"""

import argparse
import json
import pickle
import statistics
import time
from collections import Counter
from itertools import count, islice
from pathlib import Path

import torch

from tests.alerts.trainings import HEALTHY, SICK, evaluate, train, varied

__all__ = ["healthy_cases", "sick_cases", "tables", "training_of"]


def healthy_cases(number):
    """(kind, seed) of so many trainings: each kind in turn, every seed its own."""
    kinds = list(HEALTHY)
    return list(islice(((kinds[place % len(kinds)], place) for place in count()), number))


def sick_cases(seeds):
    """(kind, seed) of the sick trainings, every seed its own."""
    return [(kind, 10_000 + 100 * place + seed) for seed in range(seeds) for place, kind in enumerate(SICK)]


def training_of(kind, seed):
    """A healthy one varies with its seed; a sick one is always the same but for data and weights."""
    return varied(HEALTHY[kind], seed) if kind in HEALTHY else SICK[kind][2]


def done(kind, seed, traces=None):
    """What one training gave, as it is kept. traces: a folder; a trace that is there is not trained again."""
    training = training_of(kind, seed)
    file, began = traces and traces / f"{seed}.pickle", time.process_time()
    trace = pickle.loads(file.read_bytes()) if file and file.exists() else train(training, seed)
    if file and not file.exists():
        file.write_bytes(pickle.dumps(trace))
    fired = evaluate(trace, training.seconds_a_step)
    return {"kind": kind, "seed": seed, "fired": fired, "cpu_seconds": round(time.process_time() - began, 2)}


def tables(results):
    """The two tables as Markdown."""
    lines = ["| healthy training | runs | above info | info |", "| --- | --: | --: | --- |"]
    for kind in HEALTHY:
        own = [one["fired"] for one in results if one["kind"] == kind]
        loud = sum(any(severity != "info" for _, severity, _ in fired) for fired in own)
        quiet = Counter(name for fired in own for name, severity, _ in fired if severity == "info")
        lines.append(f"| {kind} | {len(own)} | {loud} | {_names(quiet)} |")
    lines += ["", "| what is wrong | runs | alert | woken | steps it took | what else fired |"]
    lines.append("| --- | --: | --- | --: | --- | --- |")
    for kind, (name, onset, _) in SICK.items():
        own = [one["fired"] for one in results if one["kind"] == kind]
        steps = [step - onset for fired in own for alert, _, step in fired if alert == name]
        others = Counter(
            alert for fired in own for alert, severity, _ in fired if alert != name and severity != "info"
        )
        took = f"{statistics.median(steps):g} ({min(steps)}–{max(steps)})" if steps else "–"
        lines.append(f"| {kind} | {len(own)} | {name} | {len(steps)} | {took} | {_names(others)} |")
    return "\n".join(lines) + "\n"


def _names(counts):
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items())) or "–"


def main():
    """Train, evaluate, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--traces", type=Path)
    asked = parser.parse_args()
    if asked.traces:
        asked.traces.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = [json.loads(line) for line in asked.json.read_text().splitlines()] if asked.json.exists() else []
    known = {(one["kind"], one["seed"]) for one in results}
    with asked.json.open("a", encoding="utf-8") as kept:
        for kind, seed in [*sick_cases(asked.seeds), *healthy_cases(asked.healthy)]:
            if (kind, seed) not in known:
                results.append(done(kind, seed, asked.traces))
                kept.write(json.dumps(results[-1]) + "\n")
                kept.flush()
    print(tables(results), end="")  # noqa: T201


if __name__ == "__main__":
    main()
