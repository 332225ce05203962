"""float32: the five kernels of an SSD layer as float32 wants them. five.py calls them where `takes` says so.

B, C, C B^T and states, which many programs multiply by, are cut into their parts once; see float32_scores.py and
float32_scan.py.

1 chunk_cumsum     as in 16 bits
2 float32_scores   B, C         -> C B^T, float32; and B, C and C B^T cut into parts of 8 bits
3 float32_state    x, cut B     -> what each chunk adds to the state, float32
4 float32_passing  that         -> states at chunk starts, cut, and the final state
5 float32_scan     x, cut C, C B^T, cut states -> y
"""

from kernels.ssd import chunk_cumsum, float32_passing, float32_scan, float32_scores, float32_state

FILES = ("float32", "machine_code", "float32_scores", "float32_state", "float32_passing", "float32_scan")
SOURCES = tuple(f"kernels/ssd/{name}.py" for name in FILES)
MULTIPLE = 16  # of elements, which strides are; and of bytes, which addresses are


def takes(y, x, B, C, D, z):
    """Whether these kernels run a layer of these tensors: what tiles are read from or written to begins at multiples of
    16 bytes, and so does each of its rows. Others would be read 4 bytes at a time, and a thread would hold so many
    addresses that registers spill: they are left to the kernels of all types."""
    strided = (x, B, C) if z is None else (x, B, C, z)
    for tensor in strided:
        if tensor.data_ptr() % MULTIPLE or any(stride % MULTIPLE for stride in tensor.stride()[:3]):
            return False
    return not any(tensor.data_ptr() % MULTIPLE for tensor in (y, D) if tensor is not None)


def run(y, x, B, C, D, z, dt, dt_bias, initial_states, A, chunk_size, dt_softplus, dt_limit):
    """The five kernels, of tensors that have been looked at; y is written. Returns the final states."""
    steps, cum = chunk_cumsum.run(dt, A, chunk_size, dt_bias, None, dt_softplus, dt_limit)
    CB, cut_CB, cut_B, cut_C = float32_scores.run(B, C, chunk_size)
    states, strange = float32_state.run(x, cut_B, steps, cum, B.shape[3])
    starts, final = float32_passing.run(states, cum, initial_states)
    float32_scan.run(x, cut_C, CB, cut_CB, steps, cum, starts, strange, D, z, y)
    return final
