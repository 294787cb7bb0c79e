//! Memory that no allocation function obtained: CUDA Driver API, "Context Management"
//! (`cuCtxSetLimit`), "Module Management" (lazy loading), and the simulator's private table.

mod harness;

use harness::*;
use std::ffi::{c_int, c_void};

scenarios! {
    raised_limits_take_memory_at_the_next_launch
    a_function_is_loaded_when_it_is_first_used
    private_memory_is_seen_in_the_gpus_count_only
    other_export_tables_are_unknown
}

fn set_limit(which: c_int, value: usize) {
    ok(cuda!(cuCtxSetLimit(which => c_int, value => usize)));
}

fn table(id: &[u8; 16]) -> (Result, *const c_void) {
    let mut table = std::ptr::null();
    let r = cuda!(cuGetExportTable(&raw mut table => *mut *const c_void,
                  id.as_ptr() => *const u8));
    (r, table)
}

mod body {
    use super::*;

    /// "CU_LIMIT_STACK_SIZE controls the stack size in bytes of each GPU thread",
    /// "CU_LIMIT_MALLOC_HEAP_SIZE controls the size in bytes of the heap used by the malloc() and
    /// free() device system calls".
    pub fn raised_limits_take_memory_at_the_next_launch() {
        retain(0);
        let plain = kernel("plain");
        ok(launch(plain, 1, NULL, std::ptr::null_mut()));
        let room = free_bytes();
        set_limit(0, 2048);
        set_limit(2, 128 * MIB);
        assert_eq!(free_bytes(), room, "not before a kernel runs");
        ok(launch(plain, 1, NULL, std::ptr::null_mut()));
        let taken = 1024 * 2048 * 132 + 120 * MIB;
        assert_eq!(room - free_bytes(), taken.next_multiple_of(2 * MIB));
        let now = free_bytes();
        ok(launch(plain, 1, NULL, std::ptr::null_mut()));
        set_limit(0, 1024);
        ok(launch(plain, 1, NULL, std::ptr::null_mut()));
        assert_eq!(free_bytes(), now, "kept");
        set_limit(2, 1 << 40);
        assert_eq!(launch(plain, 1, NULL, std::ptr::null_mut()), 2, "more than there is");
        ok(cuda!(cuDevicePrimaryCtxReset_v2(0 => c_int)));
        retain(0);
        assert_eq!(free_bytes(), room);
    }

    /// `cuFuncIsLoaded`, `cuFuncLoad`.
    pub fn a_function_is_loaded_when_it_is_first_used() {
        retain(0);
        let is_loaded = |f: Handle| {
            let mut state = 9;
            ok(cuda!(cuFuncIsLoaded(&raw mut state => *mut c_int, f => Handle)));
            state
        };
        let (launched, loaded) = (kernel("plain"), kernel("wave"));
        assert_eq!((is_loaded(launched), is_loaded(loaded)), (0, 0));
        ok(launch(launched, 1, NULL, std::ptr::null_mut()));
        ok(cuda!(cuFuncLoad(loaded => Handle)));
        assert_eq!((is_loaded(launched), is_loaded(loaded)), (1, 1));
    }

    pub fn private_memory_is_seen_in_the_gpus_count_only() {
        #[repr(C)]
        struct Table {
            size: usize,
            take: extern "C" fn(c_int, usize) -> Result,
            give: extern "C" fn(c_int, usize) -> Result,
        }
        retain(0);
        let room = free_bytes();
        let (r, at) = table(b"simgpu private 1");
        assert_eq!(r, 0);
        // SAFETY: the table of this id has this layout and is never unmapped.
        let table = unsafe { &*at.cast::<Table>() };
        assert_eq!(table.size, size_of::<Table>());
        ok((table.take)(0, 5 * MIB));
        assert_eq!(room - free_bytes(), 6 * MIB);
        assert_eq!(((table.take)(0, room), (table.take)(7, MIB)), (2, 101));
        ok((table.give)(0, 5 * MIB));
        assert_eq!(free_bytes(), room);
    }

    pub fn other_export_tables_are_unknown() {
        retain(0);
        assert_eq!(table(&[0x6e; 16]), (1, std::ptr::null()));
    }
}
