"""NVIDIA's cuda.core as a tenant: it compiles with NVRTC, launches, allocates, and builds graphs."""

import ctypes
import warnings

from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

from view import LIMIT, MIB, UUIDS, holds, same

# NVRTC may be newer than the driver's version.
warnings.simplefilter("ignore")

SOURCE = """
extern "C" __global__ void axpy(float a, const float *x, float *y, size_t n) {
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


def compiled(device, target):
    options = ProgramOptions(arch=f"sm_{device.arch}")
    return Program(SOURCE, code_type="c++", options=options).compile(target).get_kernel("axpy")


def launches(device, stream):
    kernel = compiled(device, "ptx")
    same("axpy's parameters", kernel.num_arguments, 4)
    config = LaunchConfig(grid=4, block=128)
    source, target = (device.allocate(4 * MIB, stream=stream) for _ in range(2))
    arguments = (ctypes.c_float(2), source, target, ctypes.c_size_t(1000))
    launch(stream, config, kernel, *arguments)
    launch(stream, config, compiled(device, "cubin"), *arguments)
    stream.sync()
    builder = device.create_graph_builder().begin_building()
    launch(builder, config, kernel, *arguments)
    graph = builder.end_building().complete()
    graph.upload(stream)
    graph.launch(stream)
    event = stream.record()
    event.sync()
    holds("the event is done", event.is_done)
    source.close(stream)
    target.close(stream)


def memory_to_the_limit(device, stream):
    chunk = 64 * MIB
    held = []
    try:
        while True:
            held.append(device.allocate(chunk, stream=stream))
            if LIMIT is not None:
                holds("what is allocated stays within the limit", len(held) * chunk <= LIMIT)
    except Exception as error:
        holds(f"{error} is out of memory", "CUDA_ERROR_OUT_OF_MEMORY" in str(error))
    holds("much was allocated", len(held) * chunk >= 256 * MIB)
    for buffer in held:
        buffer.close(stream)
    stream.sync()


def main():
    device = Device(0)
    device.set_current()
    same("UUID", "GPU-" + device.uuid, UUIDS[0])
    stream = device.create_stream()
    launches(device, stream)
    memory_to_the_limit(device, stream)
    print("done")


main()
