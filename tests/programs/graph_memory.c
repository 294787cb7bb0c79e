/*
 * Graphs that allocate: one call per line of standard input, answered `RESULT VALUE…`.
 *
 *   trim DEV
 *   graph BYTES COUNT -> exec (COUNT allocation nodes of BYTES, freed in the graph)
 *   loose BYTES -> exec ptr (one allocation node that the graph does not free)
 *   nested BYTES -> exec (the same as `graph BYTES 1`, in a child graph)
 *   capture BYTES -> exec (cuMemAllocAsync and cuMemFreeAsync in a capturing stream)
 *   uploaded BYTES -> exec (instantiated with an upload)
 *   plain -> exec (no allocation nodes)
 *   update EXEC (from a new graph with the same nodes)
 *   launch EXEC STREAM | upload EXEC STREAM | destroy EXEC
 *   free_async PTR STREAM
 *   reserved DEV -> bytes that the driver keeps for graphs
 *
 * Written from the CUDA Driver API manual, "Graph Management".
 */
#include "conversation.h"

typedef void *CUgraph, *CUgraphNode, *CUgraphExec;
typedef struct {
    CUmemPoolProps poolProps;
    const void *accessDescs;
    size_t accessDescCount, bytesize;
    CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS;
typedef struct {
    unsigned long long flags;
    CUstream hUploadStream;
    CUgraphNode hErrNode_out;
    int result_out;
} CUDA_GRAPH_INSTANTIATE_PARAMS;
typedef struct {
    int result;
    CUgraphNode errorNode, errorFromNode;
} CUgraphExecUpdateResultInfo;
/* CUgraphNodeParams with a child graph in it. */
typedef struct {
    int type, reserved0[3];
    CUgraph graph;
    int ownership;
    char rest[232 - sizeof(CUgraph) - sizeof(int)];
    long long reserved2;
} ChildParams;

#define MORE(X)                                                                                    \
    X(cuGraphCreate, (CUgraph * graph, unsigned flags))                                            \
    X(cuGraphAddMemAllocNode,                                                                      \
      (CUgraphNode * node, CUgraph graph, const CUgraphNode *after, size_t count,                  \
       CUDA_MEM_ALLOC_NODE_PARAMS *params))                                                        \
    X(cuGraphAddMemFreeNode,                                                                       \
      (CUgraphNode * node, CUgraph graph, const CUgraphNode *after, size_t count, CUdeviceptr ptr))  \
    X(cuGraphAddEmptyNode,                                                                         \
      (CUgraphNode * node, CUgraph graph, const CUgraphNode *after, size_t count))                 \
    X(cuGraphAddNode_v2, (CUgraphNode * node, CUgraph graph, const CUgraphNode *after,             \
                          const void *edges, size_t count, void *params))                          \
    X(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))  \
    X(cuGraphInstantiateWithParams,                                                                \
      (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params))                  \
    X(cuGraphLaunch, (CUgraphExec exec, CUstream stream))                                          \
    X(cuGraphUpload, (CUgraphExec exec, CUstream stream))                                          \
    X(cuGraphExecDestroy, (CUgraphExec exec))                                                      \
    X(cuGraphExecUpdate_v2,                                                                        \
      (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info))                        \
    X(cuDeviceGraphMemTrim, (CUdevice dev))                                                        \
    X(cuDeviceGetGraphMemAttribute, (CUdevice dev, int attribute, void *value))                    \
    X(cuStreamBeginCapture_v2, (CUstream stream, int mode))                                        \
    X(cuStreamEndCapture, (CUstream stream, CUgraph *graph))
MORE(DECLARE_MORE)

static CUresult add(CUgraph graph, size_t bytes, int count, int freed, CUdeviceptr *ptr) {
    CUgraphNode nodes[64], last = NULL;
    CUdeviceptr at[64];
    CUresult result = count < 1 || count > 64 ? -1 : 0;
    for (int i = 0; i < count && result == 0; i++) {
        CUDA_MEM_ALLOC_NODE_PARAMS params = {
            .poolProps = {.allocType = 1, .location = {.type = 1, .id = 0}}, .bytesize = bytes};
        result = more_cuGraphAddMemAllocNode(&nodes[i], graph, i ? &nodes[i - 1] : NULL, i > 0,
                                             &params);
        *ptr = at[i] = params.dptr;
        last = nodes[i];
    }
    for (int i = 0; i < count && freed && result == 0; i++) {
        CUgraphNode after = last;
        result = more_cuGraphAddMemFreeNode(&last, graph, &after, 1, at[i]);
    }
    return result;
}

static CUresult make(const char *how, size_t bytes, int count, CUgraph *graph, CUdeviceptr *ptr) {
    CUresult result = 0;
    if (strcmp(how, "capture") == 0) {
        result = more_cuStreamBeginCapture_v2(stream(0), 0 /* global */);
        if (result == 0) result = cuMemAllocAsync(ptr, bytes, stream(0));
        if (result == 0) result = cuMemFreeAsync(*ptr, stream(0));
        CUresult ended = more_cuStreamEndCapture(stream(0), graph);
        return result ? result : ended;
    }
    result = more_cuGraphCreate(graph, 0);
    if (result != 0) return result;
    if (strcmp(how, "plain") == 0) {
        CUgraphNode node;
        return more_cuGraphAddEmptyNode(&node, *graph, NULL, 0);
    }
    if (strcmp(how, "nested") == 0) {
        ChildParams params = {.type = 4 /* graph */, .ownership = 1 /* moved */};
        CUgraphNode node;
        result = more_cuGraphCreate(&params.graph, 0);
        if (result == 0) result = add(params.graph, bytes, 1, 1, ptr);
        return result ? result : more_cuGraphAddNode_v2(&node, *graph, NULL, NULL, 0, &params);
    }
    return add(*graph, bytes, count, strcmp(how, "loose") != 0, ptr);
}

static void call(const char *line) {
    char command[32] = "";
    unsigned long long a = 0, b = 0;
    sscanf(line, "%31s %llu %llu", command, &a, &b);
    CUgraphExec exec = (CUgraphExec)(uintptr_t)a;
    IS("free_async") ANSWER(cuMemFreeAsync(a, stream(b)));
    IS("trim") ANSWER(more_cuDeviceGraphMemTrim((CUdevice)a));
    IS("launch") ANSWER(more_cuGraphLaunch(exec, stream(b)));
    IS("upload") ANSWER(more_cuGraphUpload(exec, stream(b)));
    IS("destroy") ANSWER(more_cuGraphExecDestroy(exec));
    IS("reserved") {
        unsigned long long bytes = 0;
        CUresult result = more_cuDeviceGetGraphMemAttribute((CUdevice)a, 2, &bytes);
        printf("%d %llu\n", result, bytes);
        return;
    }
    IS("update") {
        CUgraph graph = NULL;
        CUgraphExecUpdateResultInfo info = {0};
        CUresult result = make("plain", 0, 0, &graph, NULL);
        ANSWER(result ? result : more_cuGraphExecUpdate_v2(exec, graph, &info));
    }
    static const char *const kinds[] = {"graph", "loose", "nested", "capture", "uploaded", "plain"};
    int is_kind = 0;
    for (int i = 0; i < 6; i++) is_kind |= strcmp(command, kinds[i]) == 0;
    if (!is_kind) {
        common(line);
        return;
    }
    CUgraph graph = NULL;
    CUdeviceptr ptr = 0;
    exec = NULL;
    CUresult result = make(command, a, (int)(b ? b : 1), &graph, &ptr);
    if (result == 0 && strcmp(command, "uploaded") == 0) {
        CUDA_GRAPH_INSTANTIATE_PARAMS params = {.flags = 2, .hUploadStream = stream(0)};
        result = more_cuGraphInstantiateWithParams(&exec, graph, &params);
    } else if (result == 0) {
        result = more_cuGraphInstantiateWithFlags(&exec, graph, 0);
    }
    printf("%d %llu %llu\n", result, (unsigned long long)(uintptr_t)exec, ptr);
}

CONVERSATION
