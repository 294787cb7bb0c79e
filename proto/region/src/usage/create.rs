//! Publishing the usage page, and putting an existing one right.

use core::mem::offset_of;
use std::path::Path;
use std::time::Duration;

use super::file::{Recovered, UsageFile};
use crate::abi;
use crate::error::PageError;
use crate::files;
use crate::layout::{DEPARTURE_NS, SLOTS, USAGE_BYTES, USAGE_FILE, USAGE_MAGIC, UsageHeader};
use crate::quota::QuotaWriter;
use crate::spares::Spares;

/// Any user of the container writes it.
pub(super) const MODE: u32 = 0o666;

/// What [`create`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Created {
    /// There was no page; there is one now.
    pub fresh: bool,
    /// What was left of dead processes whose memory the driver has back.
    pub recovered: Recovered,
    /// The page was not as Tessera leaves it (size, mode, magic, version or counts), and is now.
    pub repaired: bool,
}

/// Publishes the usage page in `dir`, of full size with memory behind all of it, mode 0666.
///
/// Where one exists, containers may have it mounted and mapped, so the same file is put right:
/// slots of dead processes are zeroed, living ones are left alone, and whatever an earlier tenant
/// did to size, mode or header is repaired and reported. So nothing that one tenant leaves behind
/// can keep the next from starting.
///
/// # Errors
/// [`crate::PageFault::IsDirectory`] (see [`crate::prepare_dir`]), [`crate::PageFault::NotRegular`],
/// [`crate::PageFault::Busy`] while a process holds a lease on the file,
/// [`crate::PageFault::NoSpace`], [`crate::PageFault::Io`].
pub fn create(dir: &Path, generation: u64) -> Result<Created, PageError> {
    create_from(dir, generation, abi::version(), None)
}

/// [`create`] of a version that [`abi::speaks`], with files to fall back on where the file system is full.
///
/// # Errors
/// As [`create`].
pub fn create_from(
    dir: &Path,
    generation: u64,
    abi: u32,
    spares: Option<&Spares>,
) -> Result<Created, PageError> {
    let path = dir.join(USAGE_FILE);
    // What exists needs no memory: on a full file system a tenant's restart must not fail.
    if !files::exists(&path)
        && files::publish(dir, USAGE_FILE, &encode(generation, abi), MODE, spares)?.is_some()
    {
        return Ok(Created { fresh: true, ..Created::default() });
    }
    let departure =
        QuotaWriter::open(dir).map_or(Duration::from_nanos(DEPARTURE_NS), |page| page.departure());
    UsageFile::open_as(dir, abi)?.renew(generation, departure)
}

/// The bytes of an unused page.
pub(super) fn encode(generation: u64, abi: u32) -> Vec<u8> {
    let mut page = vec![0; USAGE_BYTES];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(offset_of!(UsageHeader, magic), &USAGE_MAGIC.to_le_bytes());
    put(offset_of!(UsageHeader, abi), &abi.to_le_bytes());
    put(
        offset_of!(UsageHeader, slot_count),
        &u32::try_from(SLOTS).unwrap_or(u32::MAX).to_le_bytes(),
    );
    put(offset_of!(UsageHeader, generation), &generation.to_le_bytes());
    page
}
