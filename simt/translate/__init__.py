"""PTX to Python: each basic block becomes a function on NumPy arrays.

program       a kernel's functions, compiled when they are first needed
translator    a block, and how it ends          arithmetic    moves, integers, predicates
memory        loads, stores, atomics            lanes         shuffles, votes, tensor cores
hopper        what sm_90a has                   unset         marks of registers that may be unset
"""
