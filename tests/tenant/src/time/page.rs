//! Host memory that both sides see: words that a stream writes, stamps, pages between processes.

use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;

use tessera_cuda::types::CUdeviceptr;

use crate::cuda::{Cuda, check, need};
use crate::exit::{CudaError, Exit};

/// `CU_MEMHOSTALLOC_DEVICEMAP`, `CU_MEMHOSTREGISTER_DEVICEMAP`.
const MAPPED: c_uint = 2;

/// Words in pinned memory, for the life of the process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    pub host: &'static [AtomicU64],
    address: CUdeviceptr,
}

impl Words {
    /// So many zeros.
    pub fn allocate(cuda: Cuda, count: usize) -> Result<Self, CudaError> {
        let alloc = need("cuMemHostAlloc", cuda.driver().host_alloc)?;
        let mut host = null_mut();
        // SAFETY: a live out-parameter.
        check("cuMemHostAlloc", unsafe { alloc(&raw mut host, count * 8, MAPPED) })?;
        // SAFETY: as many bytes, of this process, page-aligned and never freed; zeroed before
        // anything refers to them as words.
        let host = unsafe {
            std::ptr::write_bytes(host.cast::<u8>(), 0, count * 8);
            std::slice::from_raw_parts(host.cast::<AtomicU64>(), count)
        };
        Ok(Self { host, address: device_pointer(cuda, host.as_ptr().cast_mut().cast())? })
    }

    /// The address of word `index` on the device.
    pub fn at(&self, index: usize) -> CUdeviceptr {
        self.address + 8 * index as CUdeviceptr
    }
}

fn device_pointer(cuda: Cuda, host: *mut c_void) -> Result<CUdeviceptr, CudaError> {
    let get = need("cuMemHostGetDevicePointer", cuda.driver().host_device_pointer)?;
    let mut address = 0;
    // SAFETY: a live out-parameter; the memory is pinned and mapped.
    check("cuMemHostGetDevicePointer", unsafe { get(&raw mut address, host, 0) })?;
    Ok(address)
}

/// A page of a file, which other processes map, too.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedPage(&'static [AtomicU64]);

const PAGE: usize = 4096;

impl SharedPage {
    /// Maps the file's first page, which is made where there is none.
    pub fn open(path: &str) -> Result<Self, Exit> {
        let failed = |error: std::io::Error| Exit::new(71, format!("{path}: {error}"));
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false);
        let file = file.open(path).map_err(failed)?;
        file.set_len(PAGE as u64).map_err(failed)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(null_mut(), PAGE, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if page == libc::MAP_FAILED {
            return Err(failed(std::io::Error::last_os_error()));
        }
        // SAFETY: the mapping is a page, aligned, never unmapped, and the file keeps its length:
        // it is the suite's own.
        Ok(Self(unsafe { std::slice::from_raw_parts(page.cast::<AtomicU64>(), PAGE / 8) }))
    }

    /// Pins it; words are at the device addresses that follow from the returned one.
    pub fn register(&self, cuda: Cuda) -> Result<Words, CudaError> {
        let register = need("cuMemHostRegister", cuda.driver().host_register)?;
        let host: *mut c_void = self.0.as_ptr().cast_mut().cast();
        // SAFETY: a whole page of this process, which stays mapped.
        check("cuMemHostRegister", unsafe { register(host, PAGE, MAPPED) })?;
        Ok(Words { host: self.0, address: device_pointer(cuda, host)? })
    }
}
