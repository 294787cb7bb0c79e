/*
 * NVML's lists of processes on device 0, in every form, without any driver call before: one line per
 * form, "NAME RESULT COUNT PID BYTES ...", after a call without room whose result and count come
 * first: "NAME.size RESULT COUNT".
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void *nvmlDevice_t;
struct v1 {
    unsigned pid;
    unsigned long long bytes;
};
struct v2 {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};
struct detail {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
    unsigned long long protected_bytes;
};
struct detail_list {
    unsigned version, mode, entries;
    struct detail *array;
};
struct sample {
    unsigned pid;
    unsigned long long time;
    unsigned util[4];
};

#define ROOM 16
static void *library;
static nvmlDevice_t device;

static void list(const char *name, size_t size) {
    int (*ask)(nvmlDevice_t, unsigned *, void *) = (int (*)(nvmlDevice_t, unsigned *, void *))dlsym(library, name);
    unsigned count = 0;
    int result = ask(device, &count, NULL);
    printf("%s.size %d %u\n", name, result, count);
    char entries[ROOM * sizeof(struct v2)];
    memset(entries, 0, sizeof entries);
    count = ROOM;
    result = ask(device, &count, entries);
    printf("%s %d %u", name, result, count);
    for (unsigned i = 0; result == 0 && i < count; i++) {
        struct v1 entry;
        memcpy(&entry, entries + i * size, sizeof entry);
        printf(" %u %llu", entry.pid, entry.bytes);
    }
    printf("\n");
}

static void details(unsigned mode) {
    int (*ask)(nvmlDevice_t, struct detail_list *) =
        (int (*)(nvmlDevice_t, struct detail_list *))dlsym(library, "nvmlDeviceGetRunningProcessDetailList");
    struct detail entries[ROOM] = {{0}};
    struct detail_list asked = {sizeof asked | 1u << 24, mode, 0, NULL};
    int result = ask(device, &asked);
    printf("details%u.size %d %u\n", mode, result, asked.entries);
    asked.entries = ROOM;
    asked.array = entries;
    result = ask(device, &asked);
    printf("details%u %d %u", mode, result, asked.entries);
    for (unsigned i = 0; result == 0 && i < asked.entries; i++)
        printf(" %u %llu", entries[i].pid, entries[i].bytes);
    printf("\n");
}

int main(void) {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) return 2;
    int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*by_index)(unsigned, nvmlDevice_t *) =
        (int (*)(unsigned, nvmlDevice_t *))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    if (init() || by_index(0, &device)) return 3;
    list("nvmlDeviceGetComputeRunningProcesses", sizeof(struct v1));
    list("nvmlDeviceGetComputeRunningProcesses_v2", sizeof(struct v2));
    list("nvmlDeviceGetComputeRunningProcesses_v3", sizeof(struct v2));
    list("nvmlDeviceGetGraphicsRunningProcesses_v3", sizeof(struct v2));
    list("nvmlDeviceGetMPSComputeRunningProcesses_v3", sizeof(struct v2));
    for (unsigned mode = 0; mode < 5; mode++) details(mode);
    int (*utilization)(nvmlDevice_t, struct sample *, unsigned *, unsigned long long) =
        (int (*)(nvmlDevice_t, struct sample *, unsigned *, unsigned long long))dlsym(
            library, "nvmlDeviceGetProcessUtilization");
    struct sample samples[ROOM];
    unsigned count = ROOM;
    int result = utilization(device, samples, &count, 0);
    printf("utilization %d %u\n", result, count);
    return 0;
}
