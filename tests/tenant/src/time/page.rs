//! Host memory that both sides see: words that a stream writes, stamps, pages between processes.

use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

use tessera_cuda::types::CUdeviceptr;

use crate::cuda::{Cuda, made};
use crate::driver::call;
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
        let host: *mut c_void = made(|at| {
            // SAFETY: a live out-parameter.
            unsafe { call!(cuda.driver, host_alloc(at, count * 8, MAPPED)) }
        })?;
        // SAFETY: as many bytes, of this process, page-aligned and never freed; zeroed before
        // anything refers to them as words.
        let host = unsafe {
            std::ptr::write_bytes(host.cast::<u8>(), 0, count * 8);
            std::slice::from_raw_parts(host.cast::<AtomicU64>(), count)
        };
        Ok(Self { host, address: device_pointer(cuda, host.as_ptr().cast_mut().cast())? })
    }

    pub fn at(&self, index: usize) -> CUdeviceptr {
        self.address + 8 * index as CUdeviceptr
    }
}

fn device_pointer(cuda: Cuda, host: *mut c_void) -> Result<CUdeviceptr, CudaError> {
    // SAFETY: a live out-parameter; the memory is pinned and mapped.
    made(|at| unsafe { call!(cuda.driver, host_device_pointer(at, host, 0)) })
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
        let host: *mut c_void = self.0.as_ptr().cast_mut().cast();
        // SAFETY: a whole page of this process, which stays mapped.
        unsafe { call!(cuda.driver, host_register(host, PAGE, MAPPED)) }?;
        Ok(Words { host: self.0, address: device_pointer(cuda, host)? })
    }
}

/// Kernels whose stamps are remembered, the last ones.
const ROOM: usize = 1 << 16;

/// When each kernel began and ended by the GPU's clock, which is one for all processes of a GPU: pairs of words, used round and round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamps {
    words: Words,
}

impl Stamps {
    pub fn new(cuda: Cuda) -> Result<Self, CudaError> {
        Ok(Self { words: Words::allocate(cuda, 2 * ROOM)? })
    }

    /// Where launch `number` writes.
    pub fn of(&self, number: u64) -> CUdeviceptr {
        let slot = usize::try_from(number).unwrap_or(0) % ROOM;
        self.words.at(2 * slot)
    }

    /// Writes all to a file, as pairs of little-endian words, and forgets them. On the simulated driver,
    /// whose kernels write nothing, there are none.
    pub fn save(&self, path: &str) -> Result<usize, Exit> {
        let mut bytes = Vec::new();
        let mut count = 0;
        for pair in self.words.host.chunks_exact(2) {
            let (begin, end) =
                (pair[0].swap(0, Ordering::AcqRel), pair[1].swap(0, Ordering::AcqRel));
            if begin != 0 && end != 0 {
                bytes.extend_from_slice(&begin.to_le_bytes());
                bytes.extend_from_slice(&end.to_le_bytes());
                count += 1;
            }
        }
        let failed = |error: std::io::Error| Exit::new(71, format!("{path}: {error}"));
        std::fs::File::create(path).and_then(|mut f| f.write_all(&bytes)).map_err(failed)?;
        Ok(count)
    }
}
