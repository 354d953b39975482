"""What a rank runs. A fork imports this alone: test_torch_suite.py reads all of torch's tests, each time."""


def perform(name, rank, world_size, meeting, pipe):
    import torch_suite_stage  # found in the fork, not imported where pytest runs

    torch_suite_stage.run(name, rank, world_size, meeting, pipe)
