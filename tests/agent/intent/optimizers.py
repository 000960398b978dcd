"""Optimizers written for the tests: what they keep is known, their names for it say nothing."""

import torch
from torch.optim.optimizer import Optimizer


class ByParameter(Optimizer):
    """Moves each parameter that has a gradient by itself, as the subclass's `step_one` says."""

    def __init__(self, params, lr=1e-3, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group)

    def step_one(self, parameter, group):
        raise NotImplementedError


class GlobalScale(Optimizer):
    """u = −lr · g / ‖all g‖, with a momentum in the weight's dtype."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def rate(self, group, parameter):
        return group["lr"]

    @torch.no_grad()
    def step(self, closure=None):
        stepped = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p in stepped]).norm()
        for group, p in stepped:
            state = self.state[p]
            momentum = state.setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad / norm, 0.1)
            p.sub_(self.rate(group, p) * momentum)


class Momentum(ByParameter):
    """u = −lr · m with m = 0.9 m + g, computed in fp32; how the weight is kept is the subclass's."""

    def step_one(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state["a"] = torch.zeros_like(parameter)
            self.begin(parameter, state)
        average = 0.9 * self.wide(state["a"]) + self.wide(parameter.grad)
        state["a"].copy_(average)
        self.move(parameter, state, -group["lr"] * average)

    def wide(self, tensor):
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def begin(self, parameter, state):
        """Make what the weight needs beside itself."""

    def move(self, parameter, state, update):
        parameter.copy_(self.wide(parameter) + update)


class Subtracting(Momentum):
    """Kahan's summation as textbooks have it: the compensation is what is too much in the weight."""

    def begin(self, parameter, state):
        state["b"] = torch.zeros_like(parameter)

    def move(self, parameter, state, update):
        compensated = (update - self.wide(state["b"])).to(parameter.dtype)
        total = parameter + compensated
        state["b"].copy_((total - parameter) - compensated)
        parameter.copy_(total)


class Adding(Momentum):
    """The same with the other sign: the residual is what the weight lacks."""

    def begin(self, parameter, state):
        state["b"] = torch.zeros_like(parameter)

    def move(self, parameter, state, update):
        compensated = (update + self.wide(state["b"])).to(parameter.dtype)
        total = parameter + compensated
        state["b"].copy_(compensated - (total - parameter))
        parameter.copy_(total)


class Master(Momentum):
    """An fp32 copy of the weight, of which the weight is a rounding."""

    def begin(self, parameter, state):
        state["b"] = self.wide(parameter).clone()

    def move(self, parameter, state, update):
        state["b"].add_(update)
        parameter.copy_(state["b"])


class Stochastic(Momentum):
    """bf16 weights rounded up or down at random, in the mean to what they should be."""

    def move(self, parameter, state, update):
        target = self.wide(parameter) + update
        if parameter.dtype != torch.bfloat16:
            parameter.copy_(target)
            return
        noise = torch.randint_like(target, 2**16, dtype=torch.int32)
        parameter.copy_(((target.view(torch.int32) + noise) & -(2**16)).view(torch.float32))


class OwnAdamW(ByParameter):
    """AdamW by another hand, under another name."""

    def __init__(self, params, lr, weight_decay=0.1, eps=1e-8):
        super().__init__(params, lr, betas=(0.9, 0.95), eps=eps, weight_decay=weight_decay)

    def step_one(self, parameter, group):
        (one, two), rate = group["betas"], group["lr"]
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state.update(step=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
        state["step"] += 1
        state["m"].mul_(one).add_(gradient, alpha=1 - one)
        state["v"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        root = (state["v"] / (1 - two ** state["step"])).sqrt().add_(group["eps"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.addcdiv_(state["m"], root, value=-rate / (1 - one ** state["step"]))
