"""Throughput of PyTorch: large matmuls, a transformer layer, tiny kernels, allocations."""

import json
import time

import torch


def rate(work, seconds, inner):
    """Times of `work` a second, by wall clock over whole synchronised batches."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(inner):
            work()
        torch.cuda.synchronize()
        done += inner
    return done / (time.perf_counter() - start)


torch.manual_seed(0)
torch.set_grad_enabled(False)
a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True).cuda().half().eval()
tokens = torch.randn(8, 128, 512, device="cuda", dtype=torch.float16)
tiny = torch.zeros(32, device="cuda")


def reallocate():
    block = torch.cuda.caching_allocator_alloc(64 << 20)
    torch.cuda.caching_allocator_delete(block)
    torch.cuda.empty_cache()


print(json.dumps({
    "matmuls_per_s": rate(lambda: a @ a, 1.0, 50),
    "layers_per_s": rate(lambda: layer(tokens), 1.0, 20),
    "tiny_kernels_per_s": rate(lambda: tiny.add_(1), 1.0, 1000),
    "cudaMalloc_free_pairs_per_s": rate(reallocate, 0.5, 20),
}))
