"""Intervals: their coverage over repeated samples, whole tensors, zero losses, few blocks, correlated steps."""

import numpy as np
import pytest

from collage_monitor.statistics import interval, merge_shards, merge_steps
from collage_monitor.statistics.intervals import student_quantile

BLOCK = 32


def layer(generator, blocks):
    """u and e of one tensor [blocks, BLOCK], alike inside a block: what element-wise variance misses."""
    scale = np.exp2(generator.normal(-2.0, 0.7, (blocks, 1)))
    u = generator.normal(size=(blocks, BLOCK)) * scale
    e = np.where(np.abs(u) < 0.1, 0.0, u + generator.normal(size=u.shape) * 0.05)
    return u, e


def sampled_totals(generator, u, e, count):
    """What a worker sends of one tensor: estimated totals and block variances, finite-population corrected."""
    blocks = u.shape[0]
    chosen = generator.permutation(blocks)[:count]
    u, e = u[chosen], e[chosen]
    lost, active = (u != 0) & (e == 0), u != 0
    totals = {"elements": blocks * u.shape[1], "sampled": u.size, "active_blocks": active.any(axis=1).sum()}
    totals |= {"nonfinite": 0, "measured_steps": 1, "unseen_variance": 0}
    sums = {"idle": ~active, "lost": lost, "intended_squared_sum": u**2, "intended_effective_sum": u * e}
    totals |= {name: blocks / count * values.sum() for name, values in sums.items()}
    factor = 0.0 if count == blocks else blocks**2 * (1 - count / blocks) / count
    for name, (a, b) in {"edq_ratio": (u * e, u**2), "lost_update_ratio": (lost, active)}.items():
        a, b = a.sum(axis=1), b.sum(axis=1)
        spread = np.cov(a, b) if count > 1 else np.zeros((2, 2))
        kinds = {"variance_numerator": (0, 0), "variance_denominator": (1, 1), "covariance": (0, 1)}
        totals |= {f"{kind}/{name}": factor * spread[place] for kind, place in kinds.items()}
        if name == "edq_ratio":
            deviations = a - (a.sum() / b.sum() if b.sum() else 0) * b
            totals["fourth_moment/edq_ratio"] = (factor / max(count - 1, 1)) ** 2 * (deviations**4).sum()
    return {key: np.array([float(value)]) for key, value in totals.items()}


def sampled(generator, u, e, count):
    """The totals of a sample, merged as those of one shard."""
    return merge_shards([sampled_totals(generator, u, e, count)])


def of_900_blocks(count):
    u, e = layer(np.random.default_rng(4), 900)
    return sampled(np.random.default_rng(4), u, e, count)


def truth(layers):
    u, e = (np.concatenate([part.ravel() for part in side]) for side in zip(*layers, strict=True))
    active = u != 0
    return {"edq_ratio": (u * e).sum() / (u**2).sum(), "lost_update_ratio": (e[active] == 0).mean()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edq_ratio", "lost_update_ratio"])
def test_the_true_value_is_inside_about_95_times_of_100(name):
    generator = np.random.default_rng(11)
    layers = [layer(generator, blocks) for blocks in (900, 400, 64)]
    expected = truth(layers)[name]
    repeats, given, inside = 800, 0, 0
    for _ in range(repeats):
        merged = merge_shards([sampled_totals(generator, u, e, min(64, len(u))) for u, e in layers])
        low, high = interval(name, merged)
        given += bool(np.isfinite(low[0]))
        inside += bool(low[0] <= expected <= high[0])
    assert given >= 0.9 * repeats
    assert 0.93 <= inside / given <= 0.975


def test_the_same_sample_over_many_steps_does_not_pretend_to_know_more():
    one = of_900_blocks(64)
    np.testing.assert_allclose(
        interval("edq_ratio", merge_steps([one] * 16)), interval("edq_ratio", one), rtol=1e-9
    )


def test_measured_whole_means_width_zero_even_of_few_blocks():
    generator = np.random.default_rng(1)
    u, e = layer(generator, 5)
    merged = sampled(generator, u, e, 5)
    for name, value in truth([(u, e)]).items():
        low, high = interval(name, merged)
        assert low == high == pytest.approx(value)


def test_fewer_than_twenty_active_blocks_say_nothing():
    generator = np.random.default_rng(2)
    u, e = layer(generator, 100)
    for count, known in ((19, False), (20, True)):
        low, high = interval("lost_update_ratio", sampled(generator, u, e, count))
        assert np.isfinite([low, high]).all() == known


@pytest.mark.parametrize(("size", "known"), [(1.0, True), (100.0, False)])
def test_a_ratio_that_few_blocks_decide_has_no_interval(size, known):
    """Blocks alike, but for one whose updates are `size` times as large and arrive otherwise."""
    generator = np.random.default_rng(4)
    u = generator.normal(size=(500, BLOCK))
    e = u * generator.choice([0.0, 1.0, 2.0], size=u.shape)
    u[0] *= size
    totals = [sampled(generator, u, e, 400) for _ in range(20)]
    seen = [merged for merged in totals if known or merged["intended_squared_sum"] > 1e5]
    assert seen
    assert [bool(np.isfinite(interval("edq_ratio", merged)[0])) for merged in seen] == [known] * len(seen)


def test_a_sample_that_misses_what_moves_the_weights_has_no_interval():
    totals = of_900_blocks(128)
    assert np.isfinite(interval("edq_ratio", totals)).all()
    spread = totals["variance_denominator/edq_ratio"]
    for errors, known in ((2.0, True), (2.5, False)):
        low, _ = interval("edq_ratio", totals | {"unseen_variance": errors**2 * spread})
        assert bool(np.isfinite(low)) == known
    steps = merge_steps([totals | {"unseen_variance": 6.0 * spread}] * 4)
    assert np.isnan(interval("edq_ratio", steps)[0])


def ratio_and_deviation(totals):
    """EDQ and the standard deviation of its estimate, linearised."""
    parts = (totals[f"{part}/edq_ratio"] for part in ("variance_numerator", "covariance", "variance_denominator"))
    numerator, covariance, denominator = parts
    ratio = totals["intended_effective_sum"] / totals["intended_squared_sum"]
    squared = numerator - 2 * ratio * covariance + ratio**2 * denominator
    return ratio, np.sqrt(squared)


def test_the_fewer_blocks_the_variance_comes_from_the_wider_is_the_interval():
    totals = of_900_blocks(128)
    ratio, deviation = ratio_and_deviation(totals)
    for sources in (3.9, 4, 5, 8):
        low, high = interval("edq_ratio", totals | {"fourth_moment/edq_ratio": deviation**4 / sources})
        half = student_quantile(max(sources - 1, 4)) * deviation / totals["intended_squared_sum"]
        half = half if sources >= 4 else np.nan
        np.testing.assert_allclose([low, high], [ratio - half, ratio + half], rtol=1e-9)


@pytest.mark.parametrize("count", [40, 75])
def test_blocks_that_differ_count_as_fewer_however_large_a_part_of_the_tensor_they_are(count):
    u, e = layer(np.random.default_rng(4), 80)
    totals = sampled(np.random.default_rng(4), u, e, count)
    squares = (u[np.random.default_rng(4).permutation(80)[:count]] ** 2).sum(axis=1)
    alike = count / (1 + squares.var(ddof=1) / squares.mean() ** 2)
    ratio, deviation = ratio_and_deviation(totals)
    half = student_quantile(alike - 1) * deviation / totals["intended_squared_sum"]
    found = interval("edq_ratio", totals | {"fourth_moment/edq_ratio": np.zeros(1)})
    np.testing.assert_allclose(found, [ratio - half, ratio + half], rtol=1e-9)


def test_zero_losses_do_not_give_zero_width():
    generator = np.random.default_rng(3)
    u = generator.normal(size=(500, BLOCK))
    merged = sampled(generator, u, u, 60)
    low, high = interval("lost_update_ratio", merged)
    assert low == 0.0
    assert 0.0 < high < 0.1
    everything_lost = sampled(generator, u, np.zeros_like(u), 60)
    low, high = interval("lost_update_ratio", everything_lost)
    assert 0.9 < low < 1.0
    assert high == 1.0


def test_a_share_that_blocks_cannot_tell_apart_gains_nothing_from_more_steps():
    u = np.ones((500, BLOCK))
    e = np.where(np.arange(BLOCK) < BLOCK // 2, 0.0, u)
    one = sampled(np.random.default_rng(0), u, e, 60)
    assert one["variance_numerator/lost_update_ratio"] == 0
    low, high = interval("lost_update_ratio", one)
    assert 0.01 < high - low < 0.1
    np.testing.assert_allclose(interval("lost_update_ratio", merge_steps([one] * 40)), [low, high])


def test_an_empty_shard_and_an_idle_one_are_undefined_without_a_warning():
    idle = sampled_totals(np.random.default_rng(0), np.zeros((40, 2)), np.zeros((40, 2)), 30)
    for totals in (idle, dict.fromkeys(idle, np.zeros(1))):
        for name in ("edq_ratio", "lost_update_ratio"):
            assert np.isnan(interval(name, totals)).all()


def test_shares_stay_between_zero_and_one():
    generator = np.random.default_rng(9)
    for share in (0.001, 0.01, 0.5, 0.99, 0.999):
        u = generator.normal(size=(300, BLOCK))
        e = np.where(generator.random((300, 1)) < share, 0.0, u)
        low, high = interval("lost_update_ratio", sampled(generator, u, e, 40))
        assert 0.0 <= low[0] <= high[0] <= 1.0
