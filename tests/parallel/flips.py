"""A training on two ranks in which one of them suffers a flipped bit, for the study of alerts."""

import os

from torch.nn.parallel import DistributedDataParallel

from tests.alerts.trainings import FLIPPED_BIT, train_rank


def flipped(folder):
    """What this rank told; the seed stands in the environment."""
    return train_rank(FLIPPED_BIT, int(os.environ["STUDY_SEED"]), DistributedDataParallel)
