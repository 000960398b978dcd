"""Forecasts of real trainings in bfloat16 beside what came, by schedule, seed and strategy."""

import math
from functools import cache, partial

import pytest
import torch
from collage_agent.optim import CollageAdamW
from torch import nn

from collage_monitor.forecast import LOST, ForecastError
from collage_monitor.schedule import parse_schedule
from collage_monitor.statistics import finish, reduce_shards
from tests.agent.training import mlp, train, watched

STEPS, WATCHED, EVERY = 1200, 240, 5
SCHEDULES = {
    "cosine": f"cosine:1e-2:60:{STEPS}",
    "linear": f"linear:1e-2:60:{STEPS}",
    "wsd": f"wsd:1e-2:60:{STEPS}:{STEPS // 2}",
}
STRATEGIES = ("plain", "kahan", "stochastic", "split-master")
AT_RANDOM = ("stochastic", "split-master")
"""What rounds at random: judged by EDQ, not by what single steps lose."""


class Block(nn.Sequential):
    """Adds what its layers make of the inputs."""

    def __init__(self, width):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + super().forward(x)


def next_token(width=32, tokens=64):
    """The distribution of a token after the last one, by residual blocks."""
    token, blocks = nn.Embedding(tokens, width), [Block(width), Block(width)]
    return nn.Sequential(token, *blocks, nn.LayerNorm(width), nn.Linear(width, tokens))


class Lost:
    """A reporter of what each measured step lost: its share of the updates, or 1 − EDQ of what rounds at random.

    The latter over a tenth of the training: when hardly an element moves in a step, one step's EDQ is chance.
    """

    def __init__(self, strategy):
        self.random = strategy in AT_RANDOM
        self.shares, self._tenth = {}, []

    def started(self, first_step):
        pass

    def measured(self, measurement):
        model = reduce_shards(dict(measurement.table()), axis=0)
        if not self.random:
            self.shares[measurement.step] = float(finish("lost_update_ratio", model))
            return
        self._tenth.append({key: model[key] for key in ("intended_effective_sum", "intended_squared_sum")})
        if measurement.step % (STEPS // 10) == 0:
            totals = {key: sum(step[key] for step in self._tenth) for key in self._tenth[0]}
            self.shares[measurement.step], self._tenth = 1.0 - float(finish("edq_ratio", totals)), []

    def onset(self):
        """The first measured step from which on more than a quarter is lost."""
        above = [(step, share > LOST) for step, share in self.shares.items() if math.isfinite(share)]
        last_below = max((step for step, is_above in above if not is_above), default=0)
        return min((step for step, _ in above if step > last_below), default=None)


def trained(schedule, seed, strategy, steps):
    """What a training lost, and its forecast after so many steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    after = (2 * torch.randn(64, 64, generator=generator)).softmax(-1)
    lost, planned, forecast = Lost(strategy), parse_schedule(schedule), None
    make = partial(CollageAdamW, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, strategy=strategy)
    model, optimizer, handle = watched(make, next_token().bfloat16(), every=EVERY, reporter=lost)
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 64, (32,), generator=generator)
        wanted = torch.multinomial(after[tokens], 1, generator=generator)[:, 0]
        optimizer.param_groups[0]["lr"] = float(planned.rates[step - 1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).float(), wanted).backward()
        optimizer.step()
        if step == WATCHED:
            forecast = handle.forecast(schedule)
    handle.remove()
    return lost, forecast


@cache
def foretold_in_plain(schedule, seed):
    """The forecast from a training in plain bfloat16."""
    return trained(schedule, seed, "plain", WATCHED)[1]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_onset_comes_within_a_tenth_of_the_steps(schedule, seed, strategy):
    """Foretold by the training itself, and by one in plain bfloat16. Of computed updates: tests/contract."""
    text = SCHEDULES[schedule]
    lost, own = trained(text, seed, strategy, STEPS)
    came = lost.onset()
    for forecast in (own, foretold_in_plain(text, seed)):
        found = next(entry for entry in forecast.strategies if entry.strategy == strategy)
        assert came is None or found.onset is not None, f"came at {came}: {found.text}"
        off = abs((found.onset or STEPS + 1) - (came or STEPS + 1))
        assert off <= STEPS / 10, f"came at {came}: {found.text}"


@pytest.mark.slow
def test_a_handle_foretells_in_words_along_a_text_or_a_function_but_not_for_float32():
    model, optimizer, handle = watched()
    with pytest.raises(ForecastError, match="train some steps first"):
        handle.forecast("constant:1e-3:0:1000")
    train(model, optimizer, 30)
    by_text = handle.forecast("constant:1e-3:0:1000")
    assert by_text.last_step == 30
    assert handle.forecast(lambda step: 1e-3, 1000).strategies == by_text.strategies
    assert str(by_text).endswith("and weights and optimizer states as there.")
    with pytest.raises(ValueError, match="kinds are"):
        handle.forecast("exponential:1e-3:0:1000")
    wide = watched(model=mlp(dtype=torch.float32), steps=5)[2]
    with pytest.raises(ForecastError, match="weights are float32"):
        wide.forecast("constant:1e-3:0:1000")


def test_what_a_forecast_needs_is_kept_in_bounded_memory():
    _, _, handle = watched(steps=200)
    history = handle._assembly.history
    record = history.grids("plain")
    assert 30 <= len(record.steps) < 64
    assert record.steps[-1] > 190
    assert max(later - earlier for earlier, later in zip(record.steps, record.steps[1:], strict=False)) <= 4
    assert 0 < history._grids.bytes < 2**20
