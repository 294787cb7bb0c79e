/*
 * The frame of a program that is driven line by line.
 *
 *   #define MORE(X) X(name, arguments) …          the driver functions that driver.h lacks
 *   MORE(DECLARE_MORE)                            as more_NAME, NULL where the driver has none
 *   static void call(const char *line) { … }      makes the call and prints one line
 *   CONVERSATION                                  main(): a call per line of standard input
 */
#ifndef TESSERA_TESTS_CONVERSATION_H
#define TESSERA_TESTS_CONVERSATION_H

#include "driver.h"

/* cuda.h's, of pools and of allocation nodes. */
typedef struct {
    int type, id;
} CUmemLocation;
typedef struct {
    int allocType, handleTypes;
    CUmemLocation location;
    void *security;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

#define DECLARE_MORE(name, arguments) static CUresult(*more_##name) arguments;
#define LOAD_MORE(name, arguments) *(void **)&more_##name = dlsym(handle, #name);

/* Ends a call with what it answers, and with a value that is looked at afterwards. */
#define ANSWER(...) do { printf("%d\n", (__VA_ARGS__)); return; } while (0)
#define ANSWER_WITH(value, ...)                                                                    \
    do {                                                                                           \
        CUresult result_ = (__VA_ARGS__);                                                          \
        printf("%d %llu\n", result_, (unsigned long long)(value));                                 \
        return;                                                                                    \
    } while (0)

#define CONVERSATION                                                                               \
    int main(void) {                                                                               \
        char line[256];                                                                            \
        load_driver();                                                                             \
        void *handle = dlopen("libcuda.so.1", RTLD_NOW);                                           \
        MORE(LOAD_MORE)                                                                            \
        while (fgets(line, sizeof line, stdin)) {                                                  \
            call(line);                                                                            \
            fflush(stdout);                                                                        \
        }                                                                                          \
        return 0;                                                                                  \
    }

#endif
