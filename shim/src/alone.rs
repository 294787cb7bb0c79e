//! What a library without std brings itself: where memory comes from, and what happens on a panic.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::c_void;
use core::panic::PanicInfo;
use core::ptr;
use tessera_shim_core::log;

/// libc's, for the few things that live as long as the process. No hook allocates while it is hot.
struct Libc;

#[global_allocator]
static ALLOCATOR: Libc = Libc;

// SAFETY: libc's functions keep what the trait asks: blocks of their own, aligned as asked for, null
// where there is no memory.
unsafe impl GlobalAlloc for Libc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let mut at: *mut c_void = ptr::null_mut();
        // posix_memalign(3): a power of two, and a multiple of a pointer's size.
        let align = layout.align().max(size_of::<*mut c_void>());
        // SAFETY: a place for the answer, which is null until the call succeeds.
        unsafe { libc::posix_memalign(&raw mut at, align, layout.size()) };
        at.cast()
    }

    unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
        // SAFETY: the caller's word: from `alloc`, and not used any more.
        unsafe { libc::free(at.cast()) };
    }
}

/// Says where, and ends the process. Nothing unwinds into the host.
#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    log::write_line(format_args!("a defect of Tessera's: {info}"));
    // SAFETY: always.
    unsafe { libc::abort() }
}
