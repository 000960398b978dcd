"""A checkpoint is trained once, and going on from it loses only what a strategy cannot hold."""

import pytest
import torch
from collage_demo.corpus import Corpus
from collage_demo.recipe import Plan, Recipe
from collage_optim import CollageAdamW
from collage_studies.pretrained import build_from_weights, checkpoint

RECIPE = Recipe(steps=4, batch_size=4, length=32, layers=1, width=32, warm_up_steps=2, learning_rate=1e-2)
PLAIN = Plan("plain", "float32")


@pytest.fixture(scope="module")
def corpus():
    text = torch.randint(256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Corpus(text[:4000], text[4000:])


@pytest.fixture(scope="module")
def weights(corpus, tmp_path_factory):
    return checkpoint(RECIPE, corpus, tmp_path_factory.mktemp("checkpoints"))


def test_the_same_recipe_gives_the_same_weights_and_is_trained_once(corpus, weights, tmp_path):
    again = checkpoint(RECIPE, corpus, tmp_path)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    (kept,) = tmp_path.iterdir()
    written = kept.stat().st_mtime_ns
    checkpoint(RECIPE, corpus, tmp_path)
    assert kept.stat().st_mtime_ns == written
    checkpoint(Recipe(**{**vars(RECIPE), "seed": 2}), corpus, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def stored(optimizer, weight):
    assert isinstance(optimizer, CollageAdamW)
    return optimizer.stored_parameter(weight)


@pytest.mark.parametrize("plan", [PLAIN, Plan("plain", "bfloat16"), Plan("plus", "bfloat16")])
def test_all_begin_with_the_weights_rounded_to_bfloat16(weights, plan):
    model, (optimizer,) = build_from_weights(weights)(plan, RECIPE)
    for name, weight in model.named_parameters():
        assert torch.equal(weight.float(), weights[name].to(torch.bfloat16).float())
        assert torch.equal(stored(optimizer, weight), weight.detach().double())


@pytest.mark.parametrize(
    ("plan", "bits"),
    [
        (PLAIN, 24),
        (Plan("light", "bfloat16"), 16),
        (Plan("plus", "bfloat16"), 16),
        (Plan("split-master", "bfloat16"), 23),
    ],
)
def test_from_the_exact_checkpoint_each_keeps_the_bits_it_can(weights, plan, bits):
    model, (optimizer,) = build_from_weights(weights, exact=True)(plan, RECIPE)
    for name, weight in model.named_parameters():
        exact = weights[name].double()
        if plan.dtype == "bfloat16":
            assert torch.equal(weight, weights[name].to(torch.bfloat16))
        off = (stored(optimizer, weight) - exact).abs()
        assert (off <= exact.abs() * 2.0**-bits).all()


def test_adapters_go_on_from_the_frozen_checkpoint(weights):
    model, (optimizer,) = build_from_weights(weights, rank=2)(Plan("plus", "bfloat16"), RECIPE)
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    assert [id(weight) for group in optimizer.param_groups for weight in group["params"]] == list(map(id, learning))
    assert torch.equal(model.get_parameter("tokens.weight"), weights["tokens.weight"].to(torch.bfloat16))
