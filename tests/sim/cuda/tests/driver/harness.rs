//! The library as programs load it: each scenario runs in a process of its own, with its own state.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

pub const CONFIG: &str = r#"
default_kernel_us = 20.0
memory.reserved = 0
memory.context_overhead = "64MiB"
memory.module_overhead = 0
costs.launch_ns = 0
costs.event_ns = 1000
[[kernel]]
name = "spin"
parameter = 1
[[kernel]]
name = "wave"
us_per_wave = 3.0
[[kernel]]
name = "until"
word = 0
"#;

pub type Result = c_int;
pub type Handle = *mut c_void;

pub const MIB: usize = 1 << 20;
pub const NULL: Handle = std::ptr::null_mut();

/// Runs the ignored test at this path in a fresh process on a fresh state.
pub fn in_its_own_process(name: &str) {
    configured_in_its_own_process("", name);
}

/// The same with keys before the configuration's others.
pub fn configured_in_its_own_process(keys: &str, name: &str) {
    let (_crate, name) = name.split_once("::").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("gpus.toml");
    std::fs::write(&config, format!("{keys}{CONFIG}")).unwrap();
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"])
        .env("SIMGPU_CONFIG", &config)
        .env("SIMGPU_STATE", dir.path().join("state"))
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && text.contains("1 passed"), "{name}: {text}");
}

macro_rules! scenarios {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                crate::harness::in_its_own_process(concat!(module_path!(), "::scenario::", stringify!($name)));
            }
        )*
        mod scenario {
            $(
                #[test]
                #[ignore = "run by its namesake in a process of its own"]
                fn $name() {
                    super::body::$name();
                }
            )*
        }
    };
}

/// As [`scenarios`], each with keys of its own.
macro_rules! configured {
    ($($name:ident = $keys:literal)*) => {
        $(
            #[test]
            fn $name() {
                let name = concat!(module_path!(), "::configured::", stringify!($name));
                crate::harness::configured_in_its_own_process($keys, name);
            }
        )*
        mod configured {
            $(
                #[test]
                #[ignore = "run by its namesake in a process of its own"]
                fn $name() {
                    super::body::$name();
                }
            )*
        }
    };
}

/// The library beside this test's executable, loaded once.
pub fn library() -> Handle {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    loaded(&LIBRARY, "libsimcuda.so")
}

/// The same of NVML.
pub fn nvml_library() -> Handle {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    loaded(&LIBRARY, "libsimnvml.so")
}

fn loaded(library: &OnceLock<usize>, name: &str) -> Handle {
    let at = library.get_or_init(|| {
        let path: PathBuf = std::env::current_exe().unwrap().with_file_name(name);
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a library without constructors.
        let lib = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!lib.is_null(), "cannot load {path:?}");
        lib as usize
    });
    *at as Handle
}

pub fn symbol(name: &str) -> Handle {
    let library = if name.starts_with("nvml") { nvml_library() } else { library() };
    let c = CString::new(name).unwrap();
    // SAFETY: a loaded library and a terminated name.
    let at = unsafe { libc::dlsym(library, c.as_ptr()) };
    assert!(!at.is_null(), "no {name}");
    at
}

/// `cuda!(name(arg: type, …))`: the call's CUresult, or NVML's result.
macro_rules! cuda {
    ($name:ident($($arg:expr => $ty:ty),* $(,)?)) => {{
        type Signature = unsafe extern "C" fn($($ty),*) -> $crate::harness::Result;
        let at = $crate::harness::symbol(stringify!($name));
        // SAFETY: the export has this signature.
        let f = unsafe { std::mem::transmute::<$crate::harness::Handle, Signature>(at) };
        // SAFETY: the arguments are valid for the call, or meant to be refused by it.
        unsafe { f($($arg),*) }
    }};
}

pub fn ok(result: Result) {
    assert_eq!(result, 0);
}

/// Sets a variable, in a process of its own and before `cuInit`.
#[expect(clippy::disallowed_methods, reason = "the test that calls it has the process to itself")]
pub fn set(variable: &str, value: &str) {
    // SAFETY: no other thread of the process reads or sets variables.
    unsafe { std::env::set_var(variable, value) };
}

pub fn retain(ordinal: c_int) -> Handle {
    let mut context = NULL;
    ok(cuda!(cuInit(0 => c_uint)));
    ok(cuda!(cuDevicePrimaryCtxRetain(&raw mut context => *mut Handle, ordinal => c_int)));
    ok(cuda!(cuCtxSetCurrent(context => Handle)));
    context
}

pub fn alloc(bytes: usize) -> std::result::Result<u64, Result> {
    let mut at = 0u64;
    match cuda!(cuMemAlloc_v2(&raw mut at => *mut u64, bytes => usize)) {
        0 => Ok(at),
        e => Err(e),
    }
}

pub fn free(at: u64) -> Result {
    cuda!(cuMemFree_v2(at => u64))
}

pub fn free_bytes() -> usize {
    let (mut free, mut total) = (0usize, 0usize);
    ok(cuda!(cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize)));
    free
}

/// A kernel that is loaded: the first launch of another waits for the context's work.
pub fn kernel(name: &str) -> Handle {
    let function = unloaded(name);
    ok(cuda!(cuFuncLoad(function => Handle)));
    function
}

pub fn unloaded(name: &str) -> Handle {
    let ptx = c".version 8.0\n.entry spin()\n.entry wave()\n.entry plain()\n.entry until()\n";
    let (mut module, mut function) = (NULL, NULL);
    let name = CString::new(name).unwrap();
    ok(cuda!(cuModuleLoadData(&raw mut module => *mut Handle, ptx.as_ptr() => *const c_char)));
    ok(cuda!(cuModuleGetFunction(&raw mut function => *mut Handle, module => Handle,
             name.as_ptr() => *const c_char)));
    function
}

pub fn launch(function: Handle, blocks: c_uint, stream: Handle, params: *mut Handle) -> Result {
    cuda!(cuLaunchKernel(function => Handle, blocks => c_uint, 1 => c_uint, 1 => c_uint,
          128 => c_uint, 1 => c_uint, 1 => c_uint, 0 => c_uint, stream => Handle,
          params => *mut Handle, std::ptr::null_mut() => *mut Handle))
}

pub fn new_stream() -> Handle {
    let mut s = NULL;
    ok(cuda!(cuStreamCreate(&raw mut s => *mut Handle, 1 => c_uint)));
    s
}

pub fn new_event() -> Handle {
    let mut e = NULL;
    ok(cuda!(cuEventCreate(&raw mut e => *mut Handle, 0 => c_uint)));
    e
}

pub fn record(event: Handle, stream: Handle) {
    ok(cuda!(cuEventRecord(event => Handle, stream => Handle)));
}

pub fn synchronize(stream: Handle) {
    ok(cuda!(cuStreamSynchronize(stream => Handle)));
}

pub fn elapsed_us(from: Handle, to: Handle) -> f32 {
    let mut ms = 0f32;
    ok(cuda!(cuEventElapsedTime(&raw mut ms => *mut f32, from => Handle, to => Handle)));
    ms * 1000.0
}

/// Occupies the GPU while what is measured is submitted, so that it then runs back to back.
pub fn keep_busy(spin: Handle, stream: Handle) {
    let (mut unused, mut ns) = (0u64, 100_000_000u64);
    let mut params = [(&raw mut unused).cast::<c_void>(), (&raw mut ns).cast()];
    ok(launch(spin, 1, stream, params.as_mut_ptr()));
}

pub fn read<const N: usize>(at: u64) -> [u8; N] {
    let mut bytes = [0u8; N];
    ok(cuda!(cuMemcpyDtoH_v2(bytes.as_mut_ptr() => *mut u8, at => u64, N => usize)));
    bytes
}

pub(crate) use {configured, cuda, scenarios};
