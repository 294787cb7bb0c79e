//! Memory that no allocation function obtained: CUDA Driver API, "Context Management"
//! (`cuCtxSetLimit`), "Module Management" (lazy loading), and the simulator's private table.

use crate::harness::*;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

scenarios! {
    a_raised_stack_is_taken_at_once_and_given_back_when_it_is_lowered
    a_larger_frame_is_taken_at_the_launch_and_stays
    a_raised_heap_is_taken_at_the_next_launch
    the_device_runtimes_memory_is_taken_at_once
    a_function_is_loaded_when_it_is_first_used
    a_large_image_takes_its_size_with_its_first_function
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

    const STACK: c_int = 0;
    const HEAP: c_int = 2;
    const THREADS: usize = 2048 * 132;

    /// The entries `deep` and `flat` of a module.
    fn kernels(ptx: &str) -> (Handle, Handle) {
        let ptx = CString::new(ptx).unwrap();
        let mut module = NULL;
        ok(cuda!(cuModuleLoadData(&raw mut module => *mut Handle, ptx.as_ptr() => *const c_char)));
        let of = |name: &CStr| {
            let mut function = NULL;
            ok(cuda!(cuModuleGetFunction(&raw mut function => *mut Handle, module => Handle,
                     name.as_ptr() => *const c_char)));
            function
        };
        (of(c"deep"), of(c"flat"))
    }

    fn launch_it(function: Handle) -> Result {
        launch(function, 1, NULL, std::ptr::null_mut())
    }

    /// "CU_LIMIT_STACK_SIZE controls the stack size in bytes of each GPU thread […] Setting this value
    /// will take effect immediately, and if necessary, the device will block until all preceding
    /// requested tasks are complete".
    pub fn a_raised_stack_is_taken_at_once_and_given_back_when_it_is_lowered() {
        retain(0);
        let spin = kernel("spin");
        let room = free_bytes();
        keep_busy(spin, NULL);
        set_limit(STACK, 2048);
        ok(cuda!(cuStreamQuery(NULL => Handle)));
        assert_eq!(room - free_bytes(), 1024 * THREADS);
        let refused = cuda!(cuCtxSetLimit(STACK => c_int, 1usize << 20 => usize));
        assert_eq!((refused, room - free_bytes()), (2, 1024 * THREADS), "more than there is");
        let mut now = 0usize;
        ok(cuda!(cuCtxGetLimit(&raw mut now => *mut usize, STACK => c_int)));
        assert_eq!(now, 2048);
        set_limit(STACK, 0);
        assert_eq!(free_bytes(), room);
        set_limit(STACK, 2048);
        ok(cuda!(cuDevicePrimaryCtxReset_v2(0 => c_int)));
        retain(0);
        assert_eq!(free_bytes(), room);
    }

    /// "The driver automatically increases the per-thread stack size for each kernel launch as needed.
    /// This size isn't reset back to the original value after each launch."
    pub fn a_larger_frame_is_taken_at_the_launch_and_stays() {
        retain(0);
        let (deep, flat) = kernels(
            ".version 8.0\n.target sm_90\n.entry deep()\n{\n\t.local .align 8 .b8 depot[3072];\n\tret;\n}\n\
             .entry flat()\n{\n\tret;\n}\n",
        );
        let mut frame = 0;
        ok(cuda!(cuFuncGetAttribute(&raw mut frame => *mut c_int, 3 => c_int, deep => Handle)));
        assert_eq!(frame, 3072);
        ok(launch_it(flat));
        let room = free_bytes();
        ok(launch_it(deep));
        assert_eq!(room - free_bytes(), 2048 * THREADS);
        ok(launch_it(deep));
        ok(launch_it(flat));
        set_limit(STACK, 1024);
        assert_eq!(room - free_bytes(), 2048 * THREADS, "kept");
        let mut now = 0usize;
        ok(cuda!(cuCtxGetLimit(&raw mut now => *mut usize, STACK => c_int)));
        assert_eq!(now, 3072);
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
        assert_eq!(cuda!(cuCtxSetLimit(3 => c_int, 4usize => usize)), 215);
        set_limit(4, 4096);
        assert_eq!(room - free_bytes(), 2048 * 8192);
        set_limit(4, 2048);
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
        let (launched, loaded) = (unloaded("plain"), unloaded("wave"));
        assert_eq!((is_loaded(launched), is_loaded(loaded)), (0, 0));
        ok(launch(launched, 1, NULL, std::ptr::null_mut()));
        ok(cuda!(cuFuncLoad(loaded => Handle)));
        assert_eq!((is_loaded(launched), is_loaded(loaded)), (1, 1));
    }

    /// A fatbin's header, and as much as it says.
    pub fn a_large_image_takes_its_size_with_its_first_function() {
        retain(0);
        let mut fatbin = [0u8; 16];
        fatbin[..8].copy_from_slice(&[0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0]);
        fatbin[8..].copy_from_slice(&(300u64 << 20).to_le_bytes());
        let (room, mut module, mut function) = (free_bytes(), NULL, NULL);
        ok(cuda!(cuModuleLoadData(&raw mut module => *mut Handle, fatbin.as_ptr() => *const u8)));
        let loaded = free_bytes();
        ok(cuda!(cuModuleGetFunction(&raw mut function => *mut Handle, module => Handle,
                 c"any".as_ptr() => *const c_char)));
        ok(launch_it(function));
        let (launched, whole) = (free_bytes(), 300 << 20);
        assert!((whole..whole + (4 << 20)).contains(&(room - launched)) && loaded > launched);
        ok(launch_it(function));
        assert_eq!(launched, free_bytes());
        ok(cuda!(cuModuleUnload(module => Handle)));
        assert_eq!(room, free_bytes());
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
