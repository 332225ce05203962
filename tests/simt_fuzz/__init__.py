"""Random CUDA C++ kernels, the same from a seed on every machine: the SIMT machine must give an H200's bits.

generate.py     generate(seed) -> Launch; from the command line it prints the kernel of one seed
expressions.py  the expressions that kernels are made of; helpers.py  the functions they call
buffers.py      what they load and store
measure.py      runs the seeds on a GPU and writes h200.json.gz
h200.json.gz    checksums and first words of the outputs that an H200 gave
"""
