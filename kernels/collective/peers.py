"""What others take for the same sums: NCCL and PyTorch's symmetric memory, and where FlashInfer is installed, vLLM's
custom kernel and TensorRT-LLM's one-shot.

Each needs a process for each card: `measure` starts them, and this file is what they run. Each peer is checked before
it is timed, in a CUDA graph like ours. One that is missing, refuses or is wrong is left out with a printed sentence.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

PATIENCE = 90  # seconds of a peer
NORM = "TensorRT-LLM, PDL"  # of the second table
LEAST = 8 << 20  # bytes of a buffer that another process opens: the driver puts smaller ones together


def measure(devices, sizes, rows, hidden):
    """({peer: {size: µs}}, {peer: {rows: µs}}). Each peer in processes of its own: one that fails takes no other
    along."""
    found, norms = {}, {}
    for name in (*PEERS, NORM):
        given = rows if name == NORM else sizes
        times = _measure_one({"name": name, "devices": devices, "given": list(given), "hidden": hidden})
        if times:
            (norms if name == NORM else found)[name] = times
    return found, norms


def _measure_one(ask):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kernels.collective.peers", json.dumps(ask | {"folder": folder})]
        runs = [subprocess.Popen([*command, str(rank)], env=dict(os.environ)) for rank in range(ask["devices"])]
        try:
            for run in runs:
                run.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            print(f"{ask['name']} took too long; what it has measured until then counts")
        finally:
            for run in runs:
                run.kill()
        path = Path(folder) / "found.json"
        return json.loads(path.read_text()) if path.exists() else {}


def size_text(nbytes):
    return f"{nbytes >> 20}M" if nbytes >= 1 << 20 else f"{nbytes >> 10}K"


def timed(call, calls, replays=9):
    """Microseconds of a call, in a graph of so many."""
    import torch.distributed as dist

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    if captured := getattr(call, "captured", None):
        captured()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for k in range(-2, replays):
        if k == 0:
            marks[0].record()
        graph.replay()
        if k >= 0:
            marks[k + 1].record()
    torch.cuda.synchronize()
    taken = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    return 1e3 * taken[len(taken) // 2] / calls


def process(ask, rank):
    """One rank of one peer."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no multicast
    os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = "0"  # all its calls are in graphs
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    dist.init_process_group(
        "nccl", init_method=f"file://{ask['folder']}/meet", rank=rank, world_size=ask["devices"],
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    name, found = ask["name"], {}
    for given in ask["given"]:
        try:
            if name == NORM:
                found[str(given)] = timed(trtllm_norm(given, ask["hidden"], rank, ask["devices"]), 64)
            else:
                found[size_text(given)] = timed(
                    checked(name, given, rank, ask["devices"]), 64 if given <= 1 << 20 else 8
                )
        except Exception as error:
            if rank == 0:
                print(f"{name}, {given:,}: left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
            break
        if rank == 0:
            path = Path(ask["folder"]) / "found.json"
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").replace(path)
    dist.barrier()
    dist.destroy_process_group()


def checked(name, nbytes, rank, devices):
    """A peer's call, whose sums have been looked at."""
    call, x, out = PEERS[name](nbytes, rank, devices)
    x.fill_(rank + 1)
    call()
    torch.cuda.synchronize()
    want = float(sum(r + 1 for r in range(devices)))
    if not bool((out == want).all()):
        raise RuntimeError(f"its sums are wrong: {out[:4].tolist()}, not {want}")
    x.zero_()
    return call


def nccl(nbytes, rank, devices):
    import torch.distributed as dist

    x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    return (lambda: dist.all_reduce(x)), x, x


def symmetric(operator):
    def make(nbytes, rank, devices):
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as memory

        x = memory.empty(nbytes // 2, dtype=torch.bfloat16, device=torch.device("cuda", rank))
        memory.rendezvous(x, dist.group.WORLD)
        run, name = getattr(torch.ops.symm_mem, operator), dist.group.WORLD.group_name
        if operator.endswith("_"):
            return (lambda: run(x, "sum", name)), x, x
        out = torch.empty_like(x)
        return (lambda: run_into(run, x, name, out)), x, out

    return make


def run_into(run, x, name, out):
    """one_shot_all_reduce returns a new tensor; the copy would be timed too, so only the look pays for it."""
    got = run(x, "sum", name)
    if not torch.cuda.is_current_stream_capturing():
        out.copy_(got)
    return got


def vllm(nbytes, rank, devices):
    """vLLM's custom kernel, as FlashInfer packs it. In a graph it reads its input where it lies, which all processes
    must have been told before the graph is replayed."""
    import flashinfer.comm as comm
    import torch.distributed as dist

    group, room = dist.group.WORLD, max(nbytes, LEAST)
    meta = comm.create_shared_buffer(comm.vllm_meta_size() + room, group=group)
    buffer = comm.create_shared_buffer(room, group=group)
    rank_data = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    handle = comm.vllm_init_custom_ar(meta, rank_data, rank, True)
    comm.vllm_register_buffer(handle, buffer)
    x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)

    def call():
        place = 0 if torch.cuda.is_current_stream_capturing() else buffer[rank]
        comm.vllm_all_reduce(handle, x, out, place, room, 36)

    def captured():
        mine = [list(part) for part in comm.vllm_get_graph_buffer_ipc_meta(handle)]
        all_of_them = [None] * devices
        dist.all_gather_object(all_of_them, mine)
        comm.vllm_register_graph_buffers(handle, [h for h, _ in all_of_them], [o for _, o in all_of_them])

    call.captured, call.keep = captured, rank_data
    return call, x, out


def trtllm_fusion(tokens, hidden, rank, devices, pattern, **tensors):
    """A call of TensorRT-LLM's fused exchange, one-shot, with PDL, as FlashInfer packs it."""
    import flashinfer.comm as comm
    import torch.distributed as dist

    _, workspace = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, devices, tokens, hidden, group=dist.group.WORLD
    )
    given = {
        "allreduce_in": None, "world_size": devices, "world_rank": rank, "token_num": tokens, "hidden_dim": hidden,
        "workspace_ptrs": workspace, "launch_with_pdl": True, "trigger_completion_at_end": False, "fp32_acc": True,
        "pattern_code": pattern, "use_oneshot": True, "allreduce_out": None, "residual_in": None, "residual_out": None,
        "norm_out": None, "quant_out": None, "scale_out": None, "rms_gamma": None, "rms_eps": None,
        "scale_factor": None, "layout_code": None,
    } | tensors  # fmt: skip
    return lambda: comm.trtllm_allreduce_fusion(**given)


def trtllm(nbytes, rank, devices):
    import flashinfer.comm as comm

    hidden = min(4096, nbytes // 2)
    if nbytes > 1 << 20:
        raise ValueError("one-shot is for short messages")
    x = torch.zeros(nbytes // 2 // hidden, hidden, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    pattern = comm.AllReduceFusionPattern.kAllReduce
    call = trtllm_fusion(len(x), hidden, rank, devices, pattern, allreduce_in=x, allreduce_out=out)
    return call, x.view(-1), out.view(-1)


def trtllm_norm(rows, hidden, rank, devices):
    import flashinfer.comm as comm

    x, residual, kept, out = (torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    pattern = comm.AllReduceFusionPattern.kARResidualRMSNorm
    return trtllm_fusion(
        rows, hidden, rank, devices, pattern, allreduce_in=x, residual_in=residual, residual_out=kept, norm_out=out,
        rms_gamma=weight, rms_eps=1e-5,
    )  # fmt: skip


PEERS = {
    "NCCL": nccl,
    "PyTorch symm_mem, one shot": symmetric("one_shot_all_reduce"),
    "PyTorch symm_mem, two shots": symmetric("two_shot_all_reduce_"),
    "vLLM's kernel, 36 blocks": vllm,
    "TensorRT-LLM, one shot, PDL": trtllm,
}


if __name__ == "__main__":
    process(json.loads(sys.argv[1]), int(sys.argv[2]))
