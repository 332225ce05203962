"""The roof of this machine's NVIDIA GPU, as roof_cuda.py measures it, once per process."""

import functools


@functools.cache
def gpu_roof():
    """Measure the NVIDIA GPU's roof and remember it for the process; None where PyTorch finds no such GPU."""
    import torch  # takes a second, so it is imported only by those who ask for the GPU

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    from lab.roof_cuda import measure_gpu_roof  # which brings Triton

    found = measure_gpu_roof()
    torch.cuda.empty_cache()  # its buffers are gone; the learner's kernels will want the room
    return found
