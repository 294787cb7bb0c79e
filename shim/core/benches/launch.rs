//! A hooked launch against the bare call, on a driver that does nothing. Cases:
//!
//! - `bare`: the driver's function through a pointer;
//! - `pair`: the same with a flag's `swap(1, SeqCst)` and `store(0, Release)` around it, which is
//!   what the gate's protocol would cost at least without membarrier;
//! - `pass`: hooked, in a process that is no tenant;
//! - `solo`: hooked, a tenant alone on its GPU;
//! - `shared`: the same in a ninth thread, which shares its launch counter and uses the `swap`.
//!
//! Each figure is the median of [`ROUNDS`] rounds of [`LAUNCHES`]. Here the thread's record is found
//! at a fixed distance from the thread pointer, in the shared library with one load more;
//! `make bench` measures the library as it is.

use core::ffi::{c_uint, c_void};
use core::hint::black_box;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};
use std::process::Command;
use std::time::Instant;
use tessera_cuda::types::CUresult;
use tessera_region::quota::{self, GpuQuota, Policy, QuotaSpec};
use tessera_region::usage;
use tessera_shim_core::gate::Stream;
use tessera_shim_core::launch;
use tessera_shim_core::real::{Library, Real};

const ROUNDS: usize = 301;
const LAUNCHES: u32 = 10_000;

type Launch = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> CUresult;

#[allow(clippy::too_many_arguments, reason = "cuLaunchKernel's signature")]
extern "C" fn driver(
    _f: *mut c_void,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared_bytes: c_uint,
    _stream: *mut c_void,
    _params: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    black_box(0)
}

// SAFETY: `driver` has the type that is named.
static REAL: Real<Launch> =
    unsafe { Real::at(c"cuLaunchKernel", Library::Cuda, driver as *mut c_void) };
static BUSY: AtomicU32 = AtomicU32::new(0);

fn call(function: Launch) -> CUresult {
    let none = ptr::null_mut();
    // SAFETY: `driver` reads none of its arguments.
    unsafe { function(none, 1, 1, 1, 1, 1, 1, 0, none, none.cast(), none.cast()) }
}

#[inline(never)]
fn bare() -> CUresult {
    call(black_box(driver))
}

#[inline(never)]
fn pair() -> CUresult {
    BUSY.swap(1, Ordering::SeqCst);
    let result = call(black_box(driver));
    BUSY.store(0, Ordering::Release);
    result
}

#[inline(never)]
fn hooked() -> CUresult {
    match launch::at_once(&REAL, Stream::LEGACY) {
        Some((function, _busy)) => call(function),
        None => launch::otherwise(&REAL, ptr::null_mut(), Stream::LEGACY, false, call),
    }
}

fn median_ns(launch: fn() -> CUresult) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..LAUNCHES {
                black_box(launch());
            }
            start.elapsed().as_secs_f64() * 1e9 / f64::from(LAUNCHES)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn report(case: &str, bare_ns: f64, ns: f64) {
    println!("{case:<8}{ns:>8.2} ns {:>+8.2} ns", ns - bare_ns);
}

fn main() {
    let bare_ns = median_ns(bare);
    if std::env::var_os("TESSERA_DIR").is_none() {
        report("bare", bare_ns, bare_ns);
        report("pair", bare_ns, median_ns(pair));
        report("pass", bare_ns, median_ns(hooked));
        let dir = tempfile::tempdir().expect("a temporary directory");
        let gpu = GpuQuota {
            uuid: "GPU-00000000-0000-0000-0000-000000000001".to_owned(),
            memory_limit_bytes: 1 << 30,
            context_overhead_bytes: 0,
            cores_millis: 1000,
            policy: Policy::None,
        };
        let spec = QuotaSpec { allocation: "bench".to_owned(), generation: 1, gpus: vec![gpu] };
        quota::create(dir.path(), &spec).expect("a valid quota");
        usage::create(dir.path(), 1).expect("a writable directory");
        let program = std::env::current_exe().expect("/proc is mounted");
        let tenant = Command::new(program).env("TESSERA_DIR", dir.path()).status();
        assert!(tenant.expect("this very program").success());
        return;
    }
    report("solo", bare_ns, median_ns(hooked));
    let gate = std::sync::Barrier::new(9);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                hooked();
                gate.wait(); // all have their record
                gate.wait(); // and stay alive
            });
        }
        gate.wait();
        let shared = scope.spawn(|| median_ns(hooked)).join();
        report("shared", bare_ns, shared.expect("it only measures"));
        gate.wait();
    });
}
