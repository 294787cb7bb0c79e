//! The calling thread's own words, its launch record among them.
//!
//! In a shared library `thread_local!` costs a call of `__tls_get_addr`, a fifth of what a hooked
//! launch may cost, and that function is the dynamic linker's, a library that musl does not know by
//! name. The shim is loaded at program start, so its words can be in the static TLS block, at a fixed
//! distance from the thread pointer (the "initial-exec" model of the ELF TLS specification), for
//! which stable Rust has no word but assembly has.

use crate::records::Record;
use crate::thread::Thread;
use core::cell::Cell;

/// All zero at first.
#[repr(C)]
struct Own {
    record: Cell<*const Record>,
    thread: Thread,
}
const _: () = assert!(align_of::<Own>() == 8);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
core::arch::global_asm!(
    ".pushsection .tbss.tessera_record,\"awT\",%nobits",
    ".hidden tessera_record",
    ".globl tessera_record",
    ".type tessera_record, %object",
    ".size tessera_record, {size}",
    ".balign 8",
    "tessera_record:",
    ".zero {size}",
    ".popsection",
    size = const size_of::<Own>(),
);

/// This thread's record; null before its first launch.
#[inline(always)]
pub(crate) fn record() -> *const Record {
    own().record.get()
}

pub(crate) fn set_record(record: *const Record) {
    own().record.set(record);
}

/// What hooks keep for this thread. Not to be handed to another.
#[inline(always)]
pub(crate) fn thread() -> &'static Thread {
    &own().thread
}

#[inline(always)]
fn own() -> &'static Own {
    let own: *const Own;
    // SAFETY: an address of this thread's own block.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "mov {own}, qword ptr [rip + tessera_record@GOTTPOFF]",
            "add {own}, qword ptr fs:[0]",
            own = out(reg) own,
            options(nostack, pure, readonly),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "mrs {thread}, tpidr_el0",
            "adrp {own}, :gottprel:tessera_record",
            "ldr {own}, [{own}, :gottprel_lo12:tessera_record]",
            "add {own}, {thread}, {own}",
            thread = out(reg) _,
            own = out(reg) own,
            options(nostack, preserves_flags, pure, readonly),
        );
    }
    // SAFETY: zeroed when the thread began, for which it is a value; there as long as the thread is,
    // and not `Sync`.
    unsafe { &*own }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr;

    #[test]
    fn every_thread_has_its_own_word() {
        let mine = ptr::without_provenance(64);
        set_record(mine);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(record().is_null());
                set_record(ptr::without_provenance(128));
                assert_eq!(record().addr(), 128);
            });
        });
        assert_eq!(record(), mine);
        set_record(ptr::null());
    }
}
