"""The compiled step: the eager step's bits, a self-test that notices folding, and a fall back to eager.

And its words of four elements: what is packed is unpacked bit for bit, wherever a vector begins.
"""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from collage_optim import (
    STRATEGIES,
    CollageAdam,
    CollageAdamW,
    CollageLion,
    CollageSGD,
    compiled,
    cpu_vectors,
)
from collage_optim.advance import advance_in_wide
from collage_optim.arithmetic import WideArithmetic
from collage_optim.cpu_vectors import ELEMENTS, begins_at_a_word, packed, unpacked, words
from collage_optim.integer_codes import stored_value
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

from tests.optim.models import assert_same_bits, give_gradients, parameters

pytestmark = pytest.mark.slow

BY_WORDS = ("split-master", "split-master-16bit")
SHAPES = ((300, 70), (30, 50), (7,), (1,), (10_007,))


def eager_and_compiled(
    optimizer_class, steps=10, dtype=torch.bfloat16, shapes=SHAPES, fp32_gradients=False, **options
):
    """Both optimizers after the same steps, the learning rate changing on the way.

    fp32_gradients: as they are accumulated for weights in bfloat16.
    """
    first, second = parameters(dtype, shapes), parameters(dtype, shapes)
    for member in (*first, *second) if fp32_gradients else ():
        member.grad_dtype = torch.float32
    options = {"seed": 7, **options}
    optimizers = optimizer_class(first, **options), optimizer_class(second, compiled=True, **options)
    for step in range(steps):
        give_gradients(first, second, step=step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            optimizer.step()
    return optimizers


@pytest.fixture(autouse=True)
def _fresh_compilations():
    compiled.compiled_step.cache_clear()
    yield
    compiled.compiled_step.cache_clear()


@pytest.fixture
def fp64_roots(monkeypatch):
    """Roots are taken in fp64: eager fp32 roots, which stand in for compiled ones, are exact on some CPUs only."""
    monkeypatch.setattr(compiled, "_rounds_roots_correctly", lambda: False)


@pytest.mark.parametrize(
    ("strategy", "shapes"),
    [
        ("plus", SHAPES[:3]),
        *(pytest.param(name, SHAPES, marks=pytest.mark.nightly) for name in ("plus", *BY_WORDS)),
    ],
)
def test_same_bits(strategy, shapes):
    """And compiled once: the self-test's code is the one that steps. By day without a weight of a single element,
    for which the compiler starts again."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_bits(*eager_and_compiled(CollageAdamW, strategy=strategy, shapes=shapes))


def doubled(x):
    return (x.view(torch.int32) + 0x800000).view(torch.float32)


@pytest.mark.nightly
def test_casts_stay_in_registers_while_our_step_is_compiled():
    """torch's compiler has private names that this leans on; what a user compiles is left as it is."""
    x, written = torch.rand(1000), []
    for within in (cpu_vectors.casts_in_registers(), contextlib.nullcontext()):
        torch._dynamo.reset()
        with warnings.catch_warnings(action="ignore"), within, fresh_inductor_cache():
            compiled_form = torch.compile(doubled, dynamic=True, options=compiled.COMPILER_OPTIONS)
            result, code = run_and_get_code(compiled_form, x)
        assert torch.equal(result, 2 * x)
        written.append(["tmpbuf" in "".join(code), "at::vec::cast<" in "".join(code)])
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert written == [[False, vectors], [vectors, False]]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", BY_WORDS)
def test_between_words_and_numbers_that_are_not_finite_stay_where_they_are(strategy):
    """A weight that does not begin at a word of four elements, and one shorter than a word. NaN of both signs,
    infinities, the largest number, 1e21; a NaN has many forms in bits: as values, the eager step's."""
    found = []
    for form in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 4_004).to(torch.bfloat16)[1:])
        short = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        groups = [{"params": [weight]}, {"params": [short]}]
        optimizer = CollageAdamW(groups, strategy=strategy, seed=7, compiled=form)
        for step in range(4):
            give_gradients([weight, short], step=step, scale=1.0)
            if step == 1:
                gradient: Any = weight.grad
                for part in (gradient[:6], gradient[-6:]):  # In whole words, and behind them.
                    part.view(torch.int16)[:] = torch.tensor([0x7FC0, -1, 0x7F80, -128, 0x7F7F, 0x6258])
            optimizer.step()
        for own in (weight, short):
            averages = [stored_value(optimizer.state[own], name) for name in ("exp_avg", "exp_avg_sq")]
            found.append([optimizer.stored_parameter(own), *averages])
    assert not any(part.isfinite().all() and part.max() <= 1e37 for part in found[0])
    for eager, compiled_ones in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(compiled_ones, eager, rtol=0, atol=0, equal_nan=True)


def added(components, packed, numbers):
    components["parameter"].add_(components["gradient"]).mul_(packed[0])


def test_later_calls_go_past_the_checks_of_the_compiler(monkeypatch):
    """Not with a gradient of another format, and not for a single element, which the compiler takes for fixed."""
    call, packed = compiled.DirectCall(added, compiled.COMPILER_OPTIONS), torch.tensor([2.0])
    checked, through = call._checked, []

    def counted(*given):
        through.append(1)
        checked(*given)

    monkeypatch.setattr(call, "_checked", counted)
    forms = [
        (40, torch.float32),
        (70, torch.float32),
        (40, torch.bfloat16),
        (70, torch.bfloat16),
        (1, torch.float32),
    ]
    for elements, dtype in forms:
        weight, gradient = torch.linspace(-1, 1, elements), torch.ones(elements, dtype=dtype)
        expected = (weight + 1) * 2
        call({"parameter": weight, "gradient": gradient}, packed, None)()
        assert torch.equal(weight, expected)
        through.append(0)
    assert through == [1, 0, 0, 1, 0, 0, 1, 0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (CollageAdamW, {"strategy": "full", "amsgrad": True}),
        (CollageAdamW, {"strategy": "kahan", "maximize": True}),
        (CollageAdamW, {"strategy": "split-master", "fp32_gradients": True}),
        (CollageAdamW, {"strategy": "master-weights"}),
        (CollageAdamW, {"strategy": "stochastic"}),
        (CollageAdamW, {"strategy": "light-stochastic"}),
        (CollageAdamW, {"strategy": "split-master-16bit", "amsgrad": True}),
        (CollageLion, {"strategy": "split-master", "weight_decay": 0.1}),
        (CollageAdamW, {"strategy": "plain", "dtype": torch.float32}),
        (CollageAdamW, {"strategy": "plain", "dtype": torch.float64}),
        (CollageAdam, {"strategy": "fp32-states", "weight_decay": 0.1}),
        (CollageSGD, {"strategy": "light", "momentum": 0.9, "nesterov": True, "dtype": torch.float16}),
        (CollageLion, {"strategy": "full", "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_other_strategies_and_rules(optimizer_class, options):
    assert_same_bits(*eager_and_compiled(optimizer_class, steps=200, **options))


def uncompiled(structure, root):
    """The step as compiled.py writes it, without the compiler; roots exact, as the compiler's are."""
    wide = WideArithmetic(None, torch.float32, torch.float64)
    step = compiled._step(structure, {})

    def advance(components, scalars, source):
        own = dict(zip(structure.scalar_names, scalars["packed"].unbind(), strict=True))
        return lambda: advance_in_wide(step, wide, components, own, source)

    return advance


def folds(structure, root):
    """The low component is always zero, as a compiler leaves it that folds the casts."""
    return changed(uncompiled(structure, root), lambda components: components["parameter_low"].zero_())


def errs(structure, root):
    return changed(uncompiled(structure, root), lambda components: components["exp_avg_sq"][5].mul_(1.5))


def changed(advance, change):
    def changed_step(components, scalars, source):
        run = advance(components, scalars, source)
        return lambda: (run(), change(components))

    return changed_step


def missing(structure, root):
    raise FileNotFoundError("no C++ compiler")


@pytest.mark.usefixtures("fp64_roots")
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (folds, "folds the low component to zero; stepping eagerly"),
        (errs, "exp_avg_sq differs from the eager step"),
        (missing, r"FileNotFoundError: no C\+\+ compiler; stepping eagerly"),
    ],
)
def test_what_is_not_right_is_noticed_and_steps_are_eager_after_one_warning(monkeypatch, made, words):
    monkeypatch.setattr(compiled, "_compile", made)
    with pytest.warns(RuntimeWarning, match=words) as caught:
        optimizers = eager_and_compiled(CollageAdamW, strategy="plus")
    assert len(caught) == 1
    assert_same_bits(*optimizers)


@pytest.mark.usefixtures("fp64_roots")
def test_a_root_that_is_an_ulp_off_is_replaced_by_the_fp64_one(monkeypatch):
    """torch's eager fp32 root is an ulp off on some machines, as a compiler's may be."""
    roots = []

    def noted(structure, root):
        roots.append(root)
        return uncompiled(structure, root)

    monkeypatch.setattr(compiled, "_compile", noted)
    eager_and_compiled(CollageAdamW, strategy="plus", steps=1)
    assert roots == [torch.float64]


@pytest.mark.usefixtures("fp64_roots")
def test_functional_form_gives_the_eager_bits_before_compiling(monkeypatch):
    """What is compiled, run without the compiler, passes the bitwise self-test for every strategy."""
    monkeypatch.setattr(compiled, "_compile", uncompiled)
    for strategy in [name for name, kept in STRATEGIES.items() if not kept.first_moment.has_scales]:
        assert_same_bits(*eager_and_compiled(CollageAdamW, strategy=strategy, amsgrad=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compiled": "fast"}, "Invalid compiled: 'fast'; use True .* or False"),
        ({"compiled": "bit-identical"}, "Invalid compiled: 'bit-identical'; use True .* or False"),
        ({"compiled": 1}, "Invalid compiled: 1; use True .* or False"),
        ({"compiled": True, "strategy": "split-master-8bit"}, "compiled=True has no blocks on a CPU"),
        ({"compiled": True, "arithmetic": "storage"}, "compiled=True is for arithmetic 'fp32'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CollageAdamW(parameters(), **options)


COUNT = 4096


def any_bits(dtype):
    """Every kind of number of the format: NaN, infinity and subnormals too."""
    bits = torch.int8 if dtype == torch.int8 else torch.int16
    limits = torch.iinfo(bits)
    return torch.randint(limits.min, limits.max + 1, (COUNT,), dtype=bits).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.int8], ids=str)
def test_each_element_of_a_word_is_found_and_packed_again(dtype):
    vector = any_bits(dtype)
    word = words({"vector": vector})["vector"]
    assert word.shape == (COUNT // ELEMENTS,)
    found = [unpacked(word, place, dtype) for place in range(ELEMENTS)]
    for place, elements in enumerate(found):
        own = vector[place::ELEMENTS]
        if dtype == torch.bfloat16:
            # The upper half of an fp32; a comparison of floats would pass over NaN.
            assert torch.equal(elements.view(torch.int32), own.view(torch.int16).to(torch.int32) << 16)
        else:
            assert torch.equal(elements, own.to(torch.int32))
    assert torch.equal(packed(found, dtype), word)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_formats_stay_rows_of_four(dtype):
    """A gradient of another format than its weight's, too."""
    vector, weight = torch.randn(40).to(dtype), torch.randn(40).to(torch.bfloat16)
    found = words({"parameter": weight, "gradient": vector})
    assert found["gradient"].data_ptr() == vector.data_ptr()
    for place in range(ELEMENTS):
        assert torch.equal(unpacked(found["parameter"], place, weight.dtype), weight[place::ELEMENTS])
        assert torch.equal(unpacked(found["gradient"], place, weight.dtype), vector[place::ELEMENTS])


@pytest.mark.parametrize(("first", "whole"), [(1, False), (4, True)])
def test_what_lies_between_words_is_copied(first, whole):
    vector = any_bits(torch.int16)[first : first + 8]
    assert begins_at_a_word(vector) is whole
    word = words({"vector": vector})["vector"]
    assert (word.data_ptr() == vector.data_ptr()) is whole
    assert torch.equal(word.view(torch.int16), vector)
