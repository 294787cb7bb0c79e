"""Steers a node over the admin socket: `admin_client.py SOCKET POD GIBIBYTES`. docs/steering.md names it."""

import sys

import grpc

import admin_v1_pb2 as v1
import admin_v1_pb2_grpc

socket, pod, gibibytes = sys.argv[1:]
with grpc.insecure_channel(f"unix:{socket}") as channel:
    admin = admin_v1_pb2_grpc.AdminStub(channel)
    for allocation in admin.Status(v1.StatusRequest(), timeout=10).allocations:
        for gpu in allocation.gpus:
            print(allocation.holder.pod or allocation.id, gpu.gpu_uuid, gpu.memory_limit_bytes)
    request = v1.SetQuotaRequest(
        target=v1.Target(name=pod),
        memory_limit_bytes=int(gibibytes) << 30,
        reason="asked for by a program",
    )
    try:
        answer = admin.SetQuota(request, timeout=10)
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
    for gpu in answer.gpus:
        print(gpu.gpu_uuid, gpu.before.memory_limit_bytes, "->", gpu.after.memory_limit_bytes)
