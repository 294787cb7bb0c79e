/* A library that has nothing to do with CUDA but exports names like the driver's. */
int cuInit(unsigned flags) {
    (void)flags;
    return 4242;
}
int cuMemAlloc_v2(void *ptr, unsigned long bytes) {
    (void)ptr, (void)bytes;
    return 4243;
}
int nvmlDeviceGetMemoryInfo(void *device, void *memory) {
    (void)device, (void)memory;
    return 4244;
}
int curl_easy_init(void) {
    return 1;
}
int cublasCreate_v2(void) {
    return 2;
}
int cudaMalloc(void) {
    return 3;
}
int custom(void) {
    return 4;
}
int nvmlish(void) {
    return 5;
}
