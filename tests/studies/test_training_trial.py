"""What trainings of studies begin with, by what they learn, and the loss of stored weights.

Adapters begin as the frozen model, only they learn, and every dtype starts from the same numbers. A checkpoint is
trained once, and going on from it loses only what a strategy cannot hold.
"""

from dataclasses import replace

import pytest
import torch
from collage_demo.corpus import Corpus, batch, standard_library
from collage_demo.models import ByteGPT, loss_of
from collage_demo.recipe import Plan, Recipe
from collage_optim import CollageAdamW
from collage_studies.low_rank_adapters import ADAPTED, adapt
from collage_studies.pretrained import build_from_weights, checkpoint
from collage_studies.training_trial import SampledRewards, stored_loss
from torch import nn


class Logits(nn.Module):
    def __init__(self, chances):
        super().__init__()
        self.own = nn.Parameter(torch.tensor(chances).log())

    def forward(self, inputs):
        return self.own.expand(*inputs.shape, -1)


def test_the_mean_gradient_is_that_of_the_expected_reward():
    logits = Logits([0.5, 0.3, 0.2])
    model = SampledRewards(logits, seed=1)
    targets = torch.ones(8, 50_000, dtype=torch.long)
    loss_of(model, targets, targets).backward()
    expected = [0.3 * 0.5, -0.3 * (1 - 0.3), 0.3 * 0.2]
    assert logits.own.grad is not None
    assert logits.own.grad.tolist() == pytest.approx(expected, abs=3e-3)


@pytest.mark.slow
def test_the_stored_loss_reads_bits_that_the_weight_lacks():
    torch.manual_seed(0)
    model = ByteGPT(layers=1, width=32, length=32).to(torch.bfloat16)
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, strategy="split-master", seed=1)
    recipe, corpus = Recipe(layers=1, width=32, length=32, batch_size=2), standard_library()
    loss_of(model, *batch(corpus.training, 2, 32, 1)).backward()
    optimizer.step()
    whole = ByteGPT(layers=1, width=32, length=32)
    whole.load_state_dict({name: optimizer.stored_parameter(p) for name, p in model.named_parameters()})
    with torch.no_grad():
        losses = [loss_of(whole, *batch(corpus.validation, 2, 32, 10**9 + number)).item() for number in range(64)]
    assert stored_loss(model, optimizer, recipe, corpus) == pytest.approx(sum(losses) / 64, rel=1e-6)
    rounded = CollageAdamW(model.parameters(), strategy="plain")
    assert stored_loss(model, rounded, recipe, corpus) != pytest.approx(sum(losses) / 64, rel=1e-6)
    assert 0.9 < stored_loss(model, optimizer, recipe, corpus, rewards=True) < 1


LAYERS, RANK = 2, 3


def adapted(dtype=torch.float32, seed=1):
    torch.manual_seed(0)
    model = ByteGPT(layers=LAYERS, width=32, length=16).to(torch.bfloat16).to(dtype)
    adapt(model, RANK, 2.0, seed)
    return model


def learning(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def inputs():
    return torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def test_an_adapted_model_begins_as_the_frozen_one():
    torch.manual_seed(0)
    plain = ByteGPT(layers=LAYERS, width=32, length=16).to(torch.bfloat16).float()
    with torch.no_grad():
        assert torch.equal(adapted()(inputs()), plain(inputs()))


def test_only_adapters_learn_and_each_linear_layer_of_a_block_has_one():
    model = adapted()
    found = learning(model)
    assert len(found) == 2 * len(ADAPTED) * LAYERS
    assert all(".adapter_in." in name or ".adapter_out." in name for name in found)
    frozen = {name: weight.clone() for name, weight in model.named_parameters() if name not in found}
    optimizer = torch.optim.SGD(found.values(), lr=1.0)
    for _ in range(2):
        loss_of(model, inputs(), inputs()).backward()
        optimizer.step()
    assert all(torch.equal(frozen[name], model.get_parameter(name)) for name in frozen)
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in found.values())


def test_what_is_added_is_the_product_times_the_scale():
    layer = adapted().blocks[0].perceptron
    with torch.no_grad():
        layer.adapter_out.weight.normal_(generator=torch.Generator().manual_seed(2))
        given = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
        weight = layer.base.weight + 2.0 * layer.adapter_out.weight @ layer.adapter_in.weight
        torch.testing.assert_close(layer(given), given @ weight.T + layer.base.bias)


def test_the_seed_decides_the_adapters_in_any_dtype():
    low, high, other = adapted(torch.bfloat16), adapted(), adapted(seed=2)
    for name, weight in learning(high).items():
        assert low.get_parameter(name).dtype == torch.bfloat16
        assert torch.equal(low.get_parameter(name).float(), weight)
    assert not torch.equal(high.blocks[0].attention.adapter_in.weight, other.blocks[0].attention.adapter_in.weight)


RECIPE = Recipe(steps=4, batch_size=4, length=32, layers=1, width=32, warm_up_steps=2, learning_rate=1e-2)


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
    checkpoint(replace(RECIPE, seed=2), corpus, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def stored(optimizer, weight):
    assert isinstance(optimizer, CollageAdamW)
    return optimizer.stored_parameter(weight)


@pytest.mark.parametrize(
    ("strategy", "dtype", "exact", "bits"),
    [
        *((*plan, False, None) for plan in (("plain", "float32"), ("plain", "bfloat16"), ("plus", "bfloat16"))),
        ("plain", "float32", True, 24),
        *((name, "bfloat16", True, bits) for name, bits in (("light", 16), ("plus", 16), ("split-master", 23))),
    ],
)
def test_all_begin_with_the_weights_rounded_to_bfloat16_or_the_bits_that_each_can_keep(
    weights, strategy, dtype, exact, bits
):
    model, (optimizer,) = build_from_weights(weights, exact=exact)(Plan(strategy, dtype), RECIPE)
    assert isinstance(optimizer, CollageAdamW)
    for name, weight in model.named_parameters():
        rounded, whole, stored = (
            weights[name].bfloat16(),
            weights[name].double(),
            optimizer.stored_parameter(weight),
        )
        if not exact:
            assert torch.equal(stored, rounded.double())
        else:
            assert ((stored - whole).abs() <= whole.abs() * 2.0**-bits).all()
        if not exact or dtype == "bfloat16":
            assert torch.equal(weight.float(), rounded.float())


def test_adapters_go_on_from_the_frozen_checkpoint(weights):
    model, (optimizer,) = build_from_weights(weights, rank=2)(Plan("plus", "bfloat16"), RECIPE)
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    assert [id(weight) for group in optimizer.param_groups for weight in group["params"]] == list(map(id, learning))
    assert torch.equal(model.get_parameter("tokens.weight"), weights["tokens.weight"].to(torch.bfloat16))
