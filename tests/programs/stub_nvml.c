/*
 * A libnvidia-ml.so.1 of another day: 8 GiB, of which process 4242 of a neighbour has 4, and, by STUB_NVML,
 *
 *   nameless   no GPU's UUID can be had: NVML_ERROR_UNKNOWN
 *   versions   every version of a structure is known, in sizes of its own
 *   moody      every second question fails: NVML_ERROR_UNKNOWN
 *
 * Written from the NVML manual.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIB (1ull << 30)
#define NEIGHBOUR 4242u
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, TOO_SMALL = 7, MISMATCH = 25, UNKNOWN = 999 };

static int is(const char *mood) {
    const char *set = getenv("STUB_NVML");
    return set && !strcmp(set, mood);
}

/* What any question begins with. */
static int ask(void) {
    static int asked;
    return is("moody") && ++asked % 2 ? UNKNOWN : SUCCESS;
}

#define ASK                                                                                        \
    do {                                                                                           \
        int result_ = ask();                                                                       \
        if (result_) return result_;                                                               \
    } while (0)

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    static int gpu;
    *device = &gpu;
    return index ? INVALID_ARGUMENT : SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    const char *uuid = getenv("STUB_UUID");
    if (!device || !text || !uuid) return INVALID_ARGUMENT;
    if (is("nameless")) return UNKNOWN;
    return snprintf(text, length, "%s", uuid) < (int)length ? SUCCESS : TOO_SMALL;
}

struct memory {
    unsigned long long total, free, used;
};
struct memory2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    ASK;
    if (!device || !memory) return INVALID_ARGUMENT;
    *memory = (struct memory){8 * GIB, 4 * GIB, 4 * GIB};
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory2 *memory) {
    ASK;
    if (!device || !memory) return INVALID_ARGUMENT;
    if (memory->version != (40 | 2u << 24) && !is("versions")) return MISMATCH;
    *memory = (struct memory2){memory->version, 8 * GIB, 0, 4 * GIB, 4 * GIB};
    return SUCCESS;
}

struct process1 {
    unsigned pid;
    unsigned long long bytes;
};
struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned instances[2];
};

/* A list of one entry of `size` bytes. */
static int list(void *device, unsigned *count, void *entries, const void *entry, size_t size) {
    ASK;
    if (!device || !count) return INVALID_ARGUMENT;
    unsigned room = *count;
    *count = 1;
    if (!room) return TOO_SMALL;
    if (!entries) return INVALID_ARGUMENT;
    memcpy(entries, entry, size);
    return SUCCESS;
}

static const struct process1 FIRST = {NEIGHBOUR, 4 * GIB};
static const struct process SECOND = {NEIGHBOUR, 4 * GIB, {-1u, -1u}};
#define LIST(name, type, entry)                                                                    \
    int name(void *device, unsigned *count, type *entries) {                                       \
        return list(device, count, entries, &entry, sizeof entry);                                 \
    }
#define LISTS(kind)                                                                                \
    LIST(nvmlDeviceGet##kind##RunningProcesses, struct process1, FIRST)                            \
    LIST(nvmlDeviceGet##kind##RunningProcesses_v2, struct process, SECOND)                         \
    LIST(nvmlDeviceGet##kind##RunningProcesses_v3, struct process, SECOND)
LISTS(Compute)
LISTS(Graphics)
LISTS(MPSCompute)
static const unsigned PID = NEIGHBOUR;
LIST(nvmlDeviceGetAccountingPids, unsigned, PID)

/* Newer versions have the entry in the structure itself. */
struct details {
    unsigned version, mode, count;
    struct detail {
        unsigned pid;
        unsigned long long bytes;
        unsigned instances[2];
        unsigned long long protected_bytes;
    } *entries;
};
int nvmlDeviceGetRunningProcessDetailList(void *device, struct details *asked) {
    static const struct detail NEIGHBOURS = {NEIGHBOUR, 4 * GIB, {-1u, -1u}, 0};
    if (!device || !asked) return INVALID_ARGUMENT;
    if (asked->version != (24 | 1u << 24)) {
        ASK;
        if (!is("versions")) return MISMATCH;
        asked->count = NEIGHBOUR;
        return SUCCESS;
    }
    return list(device, &asked->count, asked->entries, &NEIGHBOURS, sizeof NEIGHBOURS);
}

struct sample {
    unsigned pid;
    unsigned long long at;
    unsigned percent[4];
};
static const struct sample SAMPLE = {NEIGHBOUR, 1, {50, 50, 0, 0}};
int nvmlDeviceGetProcessUtilization(void *device, struct sample *samples, unsigned *count, unsigned long long since) {
    (void)since;
    return list(device, count, samples, &SAMPLE, sizeof SAMPLE);
}
struct utilization {
    unsigned version, count;
    unsigned long long seen;
    void *entries;
};
int nvmlDeviceGetProcessesUtilizationInfo(void *device, struct utilization *info) {
    if (!device || !info) return INVALID_ARGUMENT;
    if (info->version != (24 | 1u << 24)) {
        ASK;
        if (!is("versions")) return MISMATCH;
        info->count = NEIGHBOUR;
        return SUCCESS;
    }
    return list(device, &info->count, info->entries, &SAMPLE, sizeof SAMPLE);
}
