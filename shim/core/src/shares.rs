//! Memory that is shared between processes: *the exporter is charged while an import lives*.
//!
//! The driver keeps memory that a process exported and then freed for as long as another has it
//! imported. An importer is charged nothing; it marks what it imports in its slot of the usage page
//! ([`Account::mark_import`](tessera_region::account::Account::mark_import)). When an exporter's
//! driver has let go of memory, its bytes stay charged (they *linger*) while a mark fits. Lingering
//! bytes are looked at again when this process frees something shared, before it is refused
//! anything, and before it is shown its memory.
//!
//! A mark is one of two kinds:
//! - the hash of the 64 bytes that name the memory (`CUipcMemHandle`, `CUmemFabricHandle`);
//! - for file descriptors, which name nothing: when it was imported. It fits all memory that had been
//!   exported as a descriptor by then.
//!
//! A descriptor keeps memory alive too. This process's own is visible: its device and
//! inode show whether it is still open.
//!
//! Not seen: importers outside this container, descriptors on their way or in processes without
//! CUDA, and what lives on after the exporter's death. NVML shows their bytes.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::allocations::Allocation;
use crate::log::{errno, now_ns, set_errno};
use crate::pages::Zeroed;
use crate::pages::{Full, List};
use crate::session::stat_of;
use crate::spin::Spin;
use crate::state::Process;
use crate::thread::{Answer, Call, entered, tenant};
use crate::{place, quota, real};
use core::sync::atomic::{AtomicUsize, Ordering};
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// How memory was exported. All zero: not at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// The mark of its 64-byte name.
    name: u64,
    /// When it was first exported as a descriptor, in microseconds.
    since_us: u64,
    /// The last descriptor, less one: 0 is none.
    descriptor: i32,
    device: u64,
    inode: u64,
}

/// Marks of descriptors have this bit.
const DESCRIPTOR: u64 = 1 << 63;

/// The mark of memory that these bytes name (FNV-1a).
pub(crate) fn name(bytes: &[u8; 64]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash & !DESCRIPTOR).max(1)
}

/// The mark of a descriptor that is imported now.
pub(crate) fn descriptor() -> u64 {
    DESCRIPTOR | now_us()
}

fn now_us() -> u64 {
    (now_ns() / 1000) & !DESCRIPTOR
}

impl Export {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Exported under a 64-byte name.
    pub(crate) fn named(&mut self, mark: u64) {
        self.name = mark;
    }

    /// Exported as a descriptor that CUDA can import.
    pub(crate) fn passed(&mut self, fd: i32) {
        if self.since_us == 0 {
            self.since_us = now_us().max(1);
        }
        self.opened(fd);
    }

    /// A descriptor that keeps it alive.
    pub(crate) fn opened(&mut self, fd: i32) {
        if let Some((device, inode)) = identity(fd) {
            (self.descriptor, self.device, self.inode) = (fd + 1, device, inode);
        }
    }

    /// Whether `mark` may stand for an import of it.
    fn fits(&self, mark: u64) -> bool {
        match mark & DESCRIPTOR {
            0 => self.name == mark,
            _ => self.since_us != 0 && mark & !DESCRIPTOR >= self.since_us,
        }
    }

    /// Whether the last descriptor is still open here.
    fn is_open(&self) -> bool {
        self.descriptor != 0 && identity(self.descriptor - 1) == Some((self.device, self.inode))
    }
}

/// What the kernel says of an open descriptor.
fn identity(fd: i32) -> Option<(u64, u64)> {
    let errno = errno();
    let stat = stat_of(fd);
    set_errno(errno);
    stat.map(|stat| (stat.st_dev, stat.st_ino))
}

#[derive(Clone, Copy, Debug)]
struct Exported {
    pointer: u64,
    export: Export,
}

/// A device pointer that `cuIpcOpenMemHandle` gave.
#[derive(Clone, Copy, Debug)]
struct Imported {
    pointer: u64,
    mark: u64,
    bytes: u64,
    /// Opens less closes.
    users: u32,
    /// Serial of the context it was opened in.
    context: u32,
}

impl Imported {
    fn begin(process: &Process, pointer: u64, bytes: u64, mark: u64, context: u32) -> Self {
        process.account.note_imported(bytes, true);
        Self { pointer, mark, bytes, users: 1, context }
    }

    fn end(self, process: &Process) {
        process.account.note_imported(self.bytes, false);
        process.account.unmark_import(self.mark);
    }
}

/// Where the allocation begins that `pointer` is in, and its bytes.
pub(crate) fn extent(pointer: u64) -> Option<(u64, u64)> {
    let mut bytes = 0;
    // SAFETY: valid places for both answers; any pointer may be asked for.
    let base = real::cuMemGetAddressRange_v2
        .ask(0, |ask, base| unsafe { ask(base, &raw mut bytes, pointer) });
    base.ok().map(|base| (base, bytes as u64))
}

/// Bytes that the driver keeps for somebody else.
#[derive(Clone, Copy, Debug)]
struct Lingering {
    export: Export,
    bytes: u64,
    gpu: u8,
    kind: Kind,
}

// SAFETY: integers, and a kind, of which zero is one.
unsafe impl Zeroed for Exported {}
// SAFETY: as above.
unsafe impl Zeroed for Imported {}
// SAFETY: as above.
unsafe impl Zeroed for Lingering {}

#[derive(Debug, Default)]
pub struct Shares {
    exported: Spin<List<Exported>>,
    /// Their number, for frees to see without the lock.
    exports: AtomicUsize,
    imported: Spin<List<Imported>>,
    lingering: Spin<List<Lingering>>,
    /// Their number, likewise.
    lingers: AtomicUsize,
}

impl Shares {
    /// The allocation that begins at `pointer` is being exported: `how` notes how.
    ///
    /// # Errors
    /// [`Full`] when the kernel has no memory for the table: nobody may have what was exported.
    pub(crate) fn export(&self, pointer: u64, how: impl FnOnce(&mut Export)) -> Result<(), Full> {
        let mut exported = self.exported.lock();
        let known = exported.iter_mut().find(|known| known.pointer == pointer);
        if let Some(known) = known {
            how(&mut known.export);
            return Ok(());
        }
        let mut export = Export::default();
        how(&mut export);
        exported.push(Exported { pointer, export })?;
        self.exports.store(exported.len(), Ordering::Release);
        Ok(())
    }

    /// The driver has freed an allocation of this process, not of a pool.
    #[inline]
    pub(crate) fn freed(&self, process: &'static Process, pointer: u64, allocation: Allocation) {
        if self.exports.load(Ordering::Acquire) == 0 {
            quota::give_back(process, allocation);
        } else {
            self.freed_maybe_shared(process, pointer, allocation);
        }
    }

    #[cold]
    fn freed_maybe_shared(&self, process: &'static Process, pointer: u64, allocation: Allocation) {
        let export = {
            let mut exported = self.exported.lock();
            let export = exported.take(|known| known.pointer == pointer);
            self.exports.store(exported.len(), Ordering::Release);
            export.map(|known| known.export)
        };
        match export {
            None => quota::give_back(process, allocation),
            Some(export) => {
                let Allocation { bytes, gpu, kind, .. } = allocation;
                self.ended(process, gpu, bytes, kind, export);
                self.look_again(process);
            }
        }
    }

    /// A context is gone, and what was allocated or opened in it: the exported allocations are given
    /// back here, before all others of it are.
    pub(crate) fn context_ended(&self, process: &'static Process, context: u32) {
        let of_context = |known: &Exported| {
            let allocation = process.allocations.get(known.pointer);
            allocation.is_some_and(|a| a.context == context && a.kind != Kind::Async)
        };
        while let Some(known) = {
            let exported = self.exported.lock();
            exported.iter().copied().find(of_context)
        } {
            let Some(allocation) = process.allocations.remove(known.pointer) else { continue };
            self.freed(process, known.pointer, allocation);
        }
        let mut imported = self.imported.lock();
        while let Some(gone) = imported.take(|known| known.context == context) {
            gone.end(process);
        }
    }

    /// The driver has let go of `bytes` for this process: given back, or kept while others have them.
    pub(crate) fn ended(
        &self,
        process: &'static Process,
        gpu: u8,
        bytes: u64,
        kind: Kind,
        export: Export,
    ) {
        if bytes == 0 {
            return;
        }
        if !export.is_none() && is_held(process, &export) {
            let mut lingering = self.lingering.lock();
            if lingering.push(Lingering { export, bytes, gpu, kind }).is_ok() {
                self.lingers.store(lingering.len(), Ordering::Release);
            }
            // Without memory for the table they stay charged, which is the safe side.
            return;
        }
        quota::release(process, gpu, bytes, kind);
    }

    /// Whether anything was freed that others may have imported.
    pub(crate) fn any_lingers(&self) -> bool {
        self.lingers.load(Ordering::Acquire) != 0
    }

    /// Gives back what nobody keeps any more. True if there was anything.
    #[inline]
    pub(crate) fn look_again(&self, process: &'static Process) -> bool {
        self.lingers.load(Ordering::Acquire) != 0 && self.look_closely(process)
    }

    #[cold]
    fn look_closely(&self, process: &'static Process) -> bool {
        let mut lingering = self.lingering.lock();
        if let Some(first) = lingering.first() {
            // Importers that died keep nothing alive.
            process.account.recover_dead(usize::from(first.gpu));
        }
        let mut any = false;
        while let Some(over) = lingering.take(|one| !is_held(process, &one.export)) {
            quota::release(process, over.gpu, over.bytes, over.kind);
            any = true;
        }
        self.lingers.store(lingering.len(), Ordering::Release);
        any
    }

    /// An IPC handle was opened, which was marked before. A handle opened again in the same context
    /// gives the same pointer and counts (CUDA Driver API, `cuIpcOpenMemHandle`).
    pub(crate) fn opened(&self, process: &'static Process, pointer: u64, mark: u64, context: u32) {
        let bytes = extent(pointer).map_or(0, |(_, bytes)| bytes);
        let mut imported = self.imported.lock();
        if let Some(known) = imported.iter_mut().find(|known| known.pointer == pointer) {
            if known.mark == mark {
                known.users += 1;
                process.account.unmark_import(mark);
            } else {
                // Another's memory at the address: the old one is gone, though we saw no close.
                known.end(process);
                *known = Imported::begin(process, pointer, bytes, mark, context);
            }
            return;
        }
        // Without memory for the table the mark stays, which is the safe side.
        let _ = imported.push(Imported::begin(process, pointer, bytes, mark, context));
    }

    pub(crate) fn closed(&self, process: &'static Process, pointer: u64) {
        let mut imported = self.imported.lock();
        let Some(at) = imported.iter().position(|known| known.pointer == pointer) else { return };
        imported[at].users -= 1;
        if imported[at].users == 0 {
            imported.remove(at).end(process);
        }
    }
}

/// Whether anybody may keep memory alive that was exported so.
fn is_held(process: &'static Process, export: &Export) -> bool {
    export.is_open() || process.account.any_import(|mark| export.fits(mark))
}

// Legacy IPC: device pointers shared by 64-byte handles (CUDA Driver API, "Memory Management").
// The exporter is charged; see [`crate::shares`].

/// Where the charged allocation begins that `pointer` is in.
pub(crate) fn base_of(process: &'static Process, pointer: CUdeviceptr) -> Option<CUdeviceptr> {
    let charged = |pointer| process.allocations.get(pointer).map(|_| pointer);
    charged(pointer).or_else(|| charged(extent(pointer)?.0))
}

pub unsafe fn cuIpcGetMemHandle(
    call: Call<'_>,
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the caller's own place, which the driver wrote.
    let Some(handle) = (unsafe { handle.as_mut() }) else { return Ok(()) };
    let Some(base) = base_of(process, pointer) else { return Ok(()) };
    let name = name(&handle.reserved);
    process.shares.export(base, |export| export.named(name)).map_err(|_full| {
        handle.reserved.fill(0);
        quota::refuse_unnoted("cuIpcGetMemHandle")
    })
}

pub unsafe fn cuIpcOpenMemHandle(
    call: Call<'_>,
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    let mark = name(&handle.reserved);
    process.account.mark_import(mark);
    let answer = call();
    if answer.is_err() || pointer.is_null() {
        process.account.unmark_import(mark);
        return answer;
    }
    let context = place::current(process).serial();
    // SAFETY: the driver wrote it.
    process.shares.opened(process, unsafe { *pointer }, mark, context);
    answer
}

pub unsafe fn cuIpcCloseMemHandle(call: Call<'_>, pointer: CUdeviceptr) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    process.shares.closed(process, pointer);
    process.shares.look_again(process);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_itself_alone() {
        let mut export = Export::default();
        let (this, other) = (name(&[1; 64]), name(&[2; 64]));
        assert_ne!(this, other);
        assert!(!export.fits(this));
        export.named(this);
        assert!(export.fits(this) && !export.fits(other));
        assert!(!export.fits(descriptor()), "it was not exported as a descriptor");
    }

    #[test]
    fn a_descriptor_fits_what_was_exported_before_it() {
        let export = Export { since_us: 100, ..Export::default() };
        assert!(export.fits(DESCRIPTOR | 100) && !export.fits(DESCRIPTOR | 99));
    }

    #[test]
    fn an_open_descriptor_is_recognised_and_another_one_is_not() {
        use std::os::fd::AsRawFd;
        let file = tempfile::tempfile().expect("a file");
        let mut export = Export::default();
        export.opened(file.as_raw_fd());
        assert!(export.is_open());
        assert!(!Export { inode: export.inode + 1, ..export }.is_open());
        drop(file);
        assert!(!Export::default().is_open());
    }
}
