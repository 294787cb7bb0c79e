/*
 * What programs do with their C library, for C libraries other than this machine's: threads with
 * thread-locals, fork and exec, exit handlers, and all that goes by way of dlsym. With the argument
 * `cuda`, a few driver calls too. With `true`, nothing at all.
 */
#include "driver.h"

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static _Thread_local int own = 7;
static int sum;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *worker(void *arg) {
    own += (int)(intptr_t)arg;
    void *memory = malloc(1000);
    pthread_mutex_lock(&lock);
    sum += own;
    pthread_mutex_unlock(&lock);
    free(memory);
    return dlsym(RTLD_DEFAULT, "getpid");
}

static void at_exit(void) {
    printf("exit handler %d\n", dlsym(RTLD_DEFAULT, "cuInit") != NULL);
    fflush(stdout);
}

static void cuda(void) {
    CUcontext ctx;
    CUdeviceptr fits = 0, beyond = 0;
    size_t avail = 0, total = 0;
    load_driver();
    printf("init %d\n", cuInit(0));
    printf("retain %d\n", cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx));
    printf("fits %d\n", cuMemAlloc_v2(&fits, 16 << 20));
    printf("beyond %d\n", cuMemAlloc_v2(&beyond, 100 << 20));
    printf("info %d\n", cuMemGetInfo_v2(&avail, &total));
    printf("free %zu total %zu\n", avail >> 20, total >> 20);
    printf("freed %d\n", cuMemFree_v2(fits));
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "true") == 0) return 0;
    if (argc > 1 && strcmp(argv[1], "cuda") == 0) {
        cuda();
        return 0;
    }
    atexit(at_exit);
    pthread_t threads[32];
    int found = 0;
    for (intptr_t i = 0; i < 32; i++) pthread_create(&threads[i], NULL, worker, (void *)i);
    for (int i = 0; i < 32; i++) {
        void *getpid_found = NULL;
        pthread_join(threads[i], &getpid_found);
        found += getpid_found == (void *)getpid;
    }
    printf("threads %d found %d own %d\n", sum, found, own);

    void *self = dlopen(NULL, RTLD_NOW);
    printf("self %d\n", self != NULL && dlsym(self, "main") == dlsym(RTLD_DEFAULT, "main"));
    printf("next %d\n", dlsym(RTLD_NEXT, "printf") == (void *)printf);
    dlerror();
    printf("missing %d", dlsym(RTLD_DEFAULT, "no_such_function") != NULL);
    printf(" error %d\n", dlerror() != NULL);
    printf("driver %d", dlsym(RTLD_DEFAULT, "cuInit") != NULL);
    printf(" error %d\n", dlerror() != NULL);
    printf("library %d error %d\n", dlopen("libno_such.so", RTLD_NOW) != NULL, dlerror() != NULL);
    fflush(stdout);

    pid_t child = fork();
    if (child == 0) _exit(dlsym(RTLD_DEFAULT, "getpid") == (void *)getpid ? 3 : 4);
    int status = 0;
    waitpid(child, &status, 0);
    printf("child %d\n", WEXITSTATUS(status));
    fflush(stdout);
    child = vfork();
    if (child == 0) {
        execl(argv[0], argv[0], "true", (char *)NULL);
        _exit(5);
    }
    waitpid(child, &status, 0);
    printf("again %d\n", WEXITSTATUS(status));
    return 0;
}
