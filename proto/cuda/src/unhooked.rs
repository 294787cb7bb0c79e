//! Driver functions that obtain, release or share device memory, or put work on the GPU, and that
//! Tessera deliberately does not hook, each with the reason.
//!
//! A row stands for all variants of one function (`_v2`, `_ptsz`, …). Together with
//! [`HOOKS`](crate::hooks::HOOKS) and [`INERT`](crate::inert::INERT) it accounts for every function
//! that NVIDIA's headers declare and that libcuda exports; the coverage test fails for one that is
//! in none of them, so that a new CUDA version can't add a way around the quota unnoticed.
//! To hook a function, move its row into the table.

use crate::hooks::{HOOKS, Hook};
use crate::inert::INERT;

/// What a function does that a quota is concerned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Makes device memory belong to this process.
    Obtains,
    /// Gives device memory back, or lets the driver do so.
    Releases,
    /// Maps, exports or imports memory that exists, which can outlive its release elsewhere.
    Shares,
    /// Puts work on the GPU's compute or copy engines.
    Launches,
}

/// Why a function is not hooked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Driver-internal memory whose size no call reports: NVML's bytes per process see it, and the
    /// quota page's context overhead stands for it.
    Observed,
    /// Needs no hook by design.
    Never,
}

/// A function that is not hooked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unhooked {
    /// The name without version and flavour suffix.
    pub function: &'static str,
    /// What it does.
    pub effect: Effect,
    /// Why it is not hooked.
    pub plan: Plan,
    /// What is special about this function.
    pub reason: &'static str,
}

macro_rules! unhooked {
    ($($plan:ident { $($effect:ident $function:ident: $reason:literal;)+ })+) => {
        /// Every function that is not hooked though it touches memory or work, by plan.
        pub const UNHOOKED: &[Unhooked] = &[
            $($(Unhooked {
                function: stringify!($function),
                effect: Effect::$effect,
                plan: Plan::$plan,
                reason: $reason,
            },)+)+
        ];
    };
}

unhooked! {
    Observed {
        Obtains cuGetExportTable: "hands out driver-internal tables, some of which allocate";
        Obtains cuGLCtxCreate: "a context for OpenGL; none in containers with compute capability only";
        Obtains cuVDPAUCtxCreate: "a context for VDPAU; none in containers with compute capability only";
        Obtains cuCtxFromGreenCtx: "another handle of the primary context, which is charged";
        Obtains cuGreenCtxStreamCreate: "queues come from driver-internal slabs";
        Obtains cuStreamCreate: "queues come from driver-internal slabs";
        Obtains cuStreamCreateWithPriority: "queues come from driver-internal slabs";
        Obtains cuEventCreate: "semaphores come from driver-internal slabs";
        Releases cuEventDestroy: "returns to the slab";
        Obtains cuModuleLoad: "code and global variables, often loaded lazily";
        Obtains cuModuleLoadData: "code and global variables, often loaded lazily";
        Obtains cuModuleLoadDataEx: "code and global variables, often loaded lazily";
        Obtains cuModuleLoadFatBinary: "code and global variables, often loaded lazily";
        Releases cuModuleUnload: "the module's memory";
        Obtains cuModuleGetGlobal: "may load its module's variables now";
        Obtains cuFuncLoad: "loads a lazily loaded function now";
        Obtains cuLibraryLoadData: "code and global variables, often loaded lazily";
        Obtains cuLibraryLoadFromFile: "code and global variables, often loaded lazily";
        Releases cuLibraryUnload: "the library's memory, in every context";
        Obtains cuLibraryGetModule: "loads the library into the current context";
        Obtains cuLibraryGetGlobal: "may load the library into the current context";
        Obtains cuLibraryGetManaged: "managed variables; their size is the library's";
        Releases cuCtxDisablePeerAccess: "the page tables of cuCtxEnablePeerAccess";
        Obtains cuTexObjectCreate: "a descriptor in a table that the context owns";
        Releases cuTexObjectDestroy: "a descriptor in a table that the context owns";
        Obtains cuSurfObjectCreate: "a descriptor in a table that the context owns";
        Releases cuSurfObjectDestroy: "a descriptor in a table that the context owns";
        Obtains cuCtxEnablePeerAccess: "page tables for the peer's memory";
        Obtains cuMemSetAccess: "page tables for a mapped range";
        // Fabric endpoints hold what is bound to them beyond its release, for other nodes.
        Obtains cuLogicalEndpointCreate: "a fabric object; its memory comes with binding (CUDA 13)";
        Shares cuLogicalEndpointBindMem: "holds existing memory on a fabric object (CUDA 13)";
        Shares cuLogicalEndpointBindAddr: "holds existing memory on a fabric object (CUDA 13)";
        Shares cuLogicalEndpointImport: "another node's memory, charged there (CUDA 13)";
        Releases cuLogicalEndpointUnbind: "ends what a bind held (CUDA 13)";
        Releases cuLogicalEndpointDestroy: "ends what its binds held (CUDA 13)";
    }

    Never {
        // Host memory is the container's memory cgroup's affair.
        Obtains cuMemAllocHost: "host memory";
        Obtains cuMemHostAlloc: "host memory";
        Releases cuMemFreeHost: "host memory";
        Shares cuMemHostRegister: "host memory";
        Releases cuMemHostUnregister: "host memory";

        // Managed memory is charged in full when it is allocated, wherever its pages are.
        Obtains cuMemPrefetchAsync: "managed memory is charged when allocated";
        Obtains cuMemPrefetchBatchAsync: "managed memory is charged when allocated";
        Releases cuMemDiscardBatchAsync: "discards contents; the range stays allocated";
        Obtains cuMemDiscardAndPrefetchBatchAsync: "managed memory is charged when allocated";
        Obtains cuMemAdvise: "managed memory is charged when allocated";

        // Pools are charged by what the driver reserves for them, in the process that made them.
        Shares cuMemPoolExportToShareableHandle: "a name for a pool; holds nothing alive by itself";
        Shares cuMemPoolExportPointer: "a name for an allocation, which importers must free first";
        Shares cuMemPoolImportPointer: "the exporting process is charged";
        Shares cuMemPoolSetAccess: "a peer's view of a pool; page tables on the peer";
        Obtains cuDeviceSetMemPool: "which pool is current is asked at each allocation";
        Obtains cuMemSetMemPool: "which pool is current is asked at each allocation (CUDA 13)";

        // Allocation nodes take memory when their executable graph is uploaded or launched.
        Obtains cuGraphAddMemAllocNode: "instantiation looks through the graph for these";
        Releases cuGraphAddMemFreeNode: "returns bytes to the device's graph memory, which keeps them";
        Obtains cuGraphAddNode: "instantiation looks through the graph for allocation nodes";

        // Checkpoints: what a process holds stays charged while it is checkpointed, so that it can
        // always be restored.
        Releases cuCheckpointProcessCheckpoint: "stays charged while it is in host memory";
        Obtains cuCheckpointProcessRestore: "takes back what stayed charged";

        // Imports: the exporter is charged.
        Shares cuImportExternalMemory: "memory of Vulkan or NvSci, obtained there and seen by NVML alone";
        Shares cuExternalMemoryGetMappedBuffer: "a view of an import";
        Shares cuExternalMemoryGetMappedMipmappedArray: "a view of an import";
        Releases cuDestroyExternalMemory: "ends an import";

        // Graphics interoperability: the graphics API owns the memory.
        Shares cuGraphicsMapResources: "memory of the graphics API";
        Releases cuGraphicsUnmapResources: "memory of the graphics API";
        Shares cuGraphicsResourceGetMappedPointer: "memory of the graphics API";
        Shares cuGraphicsResourceGetMappedMipmappedArray: "memory of the graphics API";
        Shares cuGraphicsSubResourceGetMappedArray: "memory of the graphics API";
        Releases cuGraphicsUnregisterResource: "memory of the graphics API";
        Shares cuGraphicsGLRegisterBuffer: "memory of OpenGL";
        Shares cuGraphicsGLRegisterImage: "memory of OpenGL";
        Shares cuGLRegisterBufferObject: "memory of OpenGL";
        Releases cuGLUnregisterBufferObject: "memory of OpenGL";
        Shares cuGLMapBufferObject: "memory of OpenGL";
        Shares cuGLMapBufferObjectAsync: "memory of OpenGL";
        Releases cuGLUnmapBufferObject: "memory of OpenGL";
        Releases cuGLUnmapBufferObjectAsync: "memory of OpenGL";
        Shares cuGraphicsVDPAURegisterOutputSurface: "memory of VDPAU";
        Shares cuGraphicsVDPAURegisterVideoSurface: "memory of VDPAU";
        Shares cuGraphicsEGLRegisterImage: "memory of EGL";
        Shares cuGraphicsResourceGetMappedEglFrame: "memory of EGL";
        Shares cuEGLStreamConsumerAcquireFrame: "frames of EGL";
        Releases cuEGLStreamConsumerReleaseFrame: "frames of EGL";
        Shares cuEGLStreamProducerPresentFrame: "frames that were charged when allocated";
        Releases cuEGLStreamProducerReturnFrame: "frames that were charged when allocated";

        // Between host and device the copy engines and the bus are shared, not the SMs.
        Launches cuMemcpyHtoD: "host to device";
        Launches cuMemcpyHtoDAsync: "host to device";
        Launches cuMemcpyHtoA: "host to device";
        Launches cuMemcpyHtoAAsync: "host to device";
        Launches cuMemcpyDtoH: "device to host";
        Launches cuMemcpyDtoHAsync: "device to host";
        Launches cuMemcpyAtoH: "device to host";
        Launches cuMemcpyAtoHAsync: "device to host";

        // Work of the front end.
        Launches cuStreamWriteValue32: "a write by the GPU's front end";
        Launches cuStreamWriteValue64: "a write by the GPU's front end";
    }
}

/// Where a driver function is accounted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the table.
    Hooked(&'static Hook),
    /// Deliberately not hooked.
    Unhooked(&'static Unhooked),
    /// Of no concern to a quota.
    Inert,
}

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

/// Where `export` is accounted for. `None`: nobody has looked at it yet, which includes a new
/// variant of a hooked function.
pub fn place(export: &str) -> Option<Place> {
    if let Some(hook) = HOOKS.iter().find(|hook| hook.export == export) {
        return Some(Place::Hooked(hook));
    }
    let base = base_name(export);
    if HOOKS.iter().any(|hook| base_name(hook.export) == base) {
        return None;
    }
    if let Some(row) = UNHOOKED.iter().find(|row| row.function == base) {
        return Some(Place::Unhooked(row));
    }
    INERT.contains(&base).then_some(Place::Inert)
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
        for row in UNHOOKED {
            assert!(!INERT.contains(&row.function), "{}", row.function);
            assert!(HOOKS.iter().all(|h| base_name(h.export) != row.function), "{}", row.function);
            let same = UNHOOKED.iter().filter(|other| other.function == row.function);
            assert_eq!(same.count(), 1, "{}", row.function);
        }
        for (i, name) in INERT.iter().enumerate() {
            assert!(!INERT[..i].contains(name), "{name}");
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
        assert!(matches!(place("cuMemAlloc_v2"), Some(Place::Hooked(_))));
        assert_eq!(place("cuMemAlloc_v3"), None);
        assert_eq!(place("cuLaunchKernel_ptds"), None);
        assert_eq!(place("cuDeviceGet"), Some(Place::Inert));
        assert_eq!(place("cuBrandNew"), None);
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
