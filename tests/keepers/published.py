"""Replicas of published steps in the shape of the published code: it knows its own dtypes, shapes and places only.

Unlike `tests.keepers.replicas` these have no branch that would let a clone of them step other numbers.
"""

import torch
from torch.optim.optimizer import Optimizer


class MantissaAdamW(Optimizer):
    """Replica of modded-nanogpt's update: 16 mantissa bits beside a bf16 weight, cautious decay, uint16 views."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), decay=0.0, keep=True, sign=False):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})
        self.keep, self.sign = keep, sign

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                first, second = group["betas"]
                if not state:
                    state["step"], state["mantissa"] = 0, torch.zeros_like(p, dtype=torch.uint16)
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad.float(), 1 - first)
                state["exp_avg_sq"].lerp_(p.grad.float().square(), 1 - second)
                bound = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt() + 1e-8
                self.move(p, state["mantissa"], state["exp_avg"] / (1 - first ** state["step"]) / bound, group)

    def move(self, weight, mantissa, update, group):
        p = weight.view(torch.uint16)
        assert p.dtype == mantissa.dtype == torch.uint16
        bits = (p.to(torch.uint32) << 16) | mantissa.to(torch.uint32)
        precise = bits.view(torch.float32)
        mask = (update * precise) >= 0
        precise.copy_(precise - precise * mask * group["decay"] * group["lr"] - update * group["lr"])
        p.copy_((bits >> 16).to(torch.uint16))
        if self.keep:
            mantissa.copy_(bits.to(torch.uint16))


class StackedMuon(Optimizer):
    """Replica of nanochat's kind of Muon: equal shapes at once, what is kept stacked at the first of them."""

    def __init__(self, groups):
        super().__init__(groups, {"kind": "muon", "lr": 0.02, "momentum": 0.95, "second": 0.9, "decay": 0.0})
        self._rate = torch.tensor(0.0)
        self._momentum = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (self.orthogonal if group["kind"] == "muon" else self.elementwise)(group)

    def elementwise(self, group):
        self._rate.fill_(group["lr"])
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            average, square, wide = (x.float() for x in (state["exp_avg"], state["exp_avg_sq"], p))
            average.lerp_(p.grad.float(), 0.2), square.lerp_(p.grad.float().square(), 0.05)
            bound = (square / (1 - 0.95 ** state["step"])).sqrt() + 1e-10
            wide.mul_(1 - self._rate * group["decay"])
            wide.sub_(self._rate * average / (1 - 0.8 ** state["step"]) / bound)
            p.copy_(wide), state["exp_avg"].copy_(average), state["exp_avg_sq"].copy_(square)

    def orthogonal(self, group):
        params = group["params"]
        first, rows = params[0], len(params)
        state = self.state[first]
        if not state:
            state["momentum_buffer"] = torch.zeros(rows, *first.shape, dtype=first.dtype)
            state["second_momentum_buffer"] = torch.zeros(rows, first.shape[0], 1, dtype=first.dtype)
        grads, weights = torch.stack([p.grad for p in params]), torch.stack(params)
        self._momentum.fill_(group["momentum"]), self._rate.fill_(group["lr"])
        momentum = self._momentum.to(grads.dtype)
        state["momentum_buffer"].lerp_(grads, 1 - momentum)
        x = grads.lerp_(state["momentum_buffer"], momentum)
        x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-6)
        for a, b, c in ((4.0, -6.0, 3.0), (3.5, -2.5, 0.6), (2.0, -1.5, 0.5)):
            square = x @ x.mT
            x = a * x + (b * square + c * (square @ square)) @ x
        mean = x.float().square().mean(-1, keepdim=True)
        state["second_momentum_buffer"].lerp_(mean.to(state["second_momentum_buffer"].dtype), 1 - group["second"])
        x = x * state["second_momentum_buffer"].clamp_min(1e-10).rsqrt()
        mask = (x * weights) >= 0
        rate = self._rate.to(x.dtype)
        weights.sub_(rate * x + rate * group["decay"] * weights * mask)
        torch._foreach_copy_(params, list(weights.unbind(0)))


class NestedAdamW(Optimizer):
    """Replica of HeavyBall's places: a mapping a view of each parameter, one counter at the first parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), storage=torch.float32):
        super().__init__(params, {"lr": lr, "betas": betas})
        self.storage = storage

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            kept = self.state[group["params"][0]].setdefault(0, {})
            kept["step"] = kept.get("step", torch.zeros((), dtype=torch.int64)) + 1
            count = kept["step"].item()
            for p in group["params"]:
                state = self.state[p].setdefault(0, {})
                if "exp_avg_0" not in state:
                    state["exp_avg_0"] = torch.zeros_like(p, dtype=self.storage)
                    state["exp_avg_sq_0"] = torch.zeros_like(p, dtype=self.storage)
                average = state["exp_avg_0"].float().lerp(p.grad.float(), 1 - first)
                square = state["exp_avg_sq_0"].float().lerp(p.grad.float().square(), 1 - second)
                state["exp_avg_0"].copy_(average), state["exp_avg_sq_0"].copy_(square)
                bound = (square / (1 - second**count)).sqrt() + 1e-8
                p.copy_(p.float().addcdiv(average / (1 - first**count), bound, value=-group["lr"]))
