"""An average of weights beside an fp64 average of the same weights, element by element, whole tensors."""

import math

import torch


class ReferenceAverage:
    """What becomes of an average of one layer's weights; `update` takes it before and after, and the weights."""

    def __init__(self, average):
        self.start = average.detach().double().clone()
        self.exact = self.start.clone()
        self.last_bits = average.detach().clone()
        self.moved = torch.zeros_like(average, dtype=torch.bool)

    def update(self, before, after, weight, decay):
        before, theta, stored = before.double(), weight.detach().double(), after.detach().double()
        intended = (1.0 - decay) * (theta - before)
        effective = stored - before
        self.exact = self.exact + (1.0 - decay) * (theta - self.exact)
        self.moved |= after.detach() != self.last_bits
        self.last_bits = after.detach().clone()
        way, exact = stored - self.start, self.exact - self.start
        return {
            "squares": fsum(intended * intended),
            "products": fsum(intended * effective),
            "active": int((intended != 0).sum()),
            "lost": int(((intended != 0) & (effective == 0)).sum()),
            "moved": int(self.moved.sum()),
            "elements": before.numel(),
            "way": fsum(way * way),
            "exact": fsum(exact * exact),
            "drift": fsum((stored - self.exact) ** 2),
        }


def fsum(values):
    return math.fsum(values.flatten().tolist())


def metrics_of(layers):
    """The metrics of several layers' sums together; None where they are undefined."""
    total = {key: math.fsum(layer[key] for layer in layers) for key in layers[0]}

    def ratio(over, under):
        return total[over] / total[under] if total[under] else None

    def root(over, under):
        return math.sqrt(total[over] / total[under]) if total[under] else None

    return {
        "average_edq_ratio": ratio("products", "squares"),
        "average_lost_ratio": ratio("lost", "active"),
        "average_moved_ratio": ratio("moved", "elements"),
        "average_displacement_ratio": root("way", "exact"),
        "average_drift_ratio": root("drift", "exact"),
    }
