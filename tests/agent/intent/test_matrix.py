"""Every configuration: how u is found, what is seen, u against a whole fp64 re-run, and training is untouched."""

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.intent.optimizer_clone import isolated
from collage_agent.step.touched_rows import TouchedBucket

from tests.agent.intent.matrix import BF16, CASES, CONFIGURATIONS, model, table
from tests.agent.intent.references import bitsandbytes_rerun, rerun, stored, torchao_rerun
from tests.docs.test_links import ROOT

STEPS = 10
IDS = [f"{entry.title} {str(dtype).removeprefix('torch.')}" for entry, dtype in CASES]


def cases(*kinds, without=()):
    """A mark that gives a test each case of such a kind that can be stepped."""
    named = zip(CASES, IDS, strict=True)
    found = [
        pytest.param(*case, id=name) for case, name in named if case[0].kind in kinds and case[0] not in without
    ]
    return pytest.mark.parametrize(("entry", "dtype"), found)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.drawn(
        by=lambda entry, dtype: (
            entry.library,
            (entry.kind, entry.strategy if dtype == BF16 else "plain"),
            entry.sparse,
            entry.matrices,
            dtype,
        )
    ),
    pytest.mark.filterwarnings("ignore:Parameter .foreach. is deprecated:DeprecationWarning"),
]


def train(module, optimizer, steps, start=0):
    # What a step compiles is not what is tested here.
    with torch.compiler.set_stance("force_eager"):
        for step in range(start, start + steps):
            backward(module, optimizer, step)
            optimizer.step()


def backward(module, optimizer, step):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step)
    weight = next(module.parameters())
    if isinstance(module, torch.nn.EmbeddingBag):
        outputs = module(torch.randint(0, 64, (8, 4), generator=generator))
    else:
        outputs = module(torch.randn(16, 64, generator=generator).to(weight.dtype))
    (outputs.float() - 1).square().mean().backward()


def reference(entry, optimizer):
    reruns = {"torchao": torchao_rerun, "bitsandbytes": bitsandbytes_rerun}
    return reruns.get(entry.library, rerun)(optimizer)


def test_the_docs_list_the_configurations():
    listed = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in listed
    assert f"{len(CONFIGURATIONS)} configurations, {len(CASES)} with their dtypes" in listed
    assert len({entry.title for entry in CONFIGURATIONS}) == len(CONFIGURATIONS) >= 50


@pytest.mark.parametrize(("entry", "dtype"), CASES, ids=IDS)
def test_it_is_classified_and_its_training_is_untouched(entry, dtype):
    results = []
    for watched in (True, False):
        module = model(entry, dtype)
        optimizer = entry.make(module.parameters())
        handle = watch(module, optimizer, every=2, sample=512, budget=None) if watched else None
        if not entry.closure:
            torch.manual_seed(7)
            train(module, optimizer, STEPS)
        results.append(([p.detach().clone() for p in module.parameters()], torch.get_rng_state()))
        if handle is not None:
            info = handle.info
            assert info.intent == entry.kind, info.intent_reason
            assert info.observed_strategy == (entry.strategy if dtype == BF16 else "plain")
            assert info.intent in ("shadow", "rule") or info.intent_reason
    (with_agent, random_with), (without, random_without) = results
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(with_agent, without, strict=True))
    assert torch.equal(random_with, random_without)


@cases("shadow", "rule", without=[entry for entry in CONFIGURATIONS if entry.library == "ours"])
def test_u_is_that_of_a_whole_rerun_in_fp64(entry, dtype):
    module = model(entry, dtype)
    optimizer = entry.make(module.parameters())
    handle = watch(module, optimizer, every=1, sample="all")
    # RAdam without a schedule does not move before its sixth step.
    train(module, optimizer, 7)
    backward(module, optimizer, 7)
    expected = reference(entry, optimizer)
    measurer = handle._hooks[0].measurer
    with isolated(torch.device("cpu")):
        measurer.before(optimizer, closure=False)
        found = {}
        for bucket in measurer._buckets:
            flat, position = bucket.intended(None), 0
            if entry.sparse:
                assert isinstance(bucket, TouchedBucket)
                rows = bucket.rows
                found[0] = torch.zeros_like(expected[0]).flatten()
                found[0][rows.index[rows.held]] = flat[rows.held.view(-1)]
                continue
            for member, parameter in zip(bucket.members, bucket.parameters, strict=True):
                found[member] = flat[position : position + parameter.numel()].clone()
                position += -(-parameter.numel() // bucket.layout.block) * bucket.layout.block
    assert len(found) == len(expected)
    for member, u in enumerate(expected):
        difference = (found[member] - u.flatten()).abs().max()
        # What several uses of a row add up to is summed in fp32, as the optimizer sums it.
        tolerance = 1e-7 if entry.sparse else 1e-9
        assert float(difference) <= tolerance * float(u.abs().max()) > 0, member


@cases("whole-tensor", without=[entry for entry in CONFIGURATIONS if entry.name == "Muon"])
def test_sums_of_whole_tensors_are_those_of_a_rerun(entry, dtype):
    module = model(entry, dtype)
    optimizer = entry.make(module.parameters())
    handle = watch(module, optimizer, every=1, sample=64, budget=None)
    train(module, optimizer, 3)
    backward(module, optimizer, 3)
    expected = reference(entry, optimizer)
    before = [stored(optimizer, p) for p in module.parameters()]
    optimizer.step()
    layers = handle.summary()["layers"]
    for (name, p), u, start in zip(module.named_parameters(), expected, before, strict=True):
        e = stored(optimizer, p) - start
        ratio = float((u * e).sum() / (u * u).sum())
        assert layers[name]["edq_ratio"] == pytest.approx(ratio, rel=1e-9), name
        assert layers[name]["edq_ratio_low"] == layers[name]["edq_ratio"] == layers[name]["edq_ratio_high"]
