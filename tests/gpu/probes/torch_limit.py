"""PyTorch to its quota and on: OutOfMemoryError at the limit, and the process works afterwards.

The allocator is chosen by PYTORCH_CUDA_ALLOC_CONF; the quota in bytes is the argument.
"""

import json
import sys

import torch

quota = int(sys.argv[1])
MIB = 1 << 20
torch.cuda.init()
a = torch.ones(8, device="cuda")
free, total = torch.cuda.mem_get_info()
result = {"free": free, "total": total, "backend": torch.cuda.get_allocator_backend()}

held, message = [], ""
while sum(t.numel() for t in held) <= quota:
    try:
        held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0]
        break
result["held"] = sum(t.numel() for t in held)
result["refused"] = bool(message)
result["message"] = message[:300]
result["free_when_full"] = torch.cuda.mem_get_info()[0]

# The process goes on: what it holds is usable, what it gives back can be had again.
held[-1].fill_(7)
result["usable"] = int(held[-1][:1000].sum().item()) == 7000
count = len(held)
held = held[: count // 2]
torch.cuda.empty_cache()
torch.cuda.synchronize()
try:
    held += [torch.empty(256 * MIB, dtype=torch.uint8, device="cuda") for _ in range(count - len(held))]
    result["had_again"] = True
except torch.OutOfMemoryError:
    result["had_again"] = False
x = torch.randn(512, 512, device="cuda") if len(held) < count else None
held.clear()
del x
torch.cuda.empty_cache()
torch.cuda.synchronize()
x = torch.eye(512, device="cuda") * 2
result["computes"] = float((x @ x).sum().item()) == 4 * 512
del x
torch.cuda.empty_cache()
torch.cuda.synchronize()
result["free_after"] = torch.cuda.mem_get_info()[0]
print(json.dumps(result))
