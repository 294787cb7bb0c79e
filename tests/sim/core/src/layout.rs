//! The bytes of the state file. All processes of one build share them; [`VERSION`] changes with
//! any change here.
//!
//! Rules that keep a process killed at any instant from tearing the state:
//! - the engine's state is written to the inactive of two buffers, then [`Shared::active`] flips;
//! - every byte count is one word, owned by one (slot, unit);
//! - a record is published by one store, last (a slot's `state`, a ring's `submitted`, the XID
//!   log's `written`, the file's `magic`).

use crate::engine;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// GPUs in one simulated machine.
pub const MAX_GPUS: usize = 16;
/// Whole GPUs and MIG instances together; see [`crate::config::Unit`].
pub const MAX_UNITS: usize = 64;
/// Processes with an initialised driver at one time.
pub const MAX_SLOTS: usize = 512;
/// (Process, GPU) pairs with a context at one time.
pub const MAX_CHANNELS: usize = 256;
/// Operations in flight in one channel; a launch beyond them waits, as it does on hardware.
pub const RING: usize = 1024;
/// Words of a channel that wait to be written.
pub const WRITES: usize = 256;
/// Pieces of device memory that processes share, and interprocess events, at one time.
pub const MAX_OBJECTS: usize = 8192;
/// Switches between processes remembered, for each unit.
pub const MAX_SWITCHES: usize = 1024;
pub const MAX_XIDS: usize = 256;
pub const MAX_CONFIG: usize = 64 * 1024;

/// "SIMGPU" and two bytes of the layout's family.
pub const MAGIC: u64 = u64::from_le_bytes(*b"SIMGPU\x01\x00");
/// Version of everything below.
pub const VERSION: u32 = 18;

/// Bytes of the file (beyond its end) that are locked, never read.
pub mod lock_bytes {
    /// Held shared by everyone attached; exclusively while the file is initialised.
    pub const ATTACH: i64 = 1 << 40;
    /// `+ slot`: OFD lock of the process that owns the slot, kept by its mapping.
    pub const SLOT: i64 = ATTACH + 0x1000;
    /// `+ slot`: POSIX lock of the same process; `F_GETLK` tells its pid in the asker's namespace.
    pub const PID: i64 = ATTACH + 0x2000;
}

#[repr(C)]
pub struct Shared {
    pub magic: AtomicU64,
    pub version: AtomicU32,
    pub config_len: AtomicU32,
    pub created_ns: AtomicU64,
    pub active: AtomicU32,
    /// When the last scan for dead processes began.
    pub last_scan_ns: AtomicU64,
    pub commits: AtomicU64,
    /// Slots at and above this index were never used.
    pub slots_used: AtomicU32,
    /// Until when the driver's own lock is taken; see [`crate::session::Session::occupy`].
    pub occupied_ns: AtomicU64,
    /// Until when somebody pins host memory under it.
    pub pinning_ns: AtomicU64,
    /// Protects the engine, the slots and memory totals; see [`crate::lock`].
    pub lock: UnsafeCell<libc::pthread_mutex_t>,
    pub engines: [UnsafeCell<engine::State>; 2],
    pub slots: [Slot; MAX_SLOTS],
    /// Objects at and above this index were never used.
    pub objects_used: AtomicU32,
    pub objects: [Object; MAX_OBJECTS],
    /// 1 once the GPU has fallen off the bus.
    pub lost: [AtomicU32; MAX_GPUS],
    /// The last sign of a GPU thread, CLOCK_MONOTONIC; 0: there is none. See [`crate::channel`].
    pub served_ns: AtomicU64,
    /// 1 once there is something for it, a futex.
    pub gpu_bell: AtomicU32,
    /// How often somebody other than a GPU's own work has let a queue go on, a futex.
    pub went_on: AtomicU32,
    /// A futex.
    pub xids_written: AtomicU32,
    /// The last [`MAX_XIDS`] of them, by number modulo.
    pub xids: [Xid; MAX_XIDS],
    /// The last switches between processes, by unit and by number modulo.
    pub switches: [[Switch; MAX_SWITCHES]; MAX_UNITS],
    /// Operations in flight.
    pub rings: [Ring; MAX_CHANNELS],
    pub faults: crate::faults::Faults,
    /// The configuration the file was created with, TOML.
    pub config: UnsafeCell<[u8; MAX_CONFIG]>,
}

// SAFETY: everything is atomic except `lock`, which is a process-shared mutex made for this, the
// engine buffers, which are touched only under it, and `config`, which is written only before
// `magic` is published.
unsafe impl Sync for Shared {}

pub mod slot_state {
    pub const FREE: u32 = 0;
    pub const LIVE: u32 = 1;
    /// The process is gone, its memory is still in use until `release_ns`.
    pub const DYING: u32 = 2;
}

/// One process with an initialised driver.
#[repr(C)]
pub struct Slot {
    pub state: AtomicU32,
    pub pid: AtomicI32,
    /// The pid namespace in which that is its pid: the namespace's inode; 0: not known.
    pub namespace: AtomicU64,
    /// When a dying slot's memory is given back.
    pub release_ns: AtomicU64,
    /// `comm`, NUL-padded, in two words.
    pub name: [AtomicU64; 2],
    pub pinned: AtomicU64,
    /// Physical allocations that it has handles or mappings of.
    pub handles: AtomicU64,
    pub memory: [SlotMemory; MAX_UNITS],
}

/// Device memory of one process on one unit, in bytes, by [`crate::memory::Use`].
#[repr(C)]
pub struct SlotMemory(pub [AtomicU64; 2]);

/// A piece of device memory that more than one process may hold, counted once. It is free again
/// when nobody holds it and no exported descriptor of it is open; `holders` is the only word that a holder's death
/// changes, and an object without either counts for nothing, so there is no moment at which a kill could tear it.
#[repr(C)]
pub struct Object {
    /// 1 once the other fields are written.
    pub live: AtomicU32,
    pub gpu: AtomicU32,
    /// The slot of the process that made it. It counts for that one while it holds it.
    pub owner: AtomicU32,
    /// Counts the object's lives.
    pub generation: AtomicU64,
    pub bytes: AtomicU64,
    /// Device and inode of the file of which a descriptor was exported; none: 0.
    pub file: [AtomicU64; 2],
    /// The slots that hold it, one bit each.
    pub holders: [AtomicU64; MAX_SLOTS / 64],
    /// Of an interprocess event, which has no bytes: its last record; see [`crate::memory`].
    pub last: AtomicU64,
}

#[repr(C)]
pub struct Xid {
    pub gpu: AtomicU32,
    pub code: AtomicU32,
    /// The GPU instance that it is attributed to; none: [`u32::MAX`].
    pub gpu_instance: AtomicU32,
}

/// One switch, see [`engine::Handover`]. Written by the lock's holder, before the state that
/// counts it is published: written again, it is the same.
#[repr(C)]
pub struct Switch {
    /// Process slots: from above bit 32, to below.
    pub slots: AtomicU64,
    pub idle_from_ns: AtomicU64,
    pub at_ns: AtomicU64,
}

/// One channel's operations. One process writes, the lock's holder reads.
#[repr(C, align(64))]
pub struct Ring {
    /// Operations submitted so far; an operation is published by adding one (Release).
    pub submitted: AtomicU64,
    /// `Wait` operations submitted so far.
    pub waits: AtomicU64,
    /// Copy of the engine's `completed`, of a committed state (Release), for readers without the lock.
    pub completed: AtomicU64,
    /// Words to be written when an operation is complete.
    pub writes: Writes,
    pub entries: [Entry; RING],
}

/// See [`crate::channel`]. One process adds, the lock's holder takes away.
#[repr(C)]
pub struct Writes {
    /// Words taken away so far, from the first on.
    pub first: AtomicU64,
    /// Words added so far; one is published by adding one (Release).
    pub next: AtomicU64,
    pub words: [WriteWord; WRITES],
}

#[repr(C)]
pub struct WriteWord {
    /// The operation after which it is written, or the one that is a wait for it.
    pub seq: AtomicU64,
    /// Where, with 1 added for a word of 4 bytes; 0: it is written, or as wanted.
    pub address: AtomicU64,
    pub value: AtomicU64,
    /// How a wait compares, and 1; 0: it is to be written.
    pub wait: AtomicU64,
}

#[repr(C)]
pub struct Entry {
    pub arrival_ns: AtomicU64,
    /// Kind in the low 8 bits, the queue in the next 8, the channel of a wait above bit 32.
    pub kind: AtomicU64,
    /// Nanoseconds, or the number waited for; 1 once the host has ended what it ends.
    pub value: AtomicU64,
    /// When it was complete; valid once `completed` passed it.
    pub finish_ns: AtomicU64,
}

pub mod kind {
    /// One in the queue's bits.
    pub const QUEUE: u64 = 1 << 8;
    /// Needs the GPU.
    pub const COMPUTE: u64 = 0;
    /// Occupies the channel.
    pub const DELAY: u64 = 1;
    pub const WAIT: u64 = 2;
    pub const HOST: u64 = 3;
    /// As `COMPUTE`, for an event or a marker.
    pub const MARK: u64 = 4;
    /// Needs the GPU until it is declared finished.
    pub const UNTIL: u64 = 5;
    /// As `COMPUTE`, of a part of the GPU.
    pub const PART: u64 = 6;
}

const _: () = assert!(std::mem::size_of::<Entry>() == 32);
const _: () = assert!(std::mem::align_of::<Shared>() <= 4096);
