"""The figures of the VLDB 2020 paper on DistributedDataParallel (Li et al.), on CPUs: one file a figure."""
