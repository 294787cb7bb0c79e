/*
 * Programs whose work in flight waits for work that is not launched yet, as collectives, waits for
 * memory, host functions and captures have it:
 *
 *   tied SHAPE MILLISECONDS [KERNEL_US] -> "steps N" when the time is over and all is complete
 *
 *   none       kernels in one stream, a synchronisation every eight: for comparison
 *   gpus       one thread, two GPUs: each writes its word, waits for the other's, and computes
 *   ahead      the same, synchronised every sixteenth step only
 *   threads    the same with a thread for each GPU
 *   processes  a host function of one process waits for the other's result, which takes a kernel
 *   ranks      two processes, two GPUs: a wait in the stream for what the other's stream writes
 *   host       a host function waits for what its thread does after the next launch
 *   value      cuStreamWaitValue32 for a word that the host writes after the next launch
 *   tune       work in the default stream, then a relaxed capture of a blocking stream while kernels are
 *              timed in a non-blocking one
 *   own        kernels in a per-thread default stream beside an open capture
 *   others     one thread captures while another computes in its per-thread default stream
 *
 * Written from the CUDA Driver API manual.
 */
#include "shapes.h"

#define PER_THREAD ((CUstream)2)
#define MORE(X)                                                                                    \
    X(cuStreamWaitValue32_v2, (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags))        \
    X(cuStreamWriteValue32_v2, (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags))       \
    X(cuLaunchHostFunc, (CUstream s, void (*function)(void *), void *data))                        \
    X(cuStreamBeginCapture_v2, (CUstream s, int mode))                                             \
    X(cuStreamEndCapture, (CUstream s, void **graph))                                              \
    X(cuGraphDestroy, (void *graph))
MORE(DECLARE_OWN)

static void load_own(void *handle) {
    COMMON(LOAD_OWN)
    MORE(LOAD_OWN)
}

/* A part of a collective on one GPU: tells the other that it is there, waits for it, computes. */
static void collective(int device, uint32_t step) {
    CUstream stream = gpus[device].stream;
    use(device);
    launch(device, stream);
    MUST(cuStreamWriteValue32_v2(stream, words[device], step, 0));
    MUST(cuStreamWaitValue32_v2(stream, words[!device], step, 0));
    launch(device, stream);
}

static unsigned long long both(uint32_t every) {
    uint32_t step = 0;
    open_gpu(0);
    open_gpu(1);
    open_words();
    while (!is_over()) {
        step++;
        collective(0, step);
        collective(1, step);
        if (step % every && !is_over()) continue;
        for (int device = 0; device < 2; device++) {
            use(device);
            MUST(cuStreamSynchronize(gpus[device].stream));
        }
    }
    return step;
}

static void *one_gpu(void *argument) {
    int device = (int)(intptr_t)argument;
    uint32_t step = 0;
    /* As many steps as the other. */
    while (!shared->over || step < shared->over) {
        step++;
        collective(device, step);
        if (step % 8 == 0) MUST(cuStreamSynchronize(gpus[device].stream));
        /* The other may be some steps ahead, up to its next synchronisation. */
        if (!device && is_over() && !shared->over) shared->over = step + 16;
    }
    MUST(cuStreamSynchronize(gpus[device].stream));
    return NULL;
}

static unsigned long long threads(void) {
    pthread_t other;
    open_gpu(0);
    open_gpu(1);
    open_words();
    pthread_create(&other, NULL, one_gpu, (void *)1);
    one_gpu((void *)0);
    pthread_join(other, NULL);
    return shared->over;
}

static void await(void *step) {
    while (shared->done[1] < (uint32_t)(uintptr_t)step && !shared->over) usleep(20);
}

/* The first process's stream waits, in a host function, for the second's result. */
static unsigned long long processes(void) {
    uint32_t step = 0;
    pid_t child = fork();
    open_gpu(0);
    if (!child) {
        while (!shared->over) {
            if (shared->done[0] == step) {
                usleep(20);
                continue;
            }
            launch(0, gpus[0].stream);
            MUST(cuStreamSynchronize(gpus[0].stream));
            shared->done[1] = ++step;
        }
        _exit(0);
    }
    while (!is_over()) {
        step++;
        launch(0, gpus[0].stream);
        MUST(cuLaunchHostFunc(gpus[0].stream, await, (void *)(uintptr_t)step));
        launch(0, gpus[0].stream);
        shared->done[0] = step;
        MUST(cuStreamSynchronize(gpus[0].stream));
    }
    shared->over = 1;
    waitpid(child, NULL, 0);
    return step;
}

static unsigned long long ranks(void) {
    pid_t child = fork();
    int device = !child;
    open_gpu(device);
    open_words();
    one_gpu((void *)(intptr_t)device);
    if (!child) _exit(0);
    waitpid(child, NULL, 0);
    return shared->over;
}

static void await_host(void *step) {
    while (shared->done[0] < (uint32_t)(uintptr_t)step) usleep(20);
}

static unsigned long long by_host(int by_value) {
    uint32_t step = 0;
    open_gpu(0);
    open_words();
    while (!is_over()) {
        step++;
        launch(0, gpus[0].stream);
        if (by_value) {
            MUST(cuStreamWaitValue32_v2(gpus[0].stream, words[0], step, 0));
        } else {
            MUST(cuLaunchHostFunc(gpus[0].stream, await_host, (void *)(uintptr_t)step));
        }
        launch(0, gpus[0].stream);
        launch(0, gpus[0].other);
        shared->done[0] = step;
        shared->word[0] = step;
        if (step % 4 == 0) MUST(cuStreamSynchronize(gpus[0].other));
    }
    MUST(cuCtxSynchronize());
    return step;
}

static void end_capture(CUstream stream) {
    void *graph = NULL;
    MUST(cuStreamEndCapture(stream, &graph));
    MUST(cuGraphDestroy(graph));
}

static unsigned long long tune(void) {
    unsigned long long steps = 0;
    open_gpu(0);
    while (!is_over()) {
        launch(0, NULL);
        launch(0, NULL);
        MUST(cuStreamBeginCapture_v2(gpus[0].blocking, 2 /* relaxed */));
        for (int at = 0; at < 4; at++) {
            launch(0, gpus[0].blocking);
            launch(0, gpus[0].other);
            MUST(cuStreamSynchronize(gpus[0].other));
        }
        end_capture(gpus[0].blocking);
        steps++;
    }
    MUST(cuCtxSynchronize());
    return steps;
}

static unsigned long long own(void) {
    unsigned long long steps = 0;
    open_gpu(0);
    while (!is_over()) {
        MUST(cuStreamBeginCapture_v2(gpus[0].blocking, 2));
        for (int at = 0; at < 6; at++) {
            launch(0, gpus[0].blocking);
            launch(0, PER_THREAD);
        }
        end_capture(gpus[0].blocking);
        MUST(cuStreamSynchronize(PER_THREAD));
        steps++;
    }
    return steps;
}

static void *computes(void *unused) {
    (void)unused;
    use(0);
    while (!shared->over) {
        for (int at = 0; at < 4; at++) launch(0, PER_THREAD);
        MUST(cuStreamSynchronize(PER_THREAD));
    }
    return NULL;
}

static unsigned long long others(void) {
    unsigned long long steps = 0;
    pthread_t thread;
    open_gpu(0);
    pthread_create(&thread, NULL, computes, NULL);
    while (!is_over()) {
        MUST(cuStreamBeginCapture_v2(gpus[0].blocking, 2));
        for (int at = 0; at < 4; at++) {
            launch(0, gpus[0].blocking);
            launch(0, gpus[0].other);
        }
        MUST(cuStreamSynchronize(gpus[0].other));
        end_capture(gpus[0].blocking);
        steps++;
    }
    shared->over = 1;
    pthread_join(thread, NULL);
    return steps;
}

static unsigned long long none(void) {
    unsigned long long steps = 0;
    open_gpu(0);
    while (!is_over()) {
        for (int at = 0; at < 8; at++) launch(0, gpus[0].stream);
        MUST(cuStreamSynchronize(gpus[0].stream));
        steps++;
    }
    return steps;
}

static unsigned long long one_by_one(void) {
    return both(1);
}

static unsigned long long ahead(void) {
    return both(16);
}

static unsigned long long host(void) {
    return by_host(0);
}

static unsigned long long value(void) {
    return by_host(1);
}

int main(int count, char **arguments) {
    const struct shape shapes[] = {
        {"gpus", one_by_one}, {"ahead", ahead},  {"threads", threads}, {"processes", processes},
        {"ranks", ranks},     {"host", host},    {"value", value},     {"tune", tune},
        {"own", own},         {"others", others}, {"none", none},      {NULL, NULL},
    };
    return play(shapes, count, arguments);
}
