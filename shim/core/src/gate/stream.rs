//! Kinds of streams, as far as the gate needs to distinguish them.

use core::ffi::c_void;
use tessera_cuda::types::{CUfunction, CUlaunchConfig, CUstream};

/// A stream, with the default streams by their own handles (CUDA Driver API, "Stream
/// synchronization behavior"): what NULL means depends on the flavour of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub(crate) usize);

impl Stream {
    /// `CU_STREAM_LEGACY`
    pub const LEGACY: Self = Self(1);
    /// `CU_STREAM_PER_THREAD`
    pub const PER_THREAD: Self = Self(2);

    /// The stream that `handle` names to a function whose NULL stream is per thread (`_ptsz`), or
    /// the legacy one.
    #[inline(always)]
    pub fn new(handle: CUstream, per_thread: bool) -> Self {
        match handle.addr() {
            0 => Self(1 + usize::from(per_thread)),
            handle => Self(handle),
        }
    }

    /// That of a launch configuration, which the driver reads as well. The legacy one where there is
    /// none: the driver refuses it.
    ///
    /// # Safety
    /// `config` is null or valid.
    #[inline(always)]
    pub unsafe fn of_config(config: *const CUlaunchConfig, per_thread: bool) -> Self {
        // SAFETY: the caller's word.
        match unsafe { config.as_ref() } {
            Some(config) => Self::new(config.hStream, per_thread),
            None => Self::LEGACY,
        }
    }

    /// Those of `cuLaunchCooperativeKernelMultiDevice`, each with what is launched.
    ///
    /// # Safety
    /// `launches` is null or points to `devices` elements.
    pub unsafe fn of_launches(
        launches: *const c_void,
        devices: u32,
    ) -> impl Iterator<Item = (CUfunction, Self)> + Clone {
        let launches = launches.cast::<LaunchParams>();
        let count = if launches.is_null() { 0 } else { devices };
        (0..count as usize).map(move |at| {
            // SAFETY: the caller's word.
            let launch = unsafe { &*launches.add(at) };
            (launch.function, Self::new(launch.stream, false))
        })
    }

    /// One of the two default streams, which every context has.
    pub(crate) fn is_default(self) -> bool {
        self.0 <= Self::PER_THREAD.0
    }

    pub(crate) fn handle(self) -> CUstream {
        core::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// `CUDA_LAUNCH_PARAMS` (cuda.h 12.9).
#[repr(C)]
struct LaunchParams {
    function: CUfunction,
    /// Grid, block, bytes of shared memory.
    shape: [u32; 7],
    stream: CUstream,
    params: *mut *mut c_void,
}
const _: () = assert!(size_of::<LaunchParams>() == 56);

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr;

    #[test]
    fn the_null_stream_is_what_the_flavour_makes_of_it() {
        let null = ptr::null_mut();
        assert_eq!(Stream::new(null, false), Stream::LEGACY);
        assert_eq!(Stream::new(null, true), Stream::PER_THREAD);
        for per_thread in [false, true] {
            let own = Stream::new(ptr::without_provenance_mut(0x1000), per_thread);
            assert_eq!(own.0, 0x1000);
            assert!(!own.is_default());
            let legacy = ptr::without_provenance_mut(1);
            assert_eq!(Stream::new(legacy, per_thread), Stream::LEGACY);
        }
    }

    #[test]
    fn every_device_of_a_cooperative_launch_has_its_stream() {
        let params = |stream| LaunchParams {
            function: ptr::null_mut(),
            shape: [1; 7],
            stream: ptr::without_provenance_mut(stream),
            params: ptr::null_mut(),
        };
        let launches = [params(0x10), params(0), params(0x30)];
        // SAFETY: three elements.
        let streams = unsafe { Stream::of_launches(launches.as_ptr().cast(), 3) };
        assert!(streams.map(|(_, stream)| stream).eq([Stream(0x10), Stream::LEGACY, Stream(0x30)]));
        // SAFETY: null is allowed.
        assert_eq!(unsafe { Stream::of_launches(ptr::null(), 3) }.count(), 0);
    }
}
