"""What a card has that a kernel's sizes are chosen by. The SIMT machine, asked for the CPU, answers as an H200 does."""

import torch

LARGE = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}  # KB; on the others 99
H200_MULTIPROCESSORS, H200_SHARED = 132, 227 * 1024


def multiprocessors(device):
    """How many multiprocessors (SMs) a torch device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if _is_card(device) else H200_MULTIPROCESSORS


def shared_memory(device):
    """Bytes of shared memory that one block may have, by the card's compute capability."""
    return 1024 * LARGE.get(torch.cuda.get_device_capability(device), 99) if _is_card(device) else H200_SHARED


def starts_early(device):
    """Whether a launch may overlap the one before it (programmatic dependent launch): compute capability 9.0 and up."""
    return not _is_card(device) or torch.cuda.get_device_capability(device) >= (9, 0)


def _is_card(device):
    return device.type == "cuda"
