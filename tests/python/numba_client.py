"""numba-cuda as a tenant: it compiles kernels, launches them, and its memory manager meets the limit."""

import gc
import warnings

import numpy as np
from numba import cuda, float32
from numba.cuda.cudadrv.driver import CudaAPIError

from view import LIMIT, MIB, UUIDS, holds, same

# The driver links; the GPU is larger than these kernels.
warnings.simplefilter("ignore")


@cuda.jit
def scale(source, target, factor):
    shared = cuda.shared.array(128, float32)
    i = cuda.grid(1)
    if i < source.size:
        shared[cuda.threadIdx.x] = source[i]
        cuda.syncthreads()
        target[i] = shared[cuda.threadIdx.x] * factor


def count(array):
    cuda.atomic.add(array, 0, 1)


def settle():
    """Frees what numba has put off: memory in the one list, modules in the other."""
    gc.collect()
    context = cuda.current_context()
    context.deallocations.clear()
    context.memory_manager.deallocations.clear()


def devices():
    same("devices", len(cuda.gpus), len(UUIDS))
    same("UUID", cuda.get_current_device().uuid, UUIDS[0])


def info():
    return cuda.current_context().get_memory_info()


def arrays():
    numbers = np.arange(10_000, dtype=np.float32)
    device = cuda.to_device(numbers)
    copy = cuda.device_array_like(device)
    copy.copy_to_device(device)
    holds("a round trip keeps the numbers", (copy.copy_to_host() == numbers).all())
    pinned = cuda.pinned_array(1000, np.float32)
    pinned[:] = 7
    copy[:1000].copy_to_device(pinned)
    holds("a pinned array arrives", (copy.copy_to_host()[:1000] == 7).all())
    managed = cuda.managed_array(1000, np.float32)
    managed[:] = 3
    holds("a managed array is the host's too", managed.sum() == 3000)


def launches():
    stream = cuda.stream()
    source = cuda.to_device(np.ones(10_000, np.float32), stream=stream)
    target = cuda.device_array(10_000, np.float32, stream=stream)
    before, after = cuda.event(), cuda.event()
    before.record(stream)
    for _ in range(10):
        scale[80, 128, stream](source, target, 2.0)
    after.record(stream)
    after.synchronize()
    holds("the kernels took time", before.elapsed_time(after) > 0)
    stream.synchronize()
    (signature,) = scale.overloads
    holds("occupancy", scale.overloads[signature].max_cooperative_grid_blocks(128) > 0)
    # Compiled for its types at once, and with atomics.
    cuda.jit("void(float32[:])")(count)[1, 32](target)
    cuda.synchronize()


def memory_to_the_limit():
    free, total = info()
    holds("free <= total", free <= total)
    if LIMIT is not None:
        same("numba's total", total, LIMIT)
    chunk = 64 * MIB
    held = []
    try:
        while len(held) * chunk <= free:
            held.append(cuda.device_array(chunk, np.uint8))
        holds("numba runs out of memory", False)
    except CudaAPIError as error:
        holds(f"{error} is out of memory", "CUDA_ERROR_OUT_OF_MEMORY" in str(error))
    same("arrays until out of memory", len(held), free // chunk)
    holds("little is free at the limit", info().free < chunk)
    held.clear()
    settle()
    same("free memory after all frees", info().free, free)


def main():
    devices()
    arrays()
    launches()
    settle()
    memory_to_the_limit()
    cuda.close()
    print("done")


main()
