"""Tensors shared between processes (CUDA IPC): what the importer's view of the quota is."""

import json

import torch
import torch.multiprocessing as mp

SIZE = 256 << 20


def consume(tensors, answers):
    torch.ones(1, device="cuda").sum().item()
    # The exporter has made it.
    tensors.get()
    before = torch.cuda.mem_get_info()[0]
    tensor = tensors.get()
    total = int(tensor[:: 1 << 20].sum().item())
    answers.put((before, torch.cuda.mem_get_info()[0], total))
    del tensor
    torch.cuda.ipc_collect()
    answers.put("done")
    tensors.get()


if __name__ == "__main__":
    mp.set_start_method("spawn")
    tensors, answers = mp.Queue(), mp.Queue()
    process = mp.Process(target=consume, args=(tensors, answers))
    process.start()
    tensor = torch.full((SIZE,), 3, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    tensors.put("made")
    tensors.put(tensor)
    before, imported, total = answers.get(timeout=90)
    answers.get(timeout=30)
    tensors.put(None)
    process.join(30)
    print(json.dumps({"importer_free_before": before, "importer_free_with": imported,
                      "right": total == 3 * (SIZE >> 20), "exit": process.exitcode}))
