"""What one process sees of its GPU, by every way of asking. `torch` as argument asks it, too."""

import json
import sys

from suite.cuda import Cuda
from suite.nvml import Nvml

cuda = Cuda()
free, total = cuda.info()
nvml = Nvml(0)
v1, v2 = nvml.memory(), nvml.memory_v2()
seen = {
    "free": free,
    "total": total,
    "device_total": cuda.total(),
    "nvml_total": v1.total,
    "nvml_free": v1.free,
    "nvml_v2_total": v2.total,
    "nvml_v2_free": v2.free,
}
block = cuda.alloc(64 << 20)
seen["free_with_64_mib"] = cuda.free_bytes()
seen["nvml_free_with_64_mib"] = nvml.memory().free
cuda.free(block)
seen["free_after"] = cuda.free_bytes()
if "torch" in sys.argv:
    import torch

    seen["torch_free"], seen["torch_total"] = torch.cuda.mem_get_info()
    seen["torch_properties_total"] = torch.cuda.get_device_properties(0).total_memory
print(json.dumps(seen))
