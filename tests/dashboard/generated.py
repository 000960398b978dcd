"""Made-up runs whose totals are consistent: what an agent could have sent. Test data, measured nowhere."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS, HISTOGRAM_OCTAVES
from collage_monitor.statistics import merge_shards

FINAL = {
    "plain": {"edq": 0.84, "lost": 0.62, "state": 0.02, "oracle": 0.7, "loss": 2.55},
    "stochastic": {"edq": 1.0, "lost": 0.55, "state": 0.98, "oracle": 0.98, "loss": 2.45},
    "light": {"edq": 1.0, "lost": 0.01, "state": 0.03, "oracle": 0.9, "loss": 2.424},
    "plus": {"edq": 1.0, "lost": 0.0, "state": 0.99, "oracle": 0.998, "loss": 2.416},
    "master-weights": {"edq": 1.0, "lost": 0.0, "state": 1.0, "oracle": 1.0, "loss": 2.416},
}
OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq")


def layer_names(blocks):
    """Names as a small GPT's parameters have them."""
    inner = ("attention.qkv.weight", "attention.output.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")
    return [
        "embedding.weight",
        *(f"blocks.{block}.{name}" for block in range(blocks) for name in inner),
        "head.weight",
    ]


@dataclass
class GeneratedRun:
    """A run of `steps` steps, measured every `every`; the same arguments make the same run.

    `logs(step)` are scalars in place of or beside its own, `sums(totals, step)` such totals.
    """

    name: str
    strategy: str
    dtype: str = "bfloat16"
    blocks: int = 2
    steps: int = 200
    every: int = 10
    state: str = "finished"
    run_id: str = ""
    seed: int | None = None
    config: dict = field(default_factory=dict)
    group: str | None = None
    logs: Callable[[int], dict] = lambda step: {}
    sums: Callable[[dict, int], dict] = lambda totals, step: {}
    layers: list = field(init=False)

    def __post_init__(self):
        self.run_id = self.run_id or f"run-{self.name.replace(' ', '-')}"
        self.layers = [
            wire.Layer(name=name, shape=[64, 32], dtype=self.dtype, elements=2048 * (1 + place % 3))
            for place, name in enumerate(layer_names(self.blocks))
        ]

    @property
    def measured(self):
        """The measured steps."""
        return list(range(self.every, self.steps + 1, self.every))

    @property
    def final(self):
        """Where the run's ratios end."""
        exact = {"edq": 1.0, "lost": 0.0, "state": 1.0, "oracle": 1.0, "loss": 2.415}
        return exact if self.dtype == "float32" else FINAL.get(self.strategy, FINAL["plus"])

    def totals(self, step):
        """Statistic → totals [layer] of one step."""
        rng = np.random.default_rng([step, len(self.name), self.blocks])
        progress = step / self.steps
        elements = np.array([float(layer.elements) for layer in self.layers])
        count = len(elements)
        wobble = 1 + 0.02 * rng.standard_normal(count) * (self.final["edq"] < 0.999)
        edq = (1 + (self.final["edq"] - 1) * progress * np.linspace(0.6, 1.4, count)) * wobble
        idle = np.where(np.arange(count) == 0, np.floor(elements * 0.2), 0.0)
        active = elements - idle
        lost = np.floor(active * np.clip(self.final["lost"] * progress * np.linspace(0.7, 1.3, count), 0, 1))
        distorted = np.floor((active - lost) * 0.1 * (self.final["lost"] > 0))
        intended = elements * 1e-8 * (1 + 0.1 * rng.random(count))
        totals = {
            "measured_steps": np.ones(count),
            "elements": elements,
            "sampled": np.minimum(elements, 4096.0),
            "active_blocks": np.full(count, 64.0),
            "nonfinite": np.zeros(count),
            "idle": idle,
            "stray": np.zeros(count),
            "lost": lost,
            "distorted": distorted,
            "reversed": np.floor(distorted * 0.2),
            "faithful": active - lost - distorted,
            "lost_visible": np.floor(active * 0.6) if self.dtype == "bfloat16" else lost,
            "unchanged": idle + lost,
            "intended_squared_sum": intended,
            "intended_effective_sum": intended * edq,
            "effective_squared_sum": intended * edq**2 * 1.02,
            "intended_visible_sum": intended * edq * 0.97,
            "visible_squared_sum": intended * edq**2 * 1.1,
            "gradient_squared_sum": elements * 1e-4 / (1 + progress),
            "parameter_squared_sum": elements * 4e-4 * (1 + progress),
            "nonfinite_gradients": np.zeros(count),
            "nonfinite_parameters": np.zeros(count),
            "oracle_steps": np.full(count, float(step)),
            "oracle_squared_sum": intended,
            "oracle_effective_sum": intended * (1 + (self.final["oracle"] - 1) * progress),
            "oracle_intended_squared_sum": intended * (1 + (self.final["oracle"] - 1) * progress),
            "oracle_displacement_squared_sum": intended * step,
            "oracle_displacement_effective_sum": intended * step * (1 + (self.final["oracle"] - 1) * progress / 2),
            "oracle_drift_squared_sum": intended * step * ((1 - self.final["oracle"]) * progress) ** 2,
            "variance_numerator/edq_ratio": (intended * 0.02) ** 2,
            "variance_denominator/edq_ratio": (intended * 0.02) ** 2,
            "covariance/edq_ratio": (intended * 0.015) ** 2,
        }
        for name in OPTIMIZER_STATES:
            share = self.final["state"] if name == "exp_avg_sq" else 1.0
            totals[f"state_decrement_intended_sum/{name}"] = -intended
            totals[f"state_decrement_observed_sum/{name}"] = -intended * share
        totals |= _histogram(active, self.strategy)
        return totals | self.sums(totals, step)

    def scalars(self, step):
        """Logged scalars of a step; a validation loss at every fifth measured one."""
        decay = np.exp(-4 * step / self.steps)
        loss = self.final["loss"] + 3.0 * decay + 0.03 * np.sin(step * 1.7)
        values = {"loss": float(loss), "tokens": 2048.0 * step, "tokens_per_second": 9000.0, "learning_rate": 2e-4}
        if step % (5 * self.every) == 0:
            values["validation_loss"] = float(self.final["loss"] + 3.0 * decay)
        if step == self.every:
            sizes = {"plain": 8.0, "light": 10.0, "kahan": 10.0, "plus": 12.0} if self.dtype == "bfloat16" else {}
            values["bytes_per_parameter"] = sizes.get(self.strategy, 16.0)
        return values | self.logs(step)

    def model_totals(self, step):
        """Statistic → total of the whole model at one step."""
        layers = self.totals(step)
        return merge_shards(
            [{key: values[place] for key, values in layers.items()} for place in range(len(self.layers))]
        )

    def watch(self):
        """What the agent says about itself."""
        return wire.WatchInfo(
            optimizer="CollageAdamW",
            strategy=self.strategy,
            observed_strategy=self.strategy,
            dtype=self.dtype,
            intent="rule",
            parameters=sum(layer.elements for layer in self.layers),
            every=self.every,
            oracle=True,
            agent_version="0.1.0",
            host="test",
        )


def demo_runs(**more):
    """The five runs of a demo: four strategies in bfloat16 and the float32 reference."""
    runs = [GeneratedRun(name, name, **more) for name in ("plain", "light", "plus", "master-weights")]
    return [*runs, GeneratedRun("fp32 reference", "plain", "float32", **more)]


RAISED_AT = 800


def raised_run(steps=2 * RAISED_AT):
    """Its learning rate is tripled at a step; nothing else happens."""

    def logs(step):
        return {"learning_rate": 6e-4 if step >= RAISED_AT else 2e-4, "loss": 2.5}

    return GeneratedRun("raised", "plus", steps=steps, logs=logs)


DEMO = tuple(run.run_id for run in demo_runs())
"""Their ids."""


def _histogram(active, strategy):
    centres = np.array([-26.0, *(octave + 0.5 for octave in HISTOGRAM_OCTAVES), 9.0])
    weights = np.exp(-0.5 * ((centres + (1.5 if strategy == "plain" else 1.0)) / 2.5) ** 2)
    shares = weights / weights.sum()
    return {
        f"update_ulp_histogram/{label}": active * share
        for label, share in zip(HISTOGRAM_LABELS, shares, strict=True)
    }
