/*
 * Calls any function of the driver or of NVML with any arguments, one call per line of standard input:
 *
 *   EXPORT WORD… -> RESULT VALUE… (of each place among the words, its first 40 bytes)
 *
 * A word is a number; `@`, a place of zeros to read from or write to; `@NAME`, a place that holds what `places` has
 * under that name; or `$NAME`, an object that is made for this call.
 *
 * Functions that the driver lacks answer -2, calls that crash it -4; an object that cannot be made ends the program.
 *
 * Written from the CUDA Driver API and NVML manuals.
 */
#include "driver.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

typedef unsigned long long word;
typedef CUresult (*any)(word, word, word, word, word, word, word, word, word, word, word);

static void *cuda, *nvml;

static any find(const char *name) {
    void *found = dlsym(strncmp(name, "nvml", 4) ? cuda : nvml, name);
    any function;
    memcpy(&function, &found, sizeof function);
    return function;
}

/* A call that must succeed. */
#define MUST(name, ...)                                                                            \
    do {                                                                                           \
        CUresult result_ = call(name, (word[11]){__VA_ARGS__});                                    \
        if (result_) {                                                                             \
            fprintf(stderr, "%s: %d\n", name, result_);                                            \
            exit(3);                                                                               \
        }                                                                                          \
    } while (0)

static CUresult call(const char *name, const word *a) {
    any function = find(name);
    if (!function) return -2;
    return function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
}

/* === places === */

#define PLACE 4096
#define PLACES 12
/* Words of each that are shown. */
#define SHOWN 5
static unsigned char memory[PLACES][PLACE] __attribute__((aligned(64)));
static int used;

static const char PTX[] = ".version 7.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry tessera_test()\n{\n\tret;\n}\n";

static word object(const char *name);

/* Structures of cuda.h and nvml.h, as words of four bytes unless they say so. */
static void prepare(unsigned char *place, const char *name) {
#define IS(text) if (!strcmp(name, text))
#define SET(type, ...)                                                                             \
    do {                                                                                           \
        const type values_[] = {__VA_ARGS__};                                                      \
        memcpy(place, values_, sizeof values_);                                                    \
    } while (0)
    IS("name") memcpy(place, "tessera_test", sizeof "tessera_test");
    IS("symbol") memcpy(place, "cuMemAlloc", sizeof "cuMemAlloc");
    IS("ptr") SET(word, object("ptr"));
    IS("size") SET(word, 64);
    /* width, height; float, one channel */
    IS("array") { SET(word, 16, 16); ((unsigned *)place)[4] = 0x20; ((unsigned *)place)[5] = 1; }
    IS("array1") SET(unsigned, 16, 16, 0x20, 1);
    IS("array3") { SET(word, 16, 16, 0); ((unsigned *)place)[6] = 0x20; ((unsigned *)place)[7] = 1; }
    IS("array31") SET(unsigned, 16, 16, 0, 0x20, 1, 0);
    /* pinned, a descriptor, on device 0 */
    IS("location") SET(unsigned, 1, 0);
    IS("allocation") SET(unsigned, 1, 0, 1, 0);
    IS("exported") SET(unsigned, 1, 1, 1, 0);
    IS("config") SET(unsigned, 1, 1, 1, 32, 1, 1);
    /* from address to address */
    IS("copy2") { SET(word, 0, 0, 2, 0, object("ptr"), 0, 64, 0, 0, 2, 0, object("ptr"), 0, 64, 64, 1); }
    IS("copy3") {
        SET(word, 0, 0, 0, 0, 2, 0, object("ptr"), 0, 0, 64, 1, 0, 0, 0, 0, 2, 0, object("ptr"), 0, 0, 64, 1, 64, 1, 1);
    }
    IS("memory2") SET(unsigned, 40 | 2u << 24);
    IS("memory9") SET(unsigned, 40 | 9u << 24);
    IS("details") SET(unsigned, 24 | 1u << 24, 0, 0);
    IS("details9") SET(unsigned, 24 | 9u << 24, 0, 0);
    IS("usage") SET(unsigned, 24 | 1u << 24);
}

static word place(const char *name) {
    if (used == PLACES) exit(4);
    unsigned char *at = memory[used++];
    memset(at, 0, PLACE);
    prepare(at, name);
    return (word)(uintptr_t)at;
}

/* === objects === */

static void host_function(void *data) {
    (void)data;
}

static word made(const char *export, word a, word b, word c, word d) {
    word out = 0;
    MUST(export, (word)(uintptr_t)&out, a, b, c, d);
    return out;
}

#define AT(structure) ((word)(uintptr_t)(structure))

static word object(const char *name) {
    unsigned char structure[128] = {0};
    word out = 0;
    IS("ptr") return made("cuMemAlloc_v2", 4096, 0, 0, 0);
    IS("ptr1") {
        unsigned old = 0;
        MUST("cuMemAlloc", AT(&old), 4096);
        return old;
    }
    IS("host") return made("cuMemHostAlloc", 4096, 0, 0, 0);
    IS("context") { MUST("cuCtxGetCurrent", AT(&out)); return out; }
    IS("newcontext") return made("cuCtxCreate_v2", 0, 0, 0, 0);
    IS("stream") return made("cuStreamCreate", 1, 0, 0, 0);
    IS("event") return made("cuEventCreate", 0, 0, 0, 0);
    IS("module") return made("cuModuleLoadData", AT(PTX), 0, 0, 0);
    IS("function") return made("cuModuleGetFunction", object("module"), AT("tessera_test"), 0, 0);
    IS("library") { MUST("cuLibraryLoadData", AT(&out), AT(PTX)); return out; }
    IS("kernel") return made("cuLibraryGetKernel", object("library"), AT("tessera_test"), 0, 0);
    IS("graph") return made("cuGraphCreate", 0, 0, 0, 0);
    IS("exec") return made("cuGraphInstantiateWithFlags", object("graph"), 0, 0, 0);
    IS("node") return made("cuGraphAddEmptyNode", object("graph"), 0, 0, 0);
    IS("array") { prepare(structure, "array"); return made("cuArrayCreate_v2", AT(structure), 0, 0, 0); }
    IS("mipmap") { prepare(structure, "array3"); return made("cuMipmappedArrayCreate", AT(structure), 1, 0, 0); }
    IS("pool") { prepare(structure, "allocation"); return made("cuMemPoolCreate", AT(structure), 0, 0, 0); }
    IS("handle") { prepare(structure, "exported"); return made("cuMemCreate", 2 << 20, AT(structure), 0, 0); }
    IS("range") return made("cuMemAddressReserve", 2 << 20, 0, 0, 0);
    IS("mapped") {
        word range = object("range");
        MUST("cuMemMap", range, 2 << 20, 0, object("handle"), 0);
        return range;
    }
    IS("shared") {
        int fd = -1;
        MUST("cuMemExportToShareableHandle", AT(&fd), object("handle"), 1, 0);
        return (word)fd;
    }
    IS("callback") return AT(host_function);
    /* Its place is the last argument. */
    IS("device") {
        MUST("nvmlDeviceGetHandleByIndex_v2", 0, AT(&out));
        return out;
    }
    fprintf(stderr, "no object %s\n", name);
    exit(3);
}

/* === calls === */

static sigjmp_buf crashed;

static void crash(int signal) {
    siglongjmp(crashed, signal);
}

struct ipc {
    unsigned char bytes[64];
};

static CUresult run(const char *name, const word *words) {
    if (sigsetjmp(crashed, 1)) return -4;
    if (!strncmp(name, "cuIpcOpenMemHandle", strlen("cuIpcOpenMemHandle"))) {
        /* The handle goes by value; a word has its place. */
        static const struct ipc none;
        CUresult (*open)(word, struct ipc, word);
        any function = find(name);
        memcpy(&open, &function, sizeof open);
        return open(words[0], words[1] ? *(struct ipc *)(uintptr_t)words[1] : none, words[2]);
    }
    return call(name, words);
}

int main(void) {
    char line[1024];
    struct sigaction action = {.sa_handler = crash, .sa_flags = SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!cuda || !nvml) return 3;
    MUST("cuInit", 0);
    MUST("nvmlInit_v2", 0);
    word context = made("cuDevicePrimaryCtxRetain", 0, 0, 0, 0);
    while (fgets(line, sizeof line, stdin)) {
        char *rest = line, *name = strsep(&rest, " \n"), *text;
        word words[11] = {0};
        int count = 0;
        used = 0;
        /* A call may have left another one current, or ended it. */
        call("cuCtxSetCurrent", (word[11]){context});
        if (!find(name)) {
            printf("-2\n");
            fflush(stdout);
            continue;
        }
        while ((text = strsep(&rest, " \n")) && count < 11) {
            if (!*text) continue;
            if (*text == '@') words[count++] = place(text + 1);
            else if (*text == '$') words[count++] = object(text + 1);
            else words[count++] = strtoull(text, NULL, 0);
        }
        printf("%d", run(name, words));
        for (int i = 0; i < used; i++) {
            for (int at = 0; at < SHOWN; at++) printf(" %llu", ((word *)memory[i])[at]);
        }
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
