"""What a process finds in which Triton is installed, in its interpreter: kernels beside eager steps, bit by bit.

`test_device_step.py` starts it, because Triton lies apart from the other packages, and its interpreter is chosen
before a kernel is built:

    TRITON_INTERPRET=1 python -m tests.optim.with_triton PART …

PART is a function of this module, and what follows its arguments.
"""

import contextlib
import itertools
import logging
import math
import random
import sys
import warnings
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from collage_agent.handle import watch
from collage_agent.intent import intent_choice
from collage_optim import (
    STRATEGIES,
    CollageAdam,
    CollageAdamW,
    CollageLion,
    CollageSGD,
    RuleOptimizer,
    base,
    compiled,
    device_step,
    update_rules,
)
from collage_optim.device_code import Recorder, built, kernel_source
from collage_optim.integer_codes import stored_value
from collage_optim.step_totals import GROUP_ROWS, StepTotals, added_by_tensor, groups_of
from torch.utils._python_dispatch import TorchDispatchMode

from examples.extension_rule.adabelief_rule import AdaBelief
from tests.agent.step.test_measurer import totals_of
from tests.optim.models import assert_same_bits

RULES: dict[str, Any] = {
    "Adam": (CollageAdam, {}),
    "AdamW": (CollageAdamW, {}),
    "AMSGrad": (CollageAdamW, {"amsgrad": True}),
    "Lion": (CollageLion, {}),
    "SGD": (CollageSGD, {}),
    "momentum": (CollageSGD, {"momentum": 0.9, "dampening": 0.5}),
    "Nesterov": (CollageSGD, {"momentum": 0.9, "nesterov": True}),
    "another package's": (RuleOptimizer, {"rule": "adabelief", "eps": 1e-12}),
}
TESTED, ALIGNED = 1_035, 1_024
"""Elements of the self-test: one chunk and a little, as the interpreter takes milliseconds for each."""


@contextlib.contextmanager
def kernels(device_is_there):
    """Steps on this CPU are kernels, as on a CUDA device, if it `device_is_there`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "launches", lambda device: device_is_there)
        patch.setattr(compiled, "TESTED_ELEMENTS", TESTED)
        patch.setattr(compiled, "_ALIGNED_ELEMENTS", ALIGNED)
        yield


def drawn_options(draw, rule):
    """Everything but rule and strategy, as keywords."""
    options = {"maximize": draw.random() < 0.3, "weight_decay": draw.choice((0.0, 0.1)), "seed": draw.randrange(99)}
    if rule == "SGD" or rule == "another package's":
        options["weight_decay"] = 0.1
    return options


def drawn_weights(draw, dtype):
    """Tensors of about a chunk and less, aligned or not; at times one is not contiguous and one has no elements."""
    elements = [draw.choice((1, 2, 15, 127)), draw.randrange(3, 700), draw.choice((64, 128, 1024, 1040))]
    weights = []
    simple = draw.random() < 0.5
    for size in elements if simple else (*elements, 0):
        offset = draw.choice((0, 0, 1, 8))
        weights.append((torch.randn(size + offset) * 0.02).to(dtype)[offset:])
    if not simple:
        weights.append((torch.randn(9, 16) * 0.02).to(dtype).t())
    return [torch.nn.Parameter(weight) for weight in draw.sample(weights, len(weights))]


def like(weights):
    """The same numbers in memory of their own, at the same alignment and strides."""
    copies = []
    for weight in weights:
        own = torch.empty(weight.storage_offset() + weight.numel(), dtype=weight.dtype)
        own = own[weight.storage_offset() :].as_strided(weight.shape, weight.stride(), weight.storage_offset())
        copies.append(torch.nn.Parameter(own.copy_(weight.detach())))
    return copies


def part_of(*rules):
    """Makes a part of the check of a pair: prints how much was checked of the rules with each strategy.

    share: of the pairs one in so many is looked at, so that each rule and each strategy comes up.
    """

    def part_of_check(check):
        def part(seed, share):
            found = 0
            for (number, rule), (place, strategy) in itertools.product(enumerate(rules), enumerate(STRATEGIES)):
                if (number + place + int(seed)) % int(share):
                    continue
                draw = random.Random(f"{seed} {rule} {strategy}")
                torch.manual_seed(draw.randrange(2**32))
                kind, own = RULES[rule]
                options = {**own, **drawn_options(draw, rule), "strategy": strategy}
                try:
                    found += check(draw, kind, options)
                except Exception as error:
                    raise AssertionError(f"{rule}, {options}") from error
            sys.stdout.write(f"{found}\n")

        return part

    return part_of_check


@part_of(*RULES)
def law(draw, kind, options):
    """Every rule with every strategy: the kernel's bits are the eager step's. The seed draws all else: shapes,
    alignments, dtypes of weights and gradients, and options."""
    if options["strategy"] == "plain":
        dtypes = draw.sample((torch.bfloat16, torch.float16, torch.float32, torch.float64), 1)
    else:
        dtypes = draw.choice(((torch.bfloat16,), (torch.float16, torch.bfloat16)))
    for dtype in dtypes:  # The first that the strategy can keep is taken.
        weights = drawn_weights(draw, dtype)
        with contextlib.suppress(ValueError):  # Pairs that do not exist, and weights that cannot be kept.
            kind(like(weights), **options)
            break
    else:
        return 0
    gradient_dtype = dtype if dtype == torch.float64 else draw.choice((dtype, torch.float32))
    eager, kernel = optimizers = [kind(like(weights), **options) for _ in range(2)]
    for step in range(2):
        gradients = [torch.randn(weight.shape) * 1e-2 for weight in weights]
        for optimizer in optimizers:
            for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                weight.grad_dtype = gradient_dtype
                weight.grad = gradient.to(gradient_dtype)
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            with kernels(optimizer is kernel):
                optimizer.step()
    assert_same_bits(eager, kernel)
    return 1


def watched_totals(model, optimizer, step_taken):
    """The agent's own sums of the step, of every element, by layer."""
    handle = watch(model, optimizer, every=1, sample="all", casts=())
    with pytest.MonkeyPatch.context() as patch:
        # As on a device: torch's fused kernel may be off by an ulp of fp64.
        patch.setattr(intent_choice, "_is_fused", lambda *given: False)
        step_taken()
    handle.remove()
    return totals_of(handle)


def assert_same_sums(found, expected, told):
    """Counts are the agent's. Sums differ by the order of their terms: by 1e-13 of their sizes, a thousand times
    fp64's unit; a rounding variance by that of the sums that it compares, beneath its square."""
    size = expected["intended_squared_sum"] + expected["effective_squared_sum"] + expected["visible_squared_sum"]
    for key, value in found.items():
        name, _, label = key.partition("/")
        truth = expected.get(key, math.nan)
        if math.isnan(truth):
            assert name.startswith("state_"), (told, key)  # Of averages that are new, or not judged.
            continue
        bound = 0.0
        if name.endswith("rounding_variance"):
            value, truth = math.sqrt(value), math.sqrt(truth)
            bound = expected[f"state_decrement_intended_sum/{label}"] if label else size
        elif name.endswith("_sum"):
            bound = size if name in ("intended_effective_sum", "intended_visible_sum") else truth
        assert abs(value - truth) <= 1e-13 * abs(bound), (told, key, value, truth)


def totals_beside_the_agents(kind, options, weights, gradients, told, taken=lambda optimizer: optimizer.step()):
    """Two optimizers step alike: what the one's kernels add up is what the agent measures of the other's, whole.

    taken: makes the step of the former.
    """
    eager, kernel = (kind(like(weights), **options) for _ in range(2))
    found = 0
    for step, given in enumerate(gradients):
        for optimizer in (eager, kernel):
            for weight, gradient in zip(optimizer.param_groups[0]["params"], given, strict=True):
                weight.grad = gradient.to(weight.dtype)
        expected = watched_totals(torch.nn.ParameterList(eager.param_groups[0]["params"]), eager, eager.step)
        asked = kernel.step_totals = StepTotals()
        taken(kernel)
        for parameters, names, sums in asked.found:
            for parameter, row in zip(parameters, sums.tolist(), strict=True):
                place = next(n for n, own in enumerate(kernel.param_groups[0]["params"]) if own is parameter)
                row_of = dict(zip(names, row, strict=False))
                assert_same_sums(row_of, expected[str(place)], (*told, step, place))
                found += 1
        if not step:  # Numbers that are not finite have no one form.
            assert_same_bits(eager, kernel)
    return found


def gradients_for(draw, weights, steps=2):
    """Gradients of some steps; in the last tensor some are 0, and from the second step on one is not finite."""
    for step in range(steps):
        gradients = [torch.randn(weight.shape) * 1e-2 for weight in weights]
        elements = len(gradients[-1])
        gradients[-1][draw.randrange(elements // 2, elements) :] = 0.0
        if step:
            gradients[-1][draw.randrange(elements // 2)] = draw.choice((torch.nan, torch.inf))
        yield gradients


def by_kernel(optimizer):
    with kernels(True):
        optimizer.step()


@part_of(*RULES)
def totals(draw, kind, options):
    """What kernels add up is what the agent measures of whole tensors after eager steps: counts to the last, sums
    within fp64's rounding, and the bits of the step; of tails, several chunks, NaN."""
    weights = drawn_weights(draw, torch.bfloat16)
    weights = [weight for weight in weights if weight.numel() and weight.is_contiguous()]
    weights.append(torch.nn.Parameter((torch.randn(2_100) * 0.02).bfloat16()))
    if eager_of(kind, weights, options) is None:
        return 0
    seen = totals_beside_the_agents(kind, options, weights, gradients_for(draw, weights), (), by_kernel)
    assert seen == 2 * len(weights)
    return seen


def levels():
    """Rows are added by tensor in two levels, within fp64's rounding of the exact sums, whatever they cancel."""
    torch.manual_seed(0)
    counts = numpy.array([1, GROUP_ROWS, 0, 3, 5 * GROUP_ROWS + 7, GROUP_ROWS + 1])
    rows = torch.randn(int(counts.sum()), 4, dtype=torch.float64) * 10.0 ** torch.randint(-9, 10, (1, 4))
    rows[:, 3] = torch.where(torch.arange(len(rows)) % 2 == 0, 1e15, -1e15) + rows[:, 3]
    found = added_by_tensor(rows, *map(torch.from_numpy, groups_of(counts)))
    for tensor, own in enumerate(torch.split(rows, counts.tolist())):
        for column in range(rows.shape[1]):
            terms = [Fraction(value) for value in own[:, column].tolist()]
            most = (GROUP_ROWS + len(terms) // GROUP_ROWS + 1) * Fraction(2) ** -53 * sum(map(abs, terms))
            assert abs(Fraction(found[tensor, column].item()) - sum(terms)) <= most, (tensor, column)


def not_finite():
    """NaN of both signs, infinities, the largest number, 1e21 in the gradient: as values, the eager step's."""
    hard = torch.tensor([0x7FC0, -1, 0x7F80, -128, 0x7F7F, 0x6258], dtype=torch.int16).view(torch.bfloat16)
    for strategy in STRATEGIES:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1_300).to(torch.bfloat16))
        found = []
        for device_is_there in (False, True):
            (own,) = members = like([weight])
            optimizer = CollageAdamW(members, strategy=strategy, seed=7)
            own.grad = torch.full_like(own, 1e-3)
            own.grad[300:306] = hard
            with kernels(device_is_there):
                optimizer.step()
            kept = [stored_value(optimizer.state[own], name) for name in ("exp_avg", "exp_avg_sq")]
            found.append([optimizer.stored_parameter(own), *kept])
        assert not any(part.isfinite().all() and part.max() <= 1e37 for part in found[0])
        for eager, kernel in zip(*found, strict=True):
            torch.testing.assert_close(kernel, eager, rtol=0, atol=0, equal_nan=True, msg=strategy)


def eager_of(kind, weights, options):
    """An optimizer whose steps no kernel makes, its rate a tensor; None: there is no such pair."""
    with contextlib.suppress(ValueError), kernels(False):
        return kind(like(weights), **options, lr=torch.tensor(1e-3), compiled=False)
    return None


@part_of("AdamW", "Lion", "momentum", "Nesterov")
def scaled(draw, kind, options):
    """Steps counted on a device, under a GradScaler that skips one, of rates that are tensors there: the bits of
    eager steps after `unscale_`. A parameter has no gradient at first, so that counters differ, but not with random
    bits: eager steps join small tensors by their counters, which a host does not know here."""
    drawn = drawn_weights(draw, torch.bfloat16)
    if (eager := eager_of(kind, drawn, options)) is None:
        return 0
    with kernels(True):
        counted = kind(like(drawn), **options, lr=torch.tensor(1e-3), fused=True)
    dtype = draw.choice((torch.bfloat16, torch.float32))
    scalers = [torch.amp.GradScaler("cpu", init_scale=3.0 * 2**10) for _ in range(2)]
    for step in range(4):
        gradients = [torch.randn(weight.shape) * 1e-2 for weight in drawn]
        for optimizer, scaler in zip((eager, counted), scalers, strict=True):
            scaler.scale(torch.ones(()))
            weights = optimizer.param_groups[0]["params"]
            for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                weight.grad_dtype = dtype
                late = place == 1 and step == 0 and not STRATEGIES[optimizer.strategy].stochastic
                weight.grad = None if late else (gradient * 3 * 2**10).to(dtype)
            if step == 2:
                weights[0].grad.view(-1)[:1] = torch.inf
            with kernels(optimizer is counted):
                optimizer.param_groups[0]["lr"] *= 0.75
                scaler.step(optimizer)
            scaler.update(3.0 * 2**10)
    assert_same_bits_and_counters(eager, counted)
    return 1


def assert_same_bits_and_counters(eager, counted):
    for one, other in zip(*(own.param_groups[0]["params"] for own in (eager, counted)), strict=True):
        assert eager.state[one]["step"] == counted.state[other]["step"]
    assert_same_bits(eager, counted)


class Graph(TorchDispatchMode):
    """Acts as a CUDA graph on this CPU: notes operations and launches, and carries them out again where they were.

    Unlike a capture it also carries them out the first time. Reading a number, or handing one to the device, ends
    it, as it would end a capture.
    """

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a captured step reads a number"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.noted.append((func, args, kwargs, result))
        return result

    def launched(self, kernel, grid):
        def launch(*args, **options):
            with torch.utils._python_dispatch._disable_current_modes():
                kernel[grid](*args, **options)
            self.noted.append((kernel[grid], args, options, None))

        return launch

    def replay(self):
        for func, args, kwargs, result in self.noted:
            again = func(*args, **kwargs)
            given = {own.untyped_storage().data_ptr() for own in args if isinstance(own, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
                result.copy_(again)


@contextlib.contextmanager
def captured(graph):
    made = device_step.DeviceStep._kernel

    class Noted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return graph.launched(self.kernel, grid)

    def noted(*given):
        kernel, names = made(*given)
        return Noted(kernel), names

    def refused(*_given):
        raise AssertionError("a captured step hands numbers to the device")

    with pytest.MonkeyPatch.context() as patch:
        for module in (base, device_step):
            patch.setattr(module, "capturing", lambda: True)
        for module in (device_step, update_rules):
            patch.setattr(module, "from_host", refused)
        patch.setattr(device_step.DeviceStep, "_kernel", noted)
        with graph:
            yield


@part_of("AdamW", "Lion", "momentum")
def graphs(draw, kind, options):
    """A step that a graph took, and its replays: the bits of as many eager steps, with gradients where they were,
    a rate that is a tensor, and a GradScaler's verdict that skips one."""
    weights = [torch.nn.Parameter((torch.randn(size) * 0.02).bfloat16()) for size in (1, 130, 1040)]
    if (eager := eager_of(kind, weights, options)) is None:
        return 0
    with kernels(True):
        counted = kind(like(weights), **options, lr=torch.tensor(1e-3), capturable=True)
        counted.found_inf, counted.grad_scale = torch.zeros(()), torch.ones(())
        graph = Graph()
        for step in range(5):
            for one, other in zip(*(own.param_groups[0]["params"] for own in (eager, counted)), strict=True):
                one.grad = (torch.randn(one.shape) * 1e-2).bfloat16()
                # A graph reads gradients where they were when it was captured.
                other.grad = one.grad.clone() if step < 2 else other.grad.copy_(one.grad)
            for optimizer in (eager, counted):
                optimizer.param_groups[0]["lr"].mul_(0.75)
            counted.found_inf.fill_(step == 3)
            if step != 3:
                eager.step()
            if step > 1:
                graph.replay()
            else:
                with captured(graph) if step else contextlib.nullcontext():
                    counted.step()
    assert_same_bits_and_counters(eager, counted)
    return 1


def first_in_a_graph():
    """A first step makes states and tables, which no graph can hold: said before anything is changed."""
    (weight,) = members = [torch.nn.Parameter(torch.ones(64).bfloat16())]
    weight.grad = torch.ones_like(weight)
    with kernels(True):
        optimizer = CollageAdamW(members, capturable=True)
        with pytest.raises(RuntimeError, match="take one before"), captured(Graph()):
            optimizer.step()
        assert not optimizer.state
        optimizer.step()


OPERATIONS: dict[str, Any] = {
    "floor": lambda a, b: a.floor(),
    "round": lambda a, b: a.round(),
    "sign": lambda a, b: a.sign(),
    "reciprocal": lambda a, b: a.reciprocal(),
    "copysign": torch.copysign,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda a, b: torch.clamp(a, b, b.abs()),
    "clamp_max": lambda a, b: a.clamp_max(0.25),
    "where": lambda a, b: torch.where(a <= b, a, 1.0),
    # The sign of a zero depends on whether torch computes in vectors.
    "lerp": lambda a, b: torch.lerp(a, b, (a > b).to(a.dtype)).nan_to_num(0.0, 0.0, 0.0) + 0.0,
    "root": lambda a, b: a.sqrt() if a.is_meta else a.double().sqrt().float(),  # torch's own may be an ulp off.
    "quotient": lambda a, b: a / b,
    "bfloat16": lambda a, b: a.to(torch.bfloat16).to(a.dtype),
    "float16": lambda a, b: a.to(torch.float16).to(a.dtype),
}


def operations():
    """What a kernel writes for torch's operations: torch's bits, at ties, zeros and subnormal numbers too."""
    hard = [0.0, -0.0, 0.5, -0.5, 1.5, -2.5, 1e-40, -1e-40, 8388607.5, -3e9, 1 + 2**-8, 1 + 3 * 2**-8, torch.inf]
    torch.manual_seed(0)
    given = [torch.cat((torch.tensor(hard), torch.randn(1011) * 4)).roll(turn) for turn in (0, 5)]
    for name, operation in OPERATIONS.items():
        named = [torch.empty(1024, device="meta") for _ in range(3)]
        with Recorder(dict(zip("abc", named, strict=True)), {}) as recorder:
            named[2].copy_(operation(*named[:2]))
        kernel, out = built("only", kernel_source("only", recorder)), torch.zeros(1024)
        columns = [torch.tensor([tensor.data_ptr()]) for tensor in (*given, out)]
        size, none = torch.tensor([1024]), torch.zeros(2, dtype=torch.int32)
        kernel[(1,)](*columns, size, none, none, torch.zeros(1), none, ALIGNED=16)
        expected = operation(*given)
        assert torch.equal(out.isnan(), expected.isnan()), name
        bits, expected_bits = (tensor.nan_to_num(0).view(torch.int32) for tensor in (out, expected))
        assert torch.equal(bits, expected_bits), name


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    update_rules._ADDED["adabelief"] = AdaBelief()
    # A form that falls back to the eager step would agree with it.
    warnings.filterwarnings("error", message="the compiled step")
    part, *arguments = sys.argv[1:]
    globals()[part](*arguments)
