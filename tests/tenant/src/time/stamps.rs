//! When each kernel began and ended by the GPU's clock, which is one for all processes of a GPU.

use std::io::Write;
use std::sync::atomic::Ordering;

use tessera_cuda::types::CUdeviceptr;

use super::page::Words;
use crate::cuda::Cuda;
use crate::exit::{CudaError, Exit};

/// Kernels whose stamps are remembered, the last ones.
const ROOM: usize = 1 << 16;

/// Pairs of words, used round and round.
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
