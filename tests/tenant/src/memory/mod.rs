//! Every way in which the driver API gives device memory, behind one pair of calls.

mod array;
pub(crate) mod linear;
mod pool;
mod vmm;

pub use pool::OwnPool;

use strum::{EnumString, IntoStaticStr, VariantArray};
use tessera_cuda::types::CUdeviceptr;

use crate::cuda::{Cuda, Stream};
use crate::exit::CudaError;

/// A way to obtain device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray, EnumString)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Api {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocPitch`, of an odd size.
    Pitched,
    /// `cuMemAllocManaged`.
    Managed,
    /// `cuMemAllocAsync`: the device's pool.
    Async,
    /// `cuMemAllocFromPoolAsync`, from a pool that this process made.
    Pool,
    /// `cuMemCreate` and `cuMemMap`.
    Vmm,
    /// `cuArray3DCreate`.
    Array,
    /// `cuMipmappedArrayCreate`.
    Mipmap,
    /// `cuGraphAddMemAllocNode`, launched.
    Graph,
}

#[derive(Debug)]
pub struct Block {
    /// Bytes that can be written (pitch included).
    pub bytes: u64,
    api: Api,
    place: Place,
}

/// What the driver gave.
#[derive(Debug)]
enum Place {
    Address(CUdeviceptr),
    Mapped(vmm::Mapped),
    Array(array::Array),
    Graph(pool::Launched),
}

impl Cuda {
    /// Allocates `bytes` by `api`; stream-ordered allocations are ordered on `stream`, which is
    /// waited for. What takes whole pages gets as many as hold `bytes`.
    pub fn allocate(&self, api: Api, bytes: u64, stream: Stream) -> Result<Block, CudaError> {
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (place, bytes) = match api {
            Api::Plain => (Place::Address(linear::plain(self, size)?), bytes),
            Api::Managed => (Place::Address(linear::managed(self, size)?), bytes),
            Api::Pitched => {
                let (address, given) = linear::pitched(self, size)?;
                (Place::Address(address), given)
            }
            Api::Async => (Place::Address(pool::from_default(self, size, stream)?), bytes),
            Api::Pool => (Place::Address(pool::from_own(self, size, stream)?), bytes),
            Api::Vmm => {
                let mapped = vmm::map(self, size)?;
                let given = mapped.size as u64;
                (Place::Mapped(mapped), given)
            }
            Api::Array | Api::Mipmap => {
                let array = array::create(self, api == Api::Mipmap, size)?;
                let given = array.bytes;
                (Place::Array(array), given)
            }
            Api::Graph => (Place::Graph(pool::launch(self, size, stream)?), bytes),
        };
        Ok(Block { bytes, api, place })
    }

    /// Frees by the API that `block` came from, and has the driver take the memory back.
    pub fn free(&self, block: &Block, stream: Stream) -> Result<(), CudaError> {
        match &block.place {
            Place::Address(address) => match block.api {
                Api::Async | Api::Pool => pool::free(self, *address, stream),
                _ => linear::free(self, *address),
            },
            Place::Mapped(mapped) => vmm::unmap(self, mapped),
            Place::Array(array) => array::destroy(self, array),
            Place::Graph(launched) => pool::free_graph(self, launched, stream),
        }
    }

    /// Copies `data` to `block` at `offset`; within one of an array's rows.
    pub fn write(&self, block: &Block, offset: u64, data: &[u8]) -> Result<(), CudaError> {
        debug_assert!(offset + data.len() as u64 <= block.bytes);
        match &block.place {
            Place::Array(array) => array::write(self, array, offset, data),
            place => linear::write(self, address(place) + offset, data),
        }
    }

    /// Copies from `block` at `offset` into `data`; within one of an array's rows.
    pub fn read(&self, block: &Block, offset: u64, data: &mut [u8]) -> Result<(), CudaError> {
        debug_assert!(offset + data.len() as u64 <= block.bytes);
        match &block.place {
            Place::Array(array) => array::read(self, array, offset, data),
            place => linear::read(self, address(place) + offset, data),
        }
    }

    /// Has the driver take back what pools and graphs keep for later.
    pub fn trim(&self) -> Result<(), CudaError> {
        pool::trim(self)?;
        pool::trim_graphs(self)
    }
}

fn address(place: &Place) -> CUdeviceptr {
    match place {
        Place::Address(address) => *address,
        Place::Mapped(mapped) => mapped.address,
        Place::Graph(launched) => launched.address,
        Place::Array(_) => 0,
    }
}
