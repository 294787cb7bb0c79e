"""tinygrad as a tenant: an own binding of the driver API, kernels that it writes in PTX, graphs that it builds by hand."""

import gc
import os
import sys

if sys.version_info < (3, 11):
    print("not run: tinygrad needs Python 3.11\ndone")
    sys.exit()

# No cache in the user's home. `LRU` keeps freed buffers.
os.environ |= {"DEV": "CUDA:PTX", "CACHELEVEL": "0", "LRU": "0"}

import numpy as np
from tinygrad import Device, GlobalCounters, Tensor, TinyJit
from tinygrad.runtime.graph.cuda import CUDAGraph

from view import LIMIT, MIB, holds, same


def arrays():
    numbers = np.arange(10_000, dtype=np.float32)
    holds("a round trip keeps the numbers", (Tensor(numbers).to("CUDA").realize().numpy() == numbers).all())


def launches():
    kernels = GlobalCounters.kernel_count
    (Tensor.rand(64, 64) @ Tensor.rand(64, 64)).relu().sum().realize()
    Device["CUDA"].synchronize()
    holds("kernels ran", GlobalCounters.kernel_count > kernels)


def graphs():
    """From its third call on a function is one graph, whose nodes get new parameters each time."""
    @TinyJit
    def step(x):
        return ((x + 1).contiguous().relu() * 2).contiguous().realize()

    for _ in range(6):
        step(Tensor.ones(256, 256).contiguous().realize())
    Device["CUDA"].synchronize()
    holds("it launched a graph", any(isinstance(item, CUDAGraph) for item in gc.get_objects()))


def memory_to_the_limit():
    chunk, held = 64 * MIB, []
    room = LIMIT or 1 << 40
    try:
        while len(held) * chunk <= room:
            held.append(Device["CUDA"].allocator.alloc(chunk))
            if LIMIT is None and len(held) == 20:
                break
        holds("tinygrad runs out of memory", LIMIT is None)
    except (RuntimeError, MemoryError) as error:
        holds(f"{error} is a refusal", "Allocation of 64.00 MB failed" in str(error))
        holds("arrays until out of memory", len(held) >= (LIMIT // 2) // chunk)
    count = len(held)
    while held:
        Device["CUDA"].allocator.free(held.pop(), chunk)
    gc.collect()
    again = [Device["CUDA"].allocator.alloc(chunk) for _ in range(count)]
    same("arrays after all frees", len(again), count)
    for array in again:
        Device["CUDA"].allocator.free(array, chunk)


def main():
    arrays()
    launches()
    graphs()
    memory_to_the_limit()
    print("done")


main()
