//! Green contexts against the comments of cuda.h ("Green Contexts").

use crate::harness::*;
use std::ffi::{c_int, c_uint};

const SM: c_int = 1;
const DETACHED: Result = 917;

/// `CUdevResource`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Resource {
    kind: c_int,
    pad: [u8; 92],
    value: [u32; 10],
    next: usize,
}
const EMPTY: Resource = Resource { kind: 0, pad: [0; 92], value: [0; 10], next: 0 };
const _: () = assert!(size_of::<Resource>() == 144);

fn whole(device: c_int) -> Resource {
    let mut r = EMPTY;
    ok(cuda!(cuDeviceGetDevResource(device, (&raw mut r).cast(), SM)));
    r
}

fn by_count(of: &Resource, groups: u32, least: u32) -> Outcome<(Vec<Resource>, Resource)> {
    let (mut out, mut count, mut rest) = (vec![EMPTY; groups as usize], groups, EMPTY);
    match cuda!(cuDevSmResourceSplitByCount(
        out.as_mut_ptr().cast(),
        &raw mut count,
        std::ptr::from_ref(of).cast(),
        (&raw mut rest).cast(),
        0,
        least
    )) {
        0 => {
            out.truncate(count as usize);
            Ok((out, rest))
        }
        e => Err(e),
    }
}

fn describe(resources: &[Resource]) -> Outcome<Handle> {
    made(|to| {
        cuda!(cuDevResourceGenerateDesc(
            to,
            resources.as_ptr().cast(),
            u32::try_from(resources.len()).unwrap()
        ))
    })
}

fn green(resources: &[Resource]) -> Handle {
    let (descriptor, mut green) = (describe(resources).unwrap(), NULL);
    ok(cuda!(cuGreenCtxCreate(&raw mut green, descriptor, 0, 1)));
    green
}

fn context_of(green: Handle) -> Handle {
    must(|to| cuda!(cuCtxFromGreenCtx(to, green)))
}

fn stream_in(green: Handle) -> Handle {
    must(|to| cuda!(cuGreenCtxStreamCreate(to, green, 1, 0)))
}

scenarios! {
    /// "This API will retain the primary context"; "treated as if it were a primary context".
    fn a_green_context_is_a_view_of_the_primary_one() {
        ok(cuda!(cuInit(0)));
        let (groups, _) = by_count(&whole(0), 1, 32).unwrap();
        let green = green(&groups);
        let (mut flags, mut active): (c_uint, c_int) = (0, 0);
        ok(cuda!(cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut active)));
        assert_eq!(active, 1);
        let view = context_of(green);
        assert_eq!(context_of(green), view);
        ok(cuda!(cuCtxSetCurrent(view)));
        let at = alloc(MIB).unwrap();
        let owner = must(|to: *mut Handle| cuda!(cuPointerGetAttribute(to.cast(), 1, at)));
        let primary = retain(0);
        assert_eq!(owner, primary, "memory is the primary context's");
        ok(cuda!(cuCtxSetCurrent(view)));
        let (s, plain) = (stream_in(green), new_stream());
        for stream in [s, plain, NULL] {
            assert_eq!(must(|to| cuda!(cuStreamGetCtx(stream, to))), view);
            assert_eq!(must(|to| cuda!(cuStreamGetGreenCtx(stream, to))), green);
        }
        let mut none = NULL;
        let blocking = cuda!(cuGreenCtxStreamCreate(&raw mut none, green, 0, 0));
        assert_eq!(blocking, 1, "only non-blocking streams");
        ok(launch(kernel("plain"), 1, s, std::ptr::null_mut()));
        ok(cuda!(cuCtxSetCurrent(primary)));
        ok(cuda!(cuCtxSynchronize()));
        assert_eq!(cuda!(cuStreamQuery(s)), 0, "the primary context waits for it");
        assert_eq!(cuda!(cuCtxDestroy_v2(view)), 201);
    }

    fn its_end_detaches_its_streams_and_leaves_memory() {
        ok(cuda!(cuInit(0)));
        let primary = retain(0);
        let used = free_bytes();
        let (groups, _) = by_count(&whole(0), 1, 32).unwrap();
        let green = green(&groups);
        let (view, s) = (context_of(green), stream_in(green));
        ok(cuda!(cuCtxSetCurrent(view)));
        let at = alloc(2 * MIB).unwrap();
        ok(launch(kernel("plain"), 1, s, std::ptr::null_mut()));
        ok(cuda!(cuGreenCtxDestroy(green)));
        assert_eq!(cuda!(cuGreenCtxDestroy(green)), 201);
        assert_eq!(cuda!(cuStreamSynchronize(s)), DETACHED);
        ok(cuda!(cuStreamDestroy_v2(s)));
        ok(cuda!(cuCtxSetCurrent(primary)));
        assert_eq!(used - free_bytes(), 2 * MIB);
        ok(free(at));
        assert_eq!(free_bytes(), used);
    }
}
