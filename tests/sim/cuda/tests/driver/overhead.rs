//! Memory that no allocation function obtained: CUDA Driver API, "Context Management"
//! (`cuCtxSetLimit`), "Module Management" (lazy loading).

use crate::harness::*;
use std::ffi::c_int;

scenarios! {
    a_raised_heap_is_taken_at_the_next_launch
    the_device_runtimes_memory_is_taken_at_once
    a_function_is_loaded_when_it_is_first_used
    a_large_image_takes_its_size_with_its_first_function
    export_tables_are_unknown
}

fn set_limit(which: c_int, value: usize) {
    ok(cuda!(cuCtxSetLimit(which, value)));
}

mod body {
    use super::*;

    const HEAP: c_int = 2;

    fn launch_it(function: Handle) -> Result {
        launch(function, 1, NULL, std::ptr::null_mut())
    }

    /// "CU_LIMIT_MALLOC_HEAP_SIZE controls the size in bytes of the heap used by the malloc() and
    /// free() device system calls".
    pub fn a_raised_heap_is_taken_at_the_next_launch() {
        retain(0);
        let plain = kernel("plain");
        ok(launch_it(plain));
        let room = free_bytes();
        set_limit(HEAP, 128 << 20);
        assert_eq!(free_bytes(), room, "not before a kernel runs");
        ok(launch_it(plain));
        assert_eq!(room - free_bytes(), 120 << 20);
        set_limit(HEAP, 8 << 20);
        ok(launch_it(plain));
        assert_eq!(room - free_bytes(), 120 << 20, "kept");
        set_limit(HEAP, 1 << 40);
        assert_eq!(launch_it(plain), 2, "more than there is");
    }

    /// "Attempting to set this limit on devices of other compute capability will results in error
    /// CUDA_ERROR_UNSUPPORTED_LIMIT" (the depth, from 9.0 on).
    pub fn the_device_runtimes_memory_is_taken_at_once() {
        retain(0);
        let room = free_bytes();
        assert_eq!(cuda!(cuCtxSetLimit(3, 4usize)), 215);
        set_limit(4, 4096);
        assert_eq!(room - free_bytes(), 2048 * 8192);
        set_limit(4, 2048);
        assert_eq!(free_bytes(), room);
    }

    /// `cuFuncIsLoaded`, `cuFuncLoad`.
    pub fn a_function_is_loaded_when_it_is_first_used() {
        retain(0);
        let is_loaded = |f: Handle| must(|to| cuda!(cuFuncIsLoaded(to, f)));
        let (launched, loaded) = (unloaded("plain"), unloaded("wave"));
        assert_eq!((is_loaded(launched), is_loaded(loaded)), (0, 0));
        ok(launch(launched, 1, NULL, std::ptr::null_mut()));
        ok(cuda!(cuFuncLoad(loaded)));
        assert_eq!((is_loaded(launched), is_loaded(loaded)), (1, 1));
    }

    /// A fatbin's header, and as much as it says.
    pub fn a_large_image_takes_its_size_with_its_first_function() {
        retain(0);
        let mut fatbin = [0u8; 16];
        fatbin[..8].copy_from_slice(&[0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0]);
        fatbin[8..].copy_from_slice(&(300u64 << 20).to_le_bytes());
        let (room, mut module, mut function) = (free_bytes(), NULL, NULL);
        ok(cuda!(cuModuleLoadData(&raw mut module, fatbin.as_ptr().cast())));
        let loaded = free_bytes();
        ok(cuda!(cuModuleGetFunction(&raw mut function, module, c"any".as_ptr())));
        ok(launch_it(function));
        let (launched, whole) = (free_bytes(), 300 << 20);
        assert!((whole..whole + (4 << 20)).contains(&(room - launched)) && loaded > launched);
        ok(launch_it(function));
        assert_eq!(launched, free_bytes());
        ok(cuda!(cuModuleUnload(module)));
        assert_eq!(room, free_bytes());
    }

    pub fn export_tables_are_unknown() {
        retain(0);
        let mut table = std::ptr::null();
        assert_eq!(cuda!(cuGetExportTable(&raw mut table, [0x6eu8; 16].as_ptr().cast())), 1);
        assert_eq!(table, std::ptr::null());
    }
}
