"""AdamW in fp64 from the textbook, with its bias-corrected averages spelt out; and streams of gradients for it."""

import torch


class ReferenceAdamW:
    """Keeps its own fp64 weight and averages; fed the same gradients as the optimizer under test."""

    def __init__(self, parameter, lr, betas, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False):
        self.parameter = parameter.detach().double().clone()
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.amsgrad, self.maximize = amsgrad, maximize
        self.first = torch.zeros_like(self.parameter)
        self.second = torch.zeros_like(self.parameter)
        self.largest = torch.zeros_like(self.parameter)
        self.steps = 0

    def step(self, gradient):
        """Advance by one step and return the displacement."""
        self.steps += 1
        gradient = -gradient.double() if self.maximize else gradient.double()
        self.first = self.betas[0] * self.first + (1 - self.betas[0]) * gradient
        self.second = self.betas[1] * self.second + (1 - self.betas[1]) * gradient**2
        self.largest = torch.maximum(self.largest, self.second)
        corrected_first = self.first / (1 - self.betas[0] ** self.steps)
        corrected_second = (self.largest if self.amsgrad else self.second) / (1 - self.betas[1] ** self.steps)
        direction = corrected_first / (corrected_second.sqrt() + self.eps) + self.weight_decay * self.parameter
        displacement = -self.lr * direction
        self.parameter = self.parameter + displacement
        return displacement


def noisy_gradients(elements, steps, dtype=torch.bfloat16, seed=3):
    """Gradients with noise three times as large as their mean, both of the size that small models see."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(elements, generator=generator) * 3e-4
    for _ in range(steps):
        yield (mean + torch.randn(elements, generator=generator) * 1e-3).to(dtype)


def falling_gradients(elements, steps, dtype=torch.bfloat16, seed=3):
    """The same, falling by a factor of ten over the steps."""
    for index, gradient in enumerate(noisy_gradients(elements, steps, torch.float32, seed)):
        yield (gradient * 10 ** (-index / steps)).to(dtype)
