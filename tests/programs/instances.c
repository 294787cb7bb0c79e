/*
 * What NVML and the driver say of MIG, one fact per line: "NAME VALUE ...".
 *
 *   gpuI.mode, gpuI.max              current MIG mode, or minus the error; most instances
 *   gpuI:J.FACT                      of the instance at index J: see `instance`
 *   gpuI.memory, gpuI.processes      as of an instance
 *   cuda.FACT                        after cuInit, of each device in turn
 *
 * Written from the NVML API reference and the CUDA Driver API manual.
 */
#include "driver.h"
#include <string.h>

struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};
struct attributes {
    unsigned multiprocessors, engines[5], gpu_slices, compute_slices;
    unsigned long long memory_mb;
};

static void *nvml;
#define NVML(name, ...) (((int (*)())dlsym(nvml, name))(__VA_ARGS__))

static void text(const char *of, const char *what, const char *function, nvmlDevice_t device) {
    char buffer[96] = "";
    int result = NVML(function, device, buffer, (unsigned)sizeof buffer);
    if (result) printf("%s.%s error %d\n", of, what, result);
    else printf("%s.%s %s\n", of, what, buffer);
}

static void number(const char *of, const char *what, const char *function, nvmlDevice_t device) {
    unsigned value = 0;
    int result = NVML(function, device, &value);
    if (result) printf("%s.%s error %d\n", of, what, result);
    else printf("%s.%s %u\n", of, what, value);
}

static void memory(const char *of, nvmlDevice_t device) {
    nvmlMemory_t first = {0};
    nvmlMemory_v2_t second = {.version = sizeof second | 2u << 24};
    int result = NVML("nvmlDeviceGetMemoryInfo", device, &first);
    if (!result) result = NVML("nvmlDeviceGetMemoryInfo_v2", device, &second);
    if (result) printf("%s.memory error %d\n", of, result);
    else printf("%s.memory %llu %llu %llu %llu\n", of, first.total, first.used, first.free, second.reserved);
}

static void processes(const char *of, nvmlDevice_t device) {
    struct process list[64];
    unsigned count = 64;
    int result = NVML("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, list);
    printf("%s.processes %d", of, result);
    for (unsigned i = 0; result == 0 && i < count; i++)
        printf(" %u/%d/%d/%llu", list[i].pid, (int)list[i].gpu_instance, (int)list[i].compute_instance,
               list[i].bytes >> 20);
    printf("\n");
}

static void instance(const char *of, nvmlDevice_t device) {
    text(of, "uuid", "nvmlDeviceGetUUID", device);
    text(of, "name", "nvmlDeviceGetName", device);
    number(of, "index", "nvmlDeviceGetIndex", device);
    number(of, "is_mig", "nvmlDeviceIsMigDeviceHandle", device);
    number(of, "gpu_instance", "nvmlDeviceGetGpuInstanceId", device);
    number(of, "compute_instance", "nvmlDeviceGetComputeInstanceId", device);
    memory(of, device);
    processes(of, device);
    struct attributes attributes = {0};
    int result = NVML("nvmlDeviceGetAttributes_v2", device, &attributes);
    printf("%s.attributes %d %u %u %u %llu\n", of, result, attributes.multiprocessors, attributes.gpu_slices,
           attributes.compute_slices, attributes.memory_mb);
    unsigned utilization[2];
    printf("%s.utilization %d\n", of, NVML("nvmlDeviceGetUtilizationRates", device, utilization));
    number(of, "minor", "nvmlDeviceGetMinorNumber", device);
    unsigned long long types = 0;
    printf("%s.event_types %d\n", of, NVML("nvmlDeviceGetSupportedEventTypes", device, &types));
    nvmlDevice_t parent = NULL, again = NULL;
    if (NVML("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device, &parent) == 0)
        text(of, "parent", "nvmlDeviceGetUUID", parent);
    char uuid[96] = "";
    NVML("nvmlDeviceGetUUID", device, uuid, (unsigned)sizeof uuid);
    result = NVML("nvmlDeviceGetHandleByUUID", uuid, &again);
    printf("%s.by_uuid %d %d\n", of, result, again == device);
}

static int gpus(void) {
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml || NVML("nvmlInit_v2")) return 2;
    unsigned count = 0;
    if (NVML("nvmlDeviceGetCount_v2", &count)) return 3;
    printf("gpus %u\n", count);
    for (unsigned i = 0; i < count; i++) {
        char of[32];
        nvmlDevice_t device = NULL;
        if (NVML("nvmlDeviceGetHandleByIndex_v2", i, &device)) return 4;
        snprintf(of, sizeof of, "gpu%u", i);
        unsigned current = 0, pending = 0, most = 0;
        int result = NVML("nvmlDeviceGetMigMode", device, &current, &pending);
        printf("%s.mode %d %u %u\n", of, result, current, pending);
        result = NVML("nvmlDeviceGetMaxMigDeviceCount", device, &most);
        printf("%s.max %d %u\n", of, result, most);
        instance(of, device);
        for (unsigned j = 0; j <= most; j++) {
            nvmlDevice_t mig = NULL;
            snprintf(of, sizeof of, "gpu%u:%u", i, j);
            result = NVML("nvmlDeviceGetMigDeviceHandleByIndex", device, j, &mig);
            printf("%s %d\n", of, result);
            if (result == 0) instance(of, mig);
        }
    }
    return 0;
}

static int devices(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) return 5;
#define CUDA(name, ...) (((int (*)())dlsym(cuda, name))(__VA_ARGS__))
    int result = CUDA("cuInit", 0u), count = 0;
    printf("cuda.init %d\n", result);
    if (result) return 0;
    CUDA("cuDeviceGetCount", &count);
    printf("cuda.count %d\n", count);
    for (int device = 0; device < count; device++) {
        char name[128] = "";
        CUuuid uuid;
        size_t bytes = 0;
        int multiprocessors = 0;
        CUDA("cuDeviceGetName", name, (int)sizeof name, device);
        CUDA("cuDeviceTotalMem_v2", &bytes, device);
        /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
        CUDA("cuDeviceGetAttribute", &multiprocessors, 16, device);
        printf("cuda%d.name %s\ncuda%d.total %zu\ncuda%d.sms %d\n", device, name, device, bytes, device,
               multiprocessors);
        const char *versions[] = {"cuDeviceGetUuid", "cuDeviceGetUuid_v2"};
        for (int v = 0; v < 2; v++) {
            CUDA(versions[v], &uuid, device);
            printf("cuda%d.uuid%d ", device, v + 1);
            for (int i = 0; i < 16; i++)
                printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid.bytes[i]);
            printf("\n");
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    int result = argc > 1 && strcmp(argv[1], "cuda") == 0 ? devices() : gpus();
    return fflush(stdout) ? 1 : result;
}
