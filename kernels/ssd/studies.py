"""What is measured of SSD besides the ladders of bench.py: how exact it is, the trials, what Nsight Compute counts."""

from kernels import trials
from kernels.ssd import accuracy, profile, trained
from kernels.ssd.bench import told


def tables():
    """The studies of accuracy: with decays drawn at random, and with those of trained weights."""
    return told("accuracy", accuracy.tables) + told("accuracy, trained weights", trained.tables)


def further(roof, versions):
    """The trials, and what Nsight Compute counts where it is, in files of their own. Returns the paths written."""
    found = told("trials", trials.store, "ssd", roof, versions)
    return found + told("Nsight Compute", profile.store, roof, versions)
