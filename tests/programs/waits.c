/*
 * Programs whose work waits for what other processes, the host, or parts of a graph do:
 *
 *   waits SHAPE MILLISECONDS [KERNEL_US] -> "steps N" when the time is over and all is complete
 *
 *   semaphores   a stream waits for a semaphore that another process's stream signals, after a kernel
 *   helper       a host function waits for a forked child that uses no GPU, and is asked after the next
 *                launch
 *   persistent   a kernel runs until the host writes a word, which it does after the next launch
 *   events       two processes, each of which waits in its stream for what the other recorded in its own
 *   nodes        a graph of a kernel, a host node and a kernel; the node waits for what its thread does
 *                after the next launch
 *   naps         the same, with a host node that sleeps for four times as long as the kernels take
 *   conditional  a graph with a conditional node, whose body is a kernel, then a host node as in nodes
 *
 * Written from the CUDA Driver API manual. Kernel `until` runs until the 32-bit word at its first parameter
 * has reached the second.
 */
#include "shapes.h"

#define MORE(X)                                                                                    \
    X(cuImportExternalSemaphore, (void **semaphore, const void *description))                      \
    X(cuSignalExternalSemaphoresAsync,                                                             \
      (void *const *semaphores, const void *params, unsigned count, CUstream s))                   \
    X(cuWaitExternalSemaphoresAsync,                                                               \
      (void *const *semaphores, const void *params, unsigned count, CUstream s))                   \
    X(cuEventCreate, (CUevent * event, unsigned flags))                                            \
    X(cuEventRecord, (CUevent event, CUstream s))                                                  \
    X(cuStreamWaitEvent, (CUstream s, CUevent event, unsigned flags))                              \
    X(cuIpcGetEventHandle, (struct ipc * handle, CUevent event))                                   \
    X(cuIpcOpenEventHandle, (CUevent * event, struct ipc handle))                                  \
    X(cuLaunchHostFunc, (CUstream s, void (*function)(void *), void *data))                        \
    X(cuStreamBeginCaptureToGraph,                                                                 \
      (CUstream s, void *graph, void *const *nodes, const void *edges, size_t count, int mode))    \
    X(cuStreamEndCapture, (CUstream s, void **graph))                                              \
    X(cuGraphCreate, (void **graph, unsigned flags))                                               \
    X(cuGraphConditionalHandleCreate,                                                              \
      (unsigned long long *handle, void *graph, CUcontext context, unsigned value, unsigned flags)) \
    X(cuGraphAddNode,                                                                              \
      (void **node, void *graph, void *const *nodes, size_t count, void *params))                  \
    X(cuGraphInstantiateWithFlags, (void **exec, void *graph, unsigned long long flags))           \
    X(cuGraphLaunch, (void *exec, CUstream s))
struct ipc {
    char bytes[64];
};
MORE(DECLARE_OWN)

static void load_own(void *handle) {
    COMMON(LOAD_OWN)
    MORE(LOAD_OWN)
}

/* === semaphores === */

/* CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC */
struct description {
    int type;
    union {
        int fd;
        void *both[2];
    } handle;
    unsigned flags, reserved[16];
};
/* CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, and of waits, for timelines. */
struct fence {
    unsigned long long value, others[8];
    unsigned flags, reserved[16];
};

static void *import(int fd) {
    void *semaphore;
    struct description description = {.type = 9 /* TIMELINE_SEMAPHORE_FD */, .handle.fd = dup(fd)};
    MUST(cuImportExternalSemaphore(&semaphore, &description));
    return semaphore;
}

static unsigned long long semaphores(void) {
    uint32_t step = 0;
    int fd = memfd_create("timeline", 0);
    if (fd < 0 || ftruncate(fd, 4096)) return 0;
    pid_t child = fork();
    open_gpu(0);
    void *semaphore = import(fd);
    CUstream stream = gpus[0].stream;
    if (!child) {
        while (!shared->over) {
            if (shared->done[0] == step) {
                usleep(20);
                continue;
            }
            struct fence fence = {.value = ++step};
            launch(0, stream);
            MUST(cuSignalExternalSemaphoresAsync(&semaphore, &fence, 1, stream));
        }
        MUST(cuStreamSynchronize(stream));
        _exit(0);
    }
    while (!is_over()) {
        struct fence fence = {.value = ++step};
        launch(0, stream);
        MUST(cuWaitExternalSemaphoresAsync(&semaphore, &fence, 1, stream));
        launch(0, stream);
        shared->done[0] = step;
        MUST(cuStreamSynchronize(stream));
    }
    shared->over = 1;
    waitpid(child, NULL, 0);
    return step;
}

/* === the host === */

static void await_child(void *step) {
    while (shared->done[1] < (uint32_t)(uintptr_t)step) usleep(20);
}

static unsigned long long helper(void) {
    uint32_t step = 0;
    pid_t child = fork();
    while (!child && !shared->over) {
        /* What it is asked for takes it a moment. */
        uint32_t asked = shared->done[0];
        if (asked == shared->done[1]) usleep(20);
        usleep(50);
        shared->done[1] = asked;
    }
    if (!child) _exit(0);
    open_gpu(0);
    while (!is_over()) {
        step++;
        launch(0, gpus[0].stream);
        MUST(cuLaunchHostFunc(gpus[0].stream, await_child, (void *)(uintptr_t)step));
        launch(0, gpus[0].stream);
        launch(0, gpus[0].other);
        shared->done[0] = step;
        if (step % 4 == 0) MUST(cuCtxSynchronize());
    }
    MUST(cuCtxSynchronize());
    shared->over = 1;
    waitpid(child, NULL, 0);
    return step;
}

static unsigned long long persistent(void) {
    CUmodule module;
    CUfunction until;
    uint32_t step = 0;
    open_gpu(0);
    open_words();
    MUST(cuModuleLoadData(&module,
                          ".version 6.0\n.target sm_50\n.address_size 64\n"
                          ".visible .entry until(.param .u64 at, .param .u64 value) { ret; }\n"));
    MUST(cuModuleGetFunction(&until, module, "until"));
    /* Loaded lazily behind the kernel that the host ends, this one would wait for its end for ever. */
    launch(0, gpus[0].other);
    CUstream a, b;
    MUST(cuStreamCreate(&a, 0));
    MUST(cuStreamCreate(&b, 0));
    while (!is_over()) {
        unsigned long long at = words[0], value = ++step;
        void *params[] = {&at, &value};
        MUST(cuLaunchKernel(until, 1, 1, 1, 1, 1, 1, 0, a, params, NULL));
        launch(0, b);
        MUST(cuStreamSynchronize(b));
        shared->word[0] = step;
        MUST(cuCtxSynchronize());
        launch(0, NULL);
    }
    return step;
}

/* === events of another process === */

static struct ipc *names;

/* Waits until a word that the other process writes has reached `value`; 0 where all is over. */
static int reached(_Atomic uint32_t *word, uint32_t value) {
    while (*word < value) {
        if (shared->over) return 0;
        usleep(20);
    }
    return 1;
}

static unsigned long long events(void) {
    uint32_t step = 0;
    CUevent own, theirs;
    names = (struct ipc *)((char *)shared + 1024);
    pid_t child = fork();
    int me = !child;
    open_gpu(0);
    CUstream stream = gpus[0].stream;
    MUST(cuEventCreate(&own, 6 /* disable timing, interprocess */));
    MUST(cuIpcGetEventHandle(&names[me], own));
    shared->word[me] = 1;
    if (!reached(&shared->word[!me], 1)) _exit(4);
    MUST(cuIpcOpenEventHandle(&theirs, names[!me]));
    /* By turns: a wait is for what was recorded last when it is called. */
    for (;;) {
        if (me ? !reached(&shared->done[0], step + 1) : is_over()) break;
        if (step || me) MUST(cuStreamWaitEvent(stream, theirs, 0));
        launch(0, stream);
        MUST(cuEventRecord(own, stream));
        shared->done[me] = ++step;
        if (!me && !reached(&shared->done[1], step)) break;
        if (step % 8 == 0) MUST(cuStreamSynchronize(stream));
    }
    shared->over = 1;
    MUST(cuStreamSynchronize(stream));
    /* Whoever ends takes its event along. */
    shared->word[me] = 2;
    while (shared->word[!me] < 2) usleep(20);
    if (!child) _exit(0);
    waitpid(child, NULL, 0);
    return step;
}

/* === graphs === */

static _Atomic uint32_t calls;

static void await_thread(void *unused) {
    uint32_t call = ++calls;
    (void)unused;
    while (shared->done[0] < call) usleep(20);
}

static void nap(void *unused) {
    (void)unused;
    usleep(8 * kernel_ns / 1000);
}

/* A kernel, or a conditional node with one in its body, a host node, a kernel. */
static void *build(void (*function)(void *), int conditional) {
    void *graph, *exec, *first = NULL;
    CUstream stream = gpus[0].blocking;
    MUST(cuGraphCreate(&graph, 0));
    if (conditional) {
        /* CUgraphNodeParams with CUDA_CONDITIONAL_NODE_PARAMS */
        struct {
            int type, reserved[3];
            unsigned long long handle;
            int kind;
            unsigned size;
            void **bodies;
            CUcontext context;
            long long rest[26];
        } params = {.type = 13, .kind = 0 /* if */, .size = 1, .context = gpus[0].context};
        MUST(cuGraphConditionalHandleCreate(&params.handle, graph, gpus[0].context, 1, 1));
        MUST(cuGraphAddNode(&first, graph, NULL, 0, &params));
        MUST(cuStreamBeginCaptureToGraph(stream, params.bodies[0], NULL, NULL, 0, 2));
        launch(0, stream);
        MUST(cuStreamEndCapture(stream, params.bodies));
    }
    MUST(cuStreamBeginCaptureToGraph(stream, graph, &first, NULL, !!conditional, 2));
    if (!conditional) launch(0, stream);
    MUST(cuLaunchHostFunc(stream, function, NULL));
    launch(0, stream);
    MUST(cuStreamEndCapture(stream, &graph));
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

static unsigned long long graphs(int conditional) {
    uint32_t step = 0;
    open_gpu(0);
    void *exec = build(await_thread, conditional);
    while (!is_over()) {
        step++;
        MUST(cuGraphLaunch(exec, gpus[0].stream));
        launch(0, gpus[0].other);
        shared->done[0] = step;
        if (step % 4 == 0) MUST(cuCtxSynchronize());
    }
    MUST(cuCtxSynchronize());
    return step;
}

static unsigned long long nodes(void) {
    return graphs(0);
}

static unsigned long long conditional(void) {
    return graphs(1);
}

static unsigned long long naps(void) {
    uint32_t step = 0;
    open_gpu(0);
    void *exec = build(nap, 0);
    while (!is_over()) {
        step++;
        MUST(cuGraphLaunch(exec, gpus[0].stream));
        MUST(cuStreamSynchronize(gpus[0].stream));
    }
    return step;
}

int main(int count, char **arguments) {
    const struct shape shapes[] = {
        {"semaphores", semaphores}, {"helper", helper}, {"persistent", persistent},
        {"events", events},         {"nodes", nodes},   {"conditional", conditional},
        {"naps", naps},             {NULL, NULL},
    };
    return play(shapes, count, arguments);
}
