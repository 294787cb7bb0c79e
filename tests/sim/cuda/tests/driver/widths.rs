//! Each call writes exactly the bytes of the type that the manual gives its result, whatever is there
//! before: the comments of cuda.h, and its types.

use crate::harness::*;
use std::ffi::{c_int, c_void};

scenarios! {
    pointer_attributes_have_the_manuals_width
    attributes_of_devices_and_code_are_ints
    other_answers_have_the_width_of_their_types
}

/// How many bytes from the beginning `call` writes; it must succeed and write nothing behind them.
fn written(what: &str, call: impl Fn(*mut c_void) -> Result) -> usize {
    const ROOM: usize = 256;
    let fill = |pattern: u8| {
        let mut bytes = [u64::from_le_bytes([pattern; 8]); ROOM / 8];
        let result = call(bytes.as_mut_ptr().cast());
        assert_eq!(result, 0, "{what}");
        bytes.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()
    };
    // A byte that keeps two unlike patterns was not written.
    let (a, b) = (fill(0xa5), fill(0x5a));
    let kept: Vec<bool> = a.iter().zip(&b).map(|(a, b)| (*a, *b) == (0xa5, 0x5a)).collect();
    let len = kept.iter().take_while(|kept| !**kept).count();
    assert!(kept[len..].iter().all(|kept| *kept), "{what}: writes with a gap");
    len
}

/// Writes its answer where it is pointed to.
type Call<'a> = &'a dyn Fn(*mut c_void) -> Result;

/// `CU_POINTER_ATTRIBUTE_*` and the bytes of its value.
const POINTER: &[(c_int, usize)] = &[
    (1, 8),  // CUcontext
    (2, 4),  // unsigned int
    (3, 8),  // CUdeviceptr
    (4, 8),  // void *
    (5, 16), // CUDA_POINTER_ATTRIBUTE_P2P_TOKENS
    (6, 4),  // boolean
    (7, 8),  // unsigned long long
    (8, 4),  // boolean: managed
    (9, 4),  // int
    (10, 4), // boolean: IPC
    (11, 8), // CUdeviceptr
    (12, 8), // size_t
    (13, 4), // boolean: mapped
    (14, 8), // unsigned long long
    (15, 4), // boolean: GPUDirect
    (16, 4), // CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS
    (17, 8), // CUmemoryPool
    (18, 8), // size_t
    (19, 8), // CUdeviceptr
    (20, 8), // unsigned long long
    (21, 4), // boolean: decompression
];

mod body {
    use super::*;

    pub fn pointer_attributes_have_the_manuals_width() {
        retain(0);
        let (mut managed, mut host, mut pooled) = (0u64, NULL, 0u64);
        ok(cuda!(cuMemAllocManaged(&raw mut managed, MIB, 1)));
        ok(cuda!(cuMemAllocHost_v2(&raw mut host, MIB)));
        ok(cuda!(cuMemAllocAsync(&raw mut pooled, MIB, NULL)));
        let device = alloc(MIB).unwrap();
        let local = 5u64;
        for address in [device, managed, host as u64, pooled, &raw const local as u64] {
            for &(which, width) in POINTER {
                let one = |value: *mut c_void| cuda!(cuPointerGetAttribute(value, which, address));
                let mut room = [0u64; 4];
                if one(room.as_mut_ptr().cast()) == 0 {
                    assert_eq!(written("one", one), width, "attribute {which} of {address:#x}");
                }
            }
            let mut is_managed: c_int = -1;
            let result = cuda!(cuPointerGetAttribute((&raw mut is_managed).cast(), 8, address));
            let known = address != &raw const local as u64;
            assert_eq!(result == 0, known);
            assert_eq!(known.then_some(is_managed), known.then_some((address == managed).into()));
        }
    }

    pub fn attributes_of_devices_and_code_are_ints() {
        retain(0);
        let function = kernel("plain");
        let mut seen = 0;
        for which in 0..200 {
            let calls: [(&str, Call); 2] = [
                ("device", &|to| cuda!(cuDeviceGetAttribute(to.cast(), which, 0))),
                ("function", &|to| cuda!(cuFuncGetAttribute(to.cast(), which, function))),
            ];
            for (what, call) in calls {
                let mut room = [0u64; 32];
                if call(room.as_mut_ptr().cast()) == 0 {
                    assert_eq!(written(what, call), 4, "{what} attribute {which}");
                    seen += 1;
                }
            }
        }
        assert!(seen > 140, "{seen}");
    }

    pub fn other_answers_have_the_width_of_their_types() {
        retain(0);
        let (s, at, mut pool) = (new_stream(), alloc(MIB).unwrap(), NULL);
        ok(cuda!(cuDeviceGetDefaultMemPool(&raw mut pool, 0)));
        // Reuse policies are ints, amounts are cuuint64_t.
        for which in 1..=8 {
            let get = |to: *mut c_void| cuda!(cuMemPoolGetAttribute(pool, which, to));
            assert_eq!(written("pool", get), if which <= 3 { 4 } else { 8 }, "{which}");
        }
        for which in 0..4 {
            let get = |to: *mut c_void| cuda!(cuDeviceGetGraphMemAttribute(0, which, to));
            assert_eq!(written("graph memory", get), 8, "{which}");
        }
        for which in 0..7 {
            let get = |to: *mut c_void| cuda!(cuCtxGetLimit(to.cast(), which));
            assert_eq!(written("limit", get), 8, "{which}");
        }
        let table: &[(&str, usize, Call)] = &[
            ("cuStreamGetCtx", 8, &|to| cuda!(cuStreamGetCtx(s, to.cast()))),
            ("cuStreamIsCapturing", 4, &|to| cuda!(cuStreamIsCapturing(s, to.cast()))),
            ("cuCtxGetDevice", 4, &|to| cuda!(cuCtxGetDevice(to.cast()))),
            ("cuDeviceTotalMem_v2", 8, &|to| cuda!(cuDeviceTotalMem_v2(to.cast(), 0))),
            ("cuDeviceGetUuid_v2", 16, &|to| cuda!(cuDeviceGetUuid_v2(to.cast(), 0))),
            ("cuModuleGetLoadingMode", 4, &|to| cuda!(cuModuleGetLoadingMode(to.cast()))),
            ("cuIpcGetMemHandle", 64, &|to| cuda!(cuIpcGetMemHandle(to.cast(), at))),
            ("cuDriverGetVersion", 4, &|to| cuda!(cuDriverGetVersion(to.cast()))),
        ];
        for (what, width, call) in table {
            assert_eq!(written(what, call), *width, "{what}");
        }
    }
}
