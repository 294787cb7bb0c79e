//! Every hooked function with unusual arguments: each pointer and handle NULL in turn, sizes of nothing and of too much,
//! flags and versions that nobody knows. Beside the same calls without the shim: the driver's own result comes back, and
//! no figure is above the quota.
//!
//! Arguments follow from the tables' types, so that a new hook is called too, or fails here until its type is known.

use std::time::{Duration, Instant};
use tessera_cuda::{for_each_hook, for_each_nvml_hook};

use tessera_harness::{
    CProgram, Conversation, GIB, MIB, PATIENCE, Pages, Preloaded, SimGpu, artefacts, compile_c,
};

const LIMIT: u64 = GIB;
/// The driver lacks the function; the call crashes it.
const ABSENT: i64 = -2;
const CRASHES: i64 = -4;
/// What no GPU has.
const TOO_MUCH: &str = "0x100000000000";
const UNKNOWN: &str = "0x7fff0000";

/// A row's class, body, exports and argument list as it is written.
struct Row {
    class: &'static str,
    body: &'static str,
    exports: &'static [&'static str],
    arguments: &'static str,
}

macro_rules! rows {
    ($($class:ident $body:ident $(($($taken:ident),*))? { $($export:ident @ $since:literal $flavour:ident),+ $(,)? } $arguments:tt;)*) => {
        const DRIVER: &[Row] = &[$(Row {
            class: stringify!($class),
            body: stringify!($body),
            exports: &[$(stringify!($export)),+],
            arguments: stringify!($arguments),
        },)*];
    };
}
for_each_hook!(rows);

macro_rules! nvml_rows {
    ($($class:ident $body:ident { $($export:ident),+ $(,)? } $arguments:tt;)*) => {
        const NVML: &[Row] = &[$(Row {
            class: stringify!($class),
            body: stringify!($body),
            exports: &[$(stringify!($export)),+],
            arguments: stringify!($arguments),
        },)*];
    };
}
for_each_nvml_hook!(nvml_rows);

/// One argument: what an ordinary call has, and what unusual ones have.
struct Argument {
    usual: &'static str,
    unusual: Vec<&'static str>,
}

/// An output or an input by address: `usual` is a word of `arguments.c`.
fn place(usual: &'static str) -> Argument {
    Argument { usual, unusual: vec!["0"] }
}

/// An input that a place of zeros does not stand for, which is unusual itself.
fn structure(usual: &'static str) -> Argument {
    Argument { usual, unusual: vec!["0", "@"] }
}

fn number(usual: &'static str, unusual: &[&'static str]) -> Argument {
    Argument { usual, unusual: unusual.to_vec() }
}

/// What an argument called `name`, of type `kind`, is given in a call of `body`.
fn argument(body: &str, name: &str, kind: &str) -> Argument {
    match (kind, name) {
        // Structures that a zeroed place does not stand for.
        ("*const c_char", "symbol") => place("@symbol"),
        ("*const c_char", _) => place("@name"),
        ("*const CUDA_ARRAY_DESCRIPTOR", _) => structure("@array"),
        ("*const CUDA_ARRAY_DESCRIPTOR_v1", _) => structure("@array1"),
        ("*const CUDA_ARRAY3D_DESCRIPTOR", _) => structure("@array3"),
        ("*const CUDA_ARRAY3D_DESCRIPTOR_v1", _) => structure("@array31"),
        ("*const CUmemPoolProps" | "*const CUmemAllocationProp", _) => structure("@allocation"),
        ("*mut CUmemLocation", _) => structure("@location"),
        ("*const CUlaunchConfig", _) => structure("@config"),
        ("*const CUDA_MEMCPY2D", _) => structure("@copy2"),
        ("*const CUDA_MEMCPY3D" | "*const CUDA_MEMCPY3D_PEER", _) => structure("@copy3"),
        ("*mut CUdeviceptr", "dsts" | "srcs") => place("@ptr"),
        ("*mut usize", "sizes") => place("@size"),
        ("*mut nvmlMemory_v2_t", _) => number("@memory2", &["0", "@", "@memory9"]),
        ("*mut nvmlProcessDetailList_v1_t", _) => number("@details", &["0", "@", "@details9"]),
        ("*mut nvmlProcessesUtilizationInfo_v1_t", _) => place("@usage"),
        ("*mut c_uint", "count") => number("@size", &["0", "@"]),
        // The descriptor goes by value in the address.
        ("*mut c_void", "shareable") if body == "cuMemImportFromShareableHandle" => {
            place("$shared")
        }
        ("*mut c_void", "address") => place("$mapped"),
        // NULL there ends a program without the shim, too.
        ("CUhostFn" | "CUstreamCallback" | "CUgraphRecaptureCallback", _) => {
            number("$callback", &[])
        }
        ("CUipcMemHandle", _) => number("@", &[]),
        _ if kind.starts_with('*') => place("@"),
        ("CUdeviceptr", "pointer") if body == "cuMemMap" => place("$range"),
        ("CUdeviceptr", "pointer") if body == "cuMemUnmap" => place("$mapped"),
        ("CUdeviceptr", _) => place("$ptr"),
        ("CUdeviceptr_v1", _) => place("$ptr1"),
        ("CUcontext", "ctx") if matches!(body, "cuCtxDestroy" | "cuCtxDetach") => {
            number("$newcontext", &["0", "$context"])
        }
        ("CUcontext", _) => place("$context"),
        ("CUstream", _) => number("$stream", &["0"]),
        ("CUevent", _) => place("$event"),
        ("CUmodule", _) => place("$module"),
        ("CUfunction", _) => place("$function"),
        ("CUlibrary", _) => place("$library"),
        ("CUkernel", _) => place("$kernel"),
        ("CUgraph", _) => place("$graph"),
        ("CUgraphExec", _) => place("$exec"),
        ("CUgraphNode", _) => place("$node"),
        ("CUarray", _) => place("$array"),
        ("CUmipmappedArray", _) => place("$mipmap"),
        ("CUmemoryPool", _) => place("$pool"),
        ("CUmemGenericAllocationHandle", _) => place("$handle"),
        ("nvmlDevice_t", _) => place("$device"),
        // Without hardware that has them there are none to be made.
        ("CUgreenCtx" | "CUdevResourceDesc", _) => number("0", &[]),
        ("CUdevice", _) => number("0", &["1", "9", "-1"]),
        // What is counted lies in a place with room for one.
        (_, "count" | "num_params" | "attribute_count" | "devices") => number("1", &["0"]),
        ("usize", "bytes") if matches!(body, "cuMemMap" | "cuMemUnmap" | "cuMemCreate") => {
            number("2097152", &["0", TOO_MUCH])
        }
        (_, "bytes" | "width_bytes" | "width") if kind == "usize" => number("64", &["0", TOO_MUCH]),
        (_, "bytes" | "width_bytes" | "width" | "log_bytes") => number("64", &["0"]),
        (_, "height" | "levels" | "pitch" | "element_bytes") => number("4", &["0"]),
        (_, "grid_x" | "grid_y" | "grid_z" | "block_x" | "block_y" | "block_z") => {
            number("1", &["0"])
        }
        (_, "grid_width" | "grid_height") => number("1", &["0"]),
        (_, "cuda_version") => number("12000", &["0", "-1"]),
        ("CUmemAllocationType", _) => number("1", &["0", UNKNOWN]),
        ("CUmemAllocationHandleType" | "CUmemRangeHandleType", _) => number("1", &["0", UNKNOWN]),
        ("CUmemPool_attribute", _) => number("4", &["0", UNKNOWN]),
        ("CUlimit" | "CUstreamCaptureMode", _) => number("0", &[UNKNOWN]),
        ("c_uint", "flags") if body == "cuMemAllocManaged" => number("1", &["0", UNKNOWN]),
        (_, "flags" | "mode") => number("0", &[UNKNOWN]),
        // Of a wait, more would never come.
        (_, "value") if body.starts_with("cuStreamWait") => number("0", &[]),
        (_, "value" | "min_bytes_to_keep") => number("0", &["4096"]),
        (_, "offset" | "object_offset" | "dst_offset" | "src_offset" | "shared_bytes") => {
            number("0", &[UNKNOWN])
        }
        (_, "since_us") => number("0", &[]),
        _ => panic!("{body}: say what to call it with for {name}: {kind}"),
    }
}

/// The lines of `arguments.c` for one export: the usual call, each argument unusual in turn, all that may be nothing.
fn calls(row: &Row, export: &str) -> Vec<String> {
    let list = row.arguments.trim_matches(['(', ')']).replace('\n', " ");
    let parts = list.split(',').map(str::trim).filter(|part| !part.is_empty());
    let arguments: Vec<Argument> = parts
        .map(|part| {
            let (name, kind) = part.split_once(':').expect("an argument and its type");
            let kind = kind.split_whitespace().collect::<Vec<_>>().join(" ").replace("* ", "*");
            argument(row.body, name.trim(), &kind)
        })
        .collect();
    let line = |words: Vec<&str>| [&[export], &words[..]].concat().join(" ");
    let usual: Vec<&str> = arguments.iter().map(|argument| argument.usual).collect();
    let mut lines = vec![line(usual.clone())];
    for (at, argument) in arguments.iter().enumerate() {
        for &word in &argument.unusual {
            let mut words = usual.clone();
            words[at] = word;
            lines.push(line(words));
        }
    }
    let nothing = |argument: &Argument| match argument.unusual.contains(&"0") {
        true => "0",
        false => argument.usual,
    };
    lines.push(line(arguments.iter().map(nothing).collect()));
    lines
}

/// The same program without the shim, and as a tenant: both make the same calls.
struct Pair {
    bare: Conversation,
    held: Conversation,
    pages: Pages,
}

impl Pair {
    fn start(sim: &SimGpu) -> Self {
        let program = compile_c("arguments");
        let limits = [(sim.uuid(0), LIMIT), (sim.uuid(1), LIMIT)];
        let pages = Pages::with_overhead(&limits, 64 * MIB);
        let bare = Conversation::start(Preloaded::bare(&program).sim(sim));
        let held = Conversation::start(Preloaded::new(&program).sim(sim).pages(&pages));
        let mut pair = Self { bare, held, pages };
        // An answer comes once it has its context.
        let _ = pair.held.ask("cuCtxSynchronize");
        pair
    }

    /// What the driver says is in use, less what the tenant is charged, and as much for the other.
    fn beyond_charges(&mut self) -> u64 {
        let used = self.bare.ask("nvmlDeviceGetMemoryInfo $device @").values[2];
        used.wrapping_sub(2 * self.pages.charged(0))
    }

    /// Whether the tenant has been charged with what the same calls have cost the other.
    fn is_balanced(&mut self, before: u64) -> bool {
        let begun = Instant::now();
        while self.beyond_charges() != before {
            if begun.elapsed() > PATIENCE / 20 {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Ends both, and waits until they have: the GPU is the next pair's alone.
    fn end(self) {
        let _ = (self.bare.finish(), self.held.finish());
    }
}

/// Whether a figure is more than the share has. Two ids of no MIG instance, one beside the other, are none.
fn is_too_much(value: &u64) -> bool {
    *value > LIMIT && *value != u64::MAX
}

/// Whether what the call and its objects cost is charged to the byte: not where small allocations share a page, nor
/// where code is loaded, which is observed alone.
fn is_exact(row: &Row, line: &str) -> bool {
    const INEXACT: [&str; 11] = [
        "ptr", "ptr1", "function", "module", "library", "kernel", "array", "mipmap", "copy2",
        "copy3", "exec",
    ];
    let is_inexact = |word: &str| INEXACT.contains(&word.trim_start_matches(['$', '@']));
    let is_small = row.class == "alloc" && row.body != "cuMemCreate";
    !is_small && !line.split(' ').skip(1).any(is_inexact)
}

/// What differs with a reason: a tenant is shown no samples of others.
fn may_differ(line: &str) -> bool {
    line.starts_with("nvmlDeviceGetProcessUtilization")
}

/// Judges `rows`; `is_own`: whose calls change what later calls find.
fn judge(rows: &[Row], is_own: impl Fn(&Row) -> bool) {
    let sim = SimGpu::start_default();
    let (mut faults, mut compared, mut done) = (Vec::new(), 0, 0);
    let mut pair = None;
    for row in rows {
        for export in row.exports {
            for line in calls(row, export) {
                let it = pair.get_or_insert_with(|| Pair::start(&sim));
                let before = it.beyond_charges();
                let (alone, shown) = (it.bare.ask(&line), it.held.ask(&line));
                if alone.result == ABSENT {
                    break;
                }
                compared += 1;
                done += usize::from(alone.result == 0);
                let is_crash = [&alone, &shown].iter().any(|reply| reply.result == CRASHES);
                let mut is_over = is_crash || is_own(row) || it.pages.charged(0) > LIMIT / 2;
                if alone.result == CRASHES {
                } else if alone.result != shown.result && !may_differ(&line) {
                    faults.push(format!("{shown}, and {} without the shim", alone.result));
                    is_over = true;
                } else if row.class == "query" && shown.values.iter().any(is_too_much) {
                    faults.push(format!("{shown}: more than {LIMIT} bytes"));
                } else if is_exact(row, &line) && !it.is_balanced(before) {
                    faults.push(format!("{shown}: charged {}", it.pages.charged(0)));
                    is_over = true;
                }
                // Objects stay; there is to be room for the next.
                if is_over {
                    pair.take().into_iter().for_each(Pair::end);
                }
            }
        }
    }
    assert!(faults.is_empty(), "{} of {compared}:\n{}", faults.len(), faults.join("\n"));
    // Else hardly anything was called as it should be.
    assert!(done > rows.len() / 2, "{done} of {compared} calls of {} functions", rows.len());
}

#[test]
fn unusual_arguments_have_the_drivers_own_answer() {
    judge(DRIVER, |row| matches!(row.class, "context" | "capture"));
}

#[test]
fn unusual_arguments_of_nvml_have_its_own_answer() {
    judge(NVML, |_| false);
}

/// NVML as no simulator has it: GPUs without a name, structures of later versions, questions that fail now and then. What
/// it says of the GPU and of process 4242, a neighbour's, is not shown to a tenant, whatever it asks with.
#[test]
fn whatever_nvml_says_a_tenant_sees_its_share() {
    const NEIGHBOUR: u64 = 4242;
    const OF_GPU: u64 = 8 * GIB;
    const OF_NEIGHBOUR: u64 = 4 * GIB;
    let sim = SimGpu::start_default();
    let stub = tempfile::tempdir().expect("a temporary directory");
    let library = CProgram::new("stub_nvml").shared().build();
    std::os::unix::fs::symlink(library, stub.path().join("libnvidia-ml.so.1")).expect("just made");
    let path = format!("{}:{}", stub.path().display(), artefacts().sim_dir().display());
    let mut faults = Vec::new();
    for mood in ["", "nameless", "versions", "moody"] {
        let start = |program: Preloaded| {
            let program = program.sim(&sim).env("LD_LIBRARY_PATH", &path).env("STUB_NVML", mood);
            Conversation::start(program.env("STUB_UUID", sim.uuid(0)))
        };
        let pages = Pages::create(&[(sim.uuid(0), LIMIT)]);
        let program = compile_c("arguments");
        let mut bare = start(Preloaded::bare(&program));
        let mut held = start(Preloaded::new(&program).pages(&pages));
        let (mut seen, mut answers) = (0, 0);
        // A word of 32 bits may have another beside it.
        let is_foreign = |value: &u64| {
            matches!(*value, OF_GPU | OF_NEIGHBOUR)
                || [*value & 0xffff_ffff, *value >> 32].contains(&NEIGHBOUR)
        };
        for row in NVML {
            for line in row.exports.iter().flat_map(|export| calls(row, export)) {
                // What every second question hides, the next shows.
                for _ in 0..4 {
                    seen += usize::from(bare.ask(&line).values.iter().any(is_foreign));
                    let shown = held.ask(&line);
                    answers += usize::from(shown.result == 0);
                    if shown.values.iter().any(is_foreign) {
                        faults.push(format!("{mood}: {shown}"));
                    }
                }
            }
        }
        assert!(seen > 10 && answers > 10, "{mood}: {seen} without the shim, {answers} answers");
    }
    assert!(faults.is_empty(), "{}:\n{}", faults.len(), faults.join("\n"));
}
