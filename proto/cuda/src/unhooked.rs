//! Driver functions that obtain, release or share device memory, or put work on the GPU, and that
//! Tessera deliberately does not hook, each with the reason.
//!
//! A row stands for all variants of one function (`_v2`, `_ptsz`, …). Together with
//! [`HOOKS`] and [`INERT`] it accounts for every function that NVIDIA's headers declare and that libcuda
//! exports; the coverage test fails for one that is in none of them, so that a new CUDA version can't add
//! a way around the quota unnoticed. To hook a function, move its row into the table.

use crate::hooks::HOOKS;
use crate::inert::INERT;

/// Every function that is not hooked though it touches memory or work, without version and flavour suffix.
pub const UNHOOKED: &[&str] = &[
    // Driver-internal memory whose size no call reports: NVML's bytes per process see it, and the quota page's
    // context overhead stands for it.
    "cuGetExportTable", // hands out driver-internal tables, some of which allocate
    "cuGLCtxCreate",    // a context for OpenGL; none in containers with compute capability only
    "cuVDPAUCtxCreate", // a context for VDPAU; none in containers with compute capability only
    "cuCtxFromGreenCtx", // another handle of the primary context, which is charged
    "cuGreenCtxStreamCreate", // queues come from driver-internal slabs
    "cuStreamCreate",   // queues come from driver-internal slabs
    "cuStreamCreateWithPriority", // queues come from driver-internal slabs
    "cuEventCreate",    // semaphores come from driver-internal slabs
    "cuEventDestroy",   // returns to the slab
    "cuModuleLoad",     // code and global variables, often loaded lazily
    "cuModuleLoadData", // code and global variables, often loaded lazily
    "cuModuleLoadDataEx", // code and global variables, often loaded lazily
    "cuModuleLoadFatBinary", // code and global variables, often loaded lazily
    "cuModuleUnload",   // the module's memory
    "cuModuleGetGlobal", // may load its module's variables now
    "cuFuncLoad",       // loads a lazily loaded function now
    "cuLibraryLoadData", // code and global variables, often loaded lazily
    "cuLibraryLoadFromFile", // code and global variables, often loaded lazily
    "cuLibraryUnload",  // the library's memory, in every context
    "cuLibraryGetModule", // loads the library into the current context
    "cuLibraryGetGlobal", // may load the library into the current context
    "cuLibraryGetManaged", // managed variables; their size is the library's
    "cuCtxDisablePeerAccess", // the page tables of cuCtxEnablePeerAccess
    "cuTexObjectCreate", // a descriptor in a table that the context owns
    "cuTexObjectDestroy", // a descriptor in a table that the context owns
    "cuSurfObjectCreate", // a descriptor in a table that the context owns
    "cuSurfObjectDestroy", // a descriptor in a table that the context owns
    "cuCtxEnablePeerAccess", // page tables for the peer's memory
    "cuMemSetAccess",   // page tables for a mapped range
    // Fabric endpoints hold what is bound to them beyond its release, for other nodes.
    "cuLogicalEndpointCreate", // a fabric object; its memory comes with binding (CUDA 13)
    "cuLogicalEndpointBindMem", // holds existing memory on a fabric object (CUDA 13)
    "cuLogicalEndpointBindAddr", // holds existing memory on a fabric object (CUDA 13)
    "cuLogicalEndpointImport", // another node's memory, charged there (CUDA 13)
    "cuLogicalEndpointUnbind", // ends what a bind held (CUDA 13)
    "cuLogicalEndpointDestroy", // ends what its binds held (CUDA 13)
    // The others need no hook by design.
    //
    // Host memory is the container's memory cgroup's affair.
    "cuMemAllocHost",      // host memory
    "cuMemHostAlloc",      // host memory
    "cuMemFreeHost",       // host memory
    "cuMemHostRegister",   // host memory
    "cuMemHostUnregister", // host memory
    // Managed memory is charged in full when it is allocated, wherever its pages are.
    "cuMemPrefetchAsync",      // managed memory is charged when allocated
    "cuMemPrefetchBatchAsync", // managed memory is charged when allocated
    "cuMemDiscardBatchAsync",  // discards contents; the range stays allocated
    "cuMemDiscardAndPrefetchBatchAsync", // managed memory is charged when allocated
    "cuMemAdvise",             // managed memory is charged when allocated
    // Pools are charged by what the driver reserves for them, in the process that made them.
    "cuMemPoolExportToShareableHandle", // a name for a pool; holds nothing alive by itself
    "cuMemPoolExportPointer",           // a name for an allocation, which importers must free first
    "cuMemPoolImportPointer",           // the exporting process is charged
    "cuMemPoolSetAccess",               // a peer's view of a pool; page tables on the peer
    "cuDeviceSetMemPool",               // which pool is current is asked at each allocation
    "cuMemSetMemPool", // which pool is current is asked at each allocation (CUDA 13)
    // Allocation nodes take memory when their executable graph is uploaded or launched.
    "cuGraphAddMemAllocNode", // instantiation looks through the graph for these
    "cuGraphAddMemFreeNode",  // returns bytes to the device's graph memory, which keeps them
    "cuGraphAddNode",         // instantiation looks through the graph for allocation nodes
    // Checkpoints: what a process holds stays charged while it is checkpointed, so that it can
    // always be restored.
    "cuCheckpointProcessCheckpoint", // stays charged while it is in host memory
    "cuCheckpointProcessRestore",    // takes back what stayed charged
    // Imports: the exporter is charged.
    "cuImportExternalMemory", // memory of Vulkan or NvSci, obtained there and seen by NVML alone
    "cuExternalMemoryGetMappedBuffer", // a view of an import
    "cuExternalMemoryGetMappedMipmappedArray", // a view of an import
    "cuDestroyExternalMemory", // ends an import
    // Graphics interoperability: the graphics API owns the memory.
    "cuGraphicsMapResources",             // memory of the graphics API
    "cuGraphicsUnmapResources",           // memory of the graphics API
    "cuGraphicsResourceGetMappedPointer", // memory of the graphics API
    "cuGraphicsResourceGetMappedMipmappedArray", // memory of the graphics API
    "cuGraphicsSubResourceGetMappedArray", // memory of the graphics API
    "cuGraphicsUnregisterResource",       // memory of the graphics API
    "cuGraphicsGLRegisterBuffer",         // memory of OpenGL
    "cuGraphicsGLRegisterImage",          // memory of OpenGL
    "cuGLRegisterBufferObject",           // memory of OpenGL
    "cuGLUnregisterBufferObject",         // memory of OpenGL
    "cuGLMapBufferObject",                // memory of OpenGL
    "cuGLMapBufferObjectAsync",           // memory of OpenGL
    "cuGLUnmapBufferObject",              // memory of OpenGL
    "cuGLUnmapBufferObjectAsync",         // memory of OpenGL
    "cuGraphicsVDPAURegisterOutputSurface", // memory of VDPAU
    "cuGraphicsVDPAURegisterVideoSurface", // memory of VDPAU
    "cuGraphicsEGLRegisterImage",         // memory of EGL
    "cuGraphicsResourceGetMappedEglFrame", // memory of EGL
    "cuEGLStreamConsumerAcquireFrame",    // frames of EGL
    "cuEGLStreamConsumerReleaseFrame",    // frames of EGL
    "cuEGLStreamProducerPresentFrame",    // frames that were charged when allocated
    "cuEGLStreamProducerReturnFrame",     // frames that were charged when allocated
    // Between host and device the copy engines and the bus are shared, not the SMs.
    "cuMemcpyHtoD",      // host to device
    "cuMemcpyHtoDAsync", // host to device
    "cuMemcpyHtoA",      // host to device
    "cuMemcpyHtoAAsync", // host to device
    "cuMemcpyDtoH",      // device to host
    "cuMemcpyDtoHAsync", // device to host
    "cuMemcpyAtoH",      // device to host
    "cuMemcpyAtoHAsync", // device to host
    // Work of the front end.
    "cuStreamWriteValue32", // a write by the GPU's front end
    "cuStreamWriteValue64", // a write by the GPU's front end
];

/// A libcuda export's name without version and flavour: `cuMemcpyHtoD` of `cuMemcpyHtoD_v2_ptds`.
pub fn base_name(export: &str) -> &str {
    let plain = export.strip_suffix("_ptsz").or_else(|| export.strip_suffix("_ptds"));
    let plain = plain.unwrap_or(export);
    match plain.rsplit_once("_v") {
        Some((base, version))
            if !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit()) =>
        {
            base
        }
        _ => plain,
    }
}

/// Whether somebody has looked at `export`, which nobody has at a new variant of a hooked function.
pub fn accounted_for(export: &str) -> bool {
    let base = base_name(export);
    HOOKS.iter().any(|hook| hook.export == export)
        || UNHOOKED.contains(&base)
        || INERT.contains(&base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_names_lose_version_and_flavour_only() {
        assert_eq!(base_name("cuMemcpyHtoD_v2_ptds"), "cuMemcpyHtoD");
        assert_eq!(base_name("cuLaunchKernel_ptsz"), "cuLaunchKernel");
        assert_eq!(base_name("cuCtxCreate_v4"), "cuCtxCreate");
        assert_eq!(base_name("cuInit"), "cuInit");
        assert_eq!(base_name("cuX_v"), "cuX_v");
        assert_eq!(base_name("cuX_v2x"), "cuX_v2x");
    }

    #[test]
    fn no_function_is_in_two_lists() {
        let names = || UNHOOKED.iter().chain(INERT);
        for (i, name) in names().enumerate() {
            assert!(names().take(i).all(|other| other != name), "{name}");
            assert!(HOOKS.iter().all(|hook| base_name(hook.export) != *name), "{name}");
        }
    }

    #[test]
    fn hooked_exports_are_unique() {
        for (i, hook) in HOOKS.iter().enumerate() {
            assert!(HOOKS[..i].iter().all(|h| h.export != hook.export), "{}", hook.export);
        }
    }

    #[test]
    fn an_unknown_variant_of_a_hooked_function_is_not_accounted_for() {
        assert!(accounted_for("cuMemAlloc_v2") && accounted_for("cuDeviceGet"));
        for unknown in ["cuMemAlloc_v3", "cuLaunchKernel_ptds", "cuBrandNew"] {
            assert!(!accounted_for(unknown), "{unknown}");
        }
    }

    #[test]
    fn every_variant_shares_its_rows_signature_and_each_body_its_class() {
        for hook in HOOKS {
            for other in HOOKS.iter().filter(|other| other.body == hook.body) {
                assert_eq!(other.class, hook.class, "{}", other.export);
                assert_eq!(base_name(other.export), base_name(hook.export), "{}", hook.body);
            }
            let own = hook.export.rsplit('_').next().filter(|of| of.starts_with("pt"));
            assert_eq!(hook.flavour, own.unwrap_or("legacy"), "{}", hook.export);
        }
    }
}
