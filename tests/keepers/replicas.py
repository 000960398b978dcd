"""Ways to keep a weight that cannot run here (CUDA only, or no package), written from their published arithmetic.

Each keeps its weight in tensors of the names, dtypes and bits of the original; the rule is AdamW in fp32, whatever
the original steps. Weights of other dtypes than bf16 and fp16 are stepped as they are. A `fault` breaks the
keeping: "sign" reads what completes the weight with the wrong sign, "frozen" never writes it after the first step.
"""

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

NARROW = (torch.bfloat16, torch.float16)


class Replica(Optimizer):
    """AdamW with decoupled decay; how the weight is kept is the subclass's `begin`, `load` and `store`.

    `key` names the state that completes the weight; where it was dropped, the weight alone is there.
    """

    key: str | None = None

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, *, states=torch.float32, fault=None
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.states_dtype = states
        self.fault = fault
        self.sign = -1 if fault == "sign" else 1

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = self.gradient(parameter)
                if gradient is not None:
                    self.move(parameter, gradient, group)

    def gradient(self, parameter):
        return parameter.grad

    def move(self, parameter, gradient, group):
        state, narrow = self.state[parameter], parameter.dtype in NARROW
        if not state:
            kind = self.states_dtype if narrow else parameter.dtype
            state["exp_avg"] = torch.zeros_like(parameter, dtype=kind)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=kind)
            if narrow:
                self.begin(parameter, state)
        weight = self.weight_of(parameter, state) if narrow else parameter.clone()
        gradient = gradient.to(weight.dtype)
        first, second = group["betas"]
        average = state["exp_avg"].to(weight.dtype).lerp(gradient, 1 - first)
        square = state["exp_avg_sq"].to(weight.dtype).mul(second).addcmul(gradient, gradient, value=1 - second)
        state["exp_avg"].copy_(average)
        state["exp_avg_sq"].copy_(square)
        step = group["step"]
        bound = (square / (1 - second**step)).sqrt().add(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(average / (1 - first**step), bound, value=-group["lr"])
        if narrow:
            self.store(parameter, state, weight, frozen=self.fault == "frozen" and step > 1)
        else:
            parameter.copy_(weight)

    def weight_of(self, parameter, state):
        """The weight in fp32."""
        dropped = self.key is not None and self.key not in state
        return parameter.float() if dropped else self.load(parameter, state)

    def begin(self, parameter, state):
        """Make what the weight needs beside itself."""

    def load(self, parameter, state):
        return parameter.float()

    def store(self, parameter, state, weight, *, frozen):
        """Keep this fp32 weight; `frozen`: write the parameter only."""
        parameter.copy_(weight)
        if self.key in state and not frozen:
            state[self.key].copy_(self.rest(parameter, weight))

    def rest(self, parameter, weight):
        """What completes the weight."""
        raise NotImplementedError


class Remainder(Replica):
    """θ = p + an integer remainder under `key`; subclasses say what the integers mean."""

    key = "low"
    dtype = torch.int16

    def begin(self, parameter, state):
        state[self.key] = torch.zeros_like(parameter, dtype=self.dtype)

    def load(self, parameter, state):
        return self.decode(parameter, state[self.key], self.sign)

    def store(self, parameter, state, weight, *, frozen):
        rounded, low = self.encode(weight, parameter.dtype)
        parameter.copy_(rounded)
        if self.key in state and not frozen:
            state[self.key].copy_(low)

    def decode(self, parameter, low, sign):
        raise NotImplementedError

    def encode(self, weight, dtype):
        raise NotImplementedError


class Appended(Remainder):
    """bf16 is fp32's upper half; the lower half stands beside it. fp16: the 13 bits of fp32 that fp16 lacks."""

    def decode(self, parameter, low, sign):
        if parameter.dtype == torch.bfloat16:
            bits = parameter.view(torch.int16).int() * 2**16 + sign * (low.view(torch.int16).int() & 0xFFFF)
            return bits.view(torch.float32)
        units = low.view(torch.int16).float() * _unit(parameter, 13)
        return parameter.float() + sign * parameter.float().sign() * units

    def encode(self, weight, dtype):
        if dtype == torch.bfloat16:
            bits = weight.view(torch.int32)
            return (bits >> 16).to(torch.int16).view(dtype), _sixteen(bits & 0xFFFF).view(self.dtype)
        rounded = weight.to(dtype)
        outside = rounded.float().abs() > weight.abs()
        rounded = torch.where(outside, (rounded.view(torch.int16) - 1).view(dtype), rounded)
        units = (weight - rounded.float()).abs() / _unit(rounded, 13)
        return rounded, units.floor().to(torch.int16).view(self.dtype)


class AppendedUnsigned(Appended):
    """The same with 16 unsigned bits, called `mantissa` as modded-nanogpt does."""

    key = "mantissa"
    dtype = torch.uint16


class Rounded(Remainder):
    """TransformerEngine's `store_param_remainders`: p rounded half up, the int16 is what fp32's bits lack of it.

    fp16, which TransformerEngine refuses: the same of the bits of an fp16 with 16 more.
    """

    key = "master_param"

    def decode(self, parameter, low, sign):
        if parameter.dtype == torch.bfloat16:
            # A faulty reader forgets to borrow from the high half.
            borrowed = 0 if self.fault == "sign" else (low < 0).int()
            high = parameter.view(torch.int16).int() - borrowed
            return ((high << 16) | (low.int() & 0xFFFF)).view(torch.float32)
        r = parameter.float().sign() * low.float() * _unit(parameter, 16)
        inwards = (low < 0) & (parameter.view(torch.int16) & 0x3FF == 0)
        return parameter.float() + sign * torch.where(inwards, r / 2, r)

    def encode(self, weight, dtype):
        if dtype == torch.bfloat16:
            bits = weight.view(torch.int32)
            low = _sixteen(bits & 0xFFFF)
            return ((bits >> 16) + (low < 0)).to(torch.int16).view(dtype), low
        rounded = weight.to(dtype)
        r = (weight - rounded.float()) * rounded.float().sign()
        inwards = (r < 0) & (rounded.view(torch.int16) & 0x3FF == 0)
        units = torch.where(inwards, 2 * r, r) / _unit(rounded, 16)
        return rounded, units.round().clamp(-(2**15), 2**15 - 1).to(torch.int16)


class PrecisionAware(Rounded):
    """Megatron's precision-aware optimizer: TransformerEngine's with `use_decoupled_grad`; `grad` stays empty."""

    def gradient(self, parameter):
        return getattr(parameter, "decoupled_grad", None)


class Fraction(Remainder):
    """FlashOptim: int8 or int16 times half an ulp of p over 127 or 32767."""

    key = "error_bits"
    dtype = torch.int8

    def decode(self, parameter, low, sign):
        most = torch.iinfo(self.dtype).max
        return parameter.float() + sign * low.float() / most * _unit(parameter, 1)

    def encode(self, weight, dtype):
        most = torch.iinfo(self.dtype).max
        rounded = weight.to(dtype)
        share = ((weight - rounded.float()) / _unit(rounded, 1)).clamp(-1, 1) * most
        return rounded, ((share.abs() + 0.5).floor() * share.sign()).to(self.dtype)


class Fraction16(Fraction):
    """FlashOptim's 32-bit form."""

    dtype = torch.int16


class Kahan(Replica):
    """A compensation of the weight's own dtype; it is added, or, with the textbook's sign, subtracted."""

    key = "comp"
    adds = 1

    def begin(self, parameter, state):
        state[self.key] = torch.zeros_like(parameter)

    def load(self, parameter, state):
        return parameter.float() + self.sign * self.adds * state[self.key].float()

    def rest(self, parameter, weight):
        return self.adds * (weight - parameter.float())


class Subtracted(Kahan):
    """The compensation is what is too much in the weight."""

    adds = -1


class Master(Replica):
    """An fp32 master weight in the state, of which the parameter is a rounding."""

    key = "main"

    def begin(self, parameter, state):
        state[self.key] = parameter.float()

    def load(self, parameter, state):
        return state[self.key].float().clone()

    def rest(self, parameter, weight):
        return weight


class Scrambled(Replica):
    """A keeping that nobody knows: fp32's lower half, its bits reversed and negated, in int32."""

    key = "opaque"

    def begin(self, parameter, state):
        state[self.key] = torch.full_like(parameter, -1, dtype=torch.int32)

    def load(self, parameter, state):
        low = _reversed(~state[self.key])
        return (parameter.view(torch.int16).int() * 2**16 + low).view(torch.float32)

    def store(self, parameter, state, weight, *, frozen):
        bits = weight.view(torch.int32)
        parameter.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16))
        state[self.key].copy_(~_reversed(bits & 0xFFFF))


def _reversed(low):
    """The sixteen low bits in the other order."""
    return sum(((low >> place) & 1) << (15 - place) for place in range(16))


def _sixteen(low):
    """0 … 65535 as the int16 of the same bits."""
    return torch.where(low >= 2**15, low - 2**16, low).to(torch.int16)


def _unit(weight: Tensor, bits: int) -> Tensor:
    """2^−bits of the gap from each weight away from zero, fp32."""
    information = torch.finfo(weight.dtype)
    _, exponent = torch.frexp(weight.float())
    smallest = torch.frexp(torch.tensor(information.tiny)).exponent
    gap = torch.where(weight == 0, smallest, exponent).clamp(min=int(smallest)) - 1
    return torch.ldexp(torch.full_like(weight, information.eps, dtype=torch.float32), gap - bits)
