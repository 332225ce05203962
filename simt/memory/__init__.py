"""Addresses: what they point to, what an access costs, and who may touch them.

spaces        global, shared, local             sectors       of 32 bytes, that a warp asks for
accesses      loads, stores, atomics            wavefronts    of shared memory, by its banks
copies        cp.async                          ahead         launches that overlap
races         two accesses without an order     clocks, shadow    what the race check remembers

noting hands accesses to the race check; aside keeps those that cannot be a race yet, with marks, owners and settled.
"""
