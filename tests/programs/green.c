/*
 * Green contexts under a quota. Argument: what.
 *
 *   many      four green contexts; memory in each; all ends with the last
 *   refused   a green context where the primary context does not fit
 *   beside    a retained primary context and green ones, created and destroyed over and over
 */
#include "driver.h"

#include <string.h>

typedef void *CUgreenCtx, *CUdevResourceDesc;
typedef struct {
    int type;
    unsigned char pad[92];
    unsigned value[10];
    void *next;
} CUdevResource;

static int (*get_resource)(CUdevice, CUdevResource *, int);
static int (*split)(CUdevResource *, unsigned *, const CUdevResource *, CUdevResource *, unsigned, unsigned);
static int (*describe)(CUdevResourceDesc *, CUdevResource *, unsigned);
static int (*create)(CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned);
static int (*destroy)(CUgreenCtx);
static int (*view)(CUcontext *, CUgreenCtx);
static int (*stream_in)(CUstream *, CUgreenCtx, unsigned, int);

static void *find(const char *name) {
    void *at = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    if (!at) exit(9);
    return at;
}

static CUgreenCtx green(CUdevResource *of) {
    CUdevResourceDesc desc;
    CUgreenCtx made = NULL;
    int rc = describe(&desc, of, 1);
    if (rc || (rc = create(&made, desc, 0, 1))) {
        printf("create %d\n", rc);
        return NULL;
    }
    return made;
}

int main(int argc, char **argv) {
    CUdevResource all, parts[4], rest;
    CUgreenCtx contexts[4];
    CUdeviceptr ptr[4];
    CUcontext ctx = NULL;
    CUstream s;
    unsigned n = 4;
    if (argc < 3) return 2;
    load_driver();
    if (cuInit(0)) return 2;
    get_resource = find("cuDeviceGetDevResource");
    split = find("cuDevSmResourceSplitByCount");
    describe = find("cuDevResourceGenerateDesc");
    create = find("cuGreenCtxCreate");
    destroy = find("cuGreenCtxDestroy");
    view = find("cuCtxFromGreenCtx");
    stream_in = find("cuGreenCtxStreamCreate");
    if (get_resource(0, &all, 1) || split(parts, &n, &all, &rest, 0, 16) || n != 4) return 3;

    if (strcmp(argv[1], "refused") == 0) return green(&parts[0]) != NULL;

    int rounds = strcmp(argv[1], "beside") == 0 ? 50 : 1;
    if (rounds > 1 && cuDevicePrimaryCtxRetain(&ctx, 0)) return 4;
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < 4; i++) {
            CUcontext own;
            if (!(contexts[i] = green(&parts[i])) || view(&own, contexts[i])) return 5;
            if (cuCtxSetCurrent(own) || stream_in(&s, contexts[i], 1, 0)) return 6;
            if (cuMemAlloc_v2(&ptr[i], 16 << 20)) return 7;
        }
        size_t available, total;
        cuMemGetInfo_v2(&available, &total);
        if (round == 0) printf("used %zu\n", (total - available) >> 20);
        fflush(stdout);
        /* What is freed in another view, and what is left to the end of the primary context. */
        for (int i = 0; i < (rounds > 1 ? 4 : 2); i++)
            if (cuMemFree_v2(ptr[i])) return 8;
        cuCtxSetCurrent(NULL);
        for (int i = 0; i < 4; i++)
            if (destroy(contexts[i])) return 10;
    }
    if (ctx && cuDevicePrimaryCtxRelease_v2(0)) return 11;
    /* The whole quota but a context is there again. */
    if (cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx)) return 12;
    int rc = cuMemAlloc_v2(&ptr[0], (size_t)atoi(argv[2]) << 20);
    printf("again %d\n", rc);
    return 0;
}
