"""A subclass that skips the drop-in's constructor, as MMSeparateDistributedDataParallel of mmengine does."""

import torch

from stretto import DistributedDataParallel


class Separate(DistributedDataParallel):
    def __init__(self, module):
        super(DistributedDataParallel, self).__init__()
        self.module = module


def test_a_subclass_may_skip_the_constructor():
    made = Separate(torch.nn.Linear(2, 1))
    assert [*made.train().state_dict()] == ["module.weight", "module.bias"]
