//! The file `libtessera.so` that is shipped: it loads wherever glibc 2.17 or newer is, and brings
//! nothing into a process but the hooks. A dynamic linker that can't satisfy it would leave it out
//! and run the program without a quota, so these are properties of the quota.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use tessera_cuda::hooks::HOOKS;
use tessera_cuda::nvml::NVML_HOOKS;
use tessera_harness::foreign::ForeignLibc;
use tessera_harness::{CProgram, MIB, Output, Pages, Preloaded, artefacts, external};
use tessera_region::abi;

/// What a binutils program prints about the shim.
fn about_the_shim(program: &str, flags: &[&str]) -> String {
    let out = Command::new(program).args(flags).arg(artefacts().shim()).output();
    let out = out.expect("binutils are part of every C compiler");
    assert!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// The glibc version in `GLIBC_2.17`, as numbers that compare.
fn glibc_version(symbol_version: &str) -> Option<Vec<u32>> {
    symbol_version.strip_prefix("GLIBC_")?.split('.').map(|part| part.parse().ok()).collect()
}

/// Whether the shim is linked for this machine alone; on CI it may not be.
fn is_local() -> bool {
    let local = artefacts().dir.join("libtessera.so.local").exists();
    if local {
        let reason = "shim/release had no zig, so the shim is linked for this machine alone";
        external::skip("the check of glibc versions", reason);
    }
    local
}

#[test]
fn the_shim_exports_the_hooks_and_dlsym_and_nothing_else() {
    // A further export would take the place of a function of that name in every process.
    let listing = about_the_shim("nm", &["-D", "--defined-only"]);
    let exported: BTreeSet<&str> =
        listing.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    let mut expected: BTreeSet<&str> = HOOKS.iter().map(|hook| hook.export).collect();
    expected.extend(NVML_HOOKS);
    expected.insert("dlsym");
    assert_eq!(exported, expected);
}

/// An optimiser that takes one for null for good drops it, and its hook passes everything through.
#[test]
fn the_shim_keeps_a_place_for_every_function_of_the_driver_that_it_calls() {
    let hooked = about_the_shim("nm", &["-D", "--defined-only"]).lines().count() - 1; // dlsym
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shim/core/src/real.rs");
    let source =
        std::fs::read_to_string(source).expect("the list of what the shim asks for itself");
    let (_, lists) = source.split_once("\nasked! {").expect("at the end");
    let is_row = |line: &&str| line.starts_with("    cu") || line.starts_with("    nvml");
    let asked = lists.lines().filter(is_row).count();
    let sections = about_the_shim("readelf", &["-SW"]);
    let section = sections.lines().find(|line| line.contains(" tessera_symbols "));
    let fields = section.expect("the section").split_whitespace().skip_while(|f| *f != "PROGBITS");
    let size = fields.clone().nth(3).expect("its size");
    let size = usize::from_str_radix(size, 16).expect("in hexadecimal");
    assert_eq!(size, (hooked + asked) * 24, "{hooked} hooked, {asked} asked, 24 bytes each");
}

#[test]
fn the_shim_needs_the_c_library_and_nothing_else() {
    // Not libgcc_s: slim images lack it. Not ld-linux: musl doesn't know it. Not libdl: one more file
    // to open in every process.
    let dynamic = about_the_shim("readelf", &["-dW"]);
    let needed: Vec<&str> = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split(['[', ']']).nth(1))
        .collect();
    assert_eq!(needed, ["libc.so.6"], "{dynamic}");
}

#[test]
fn the_shim_asks_for_no_symbol_that_glibc_2_17_lacks() {
    if is_local() {
        return;
    }
    let listing = about_the_shim("readelf", &["-VW"]);
    let names = listing.split_whitespace().filter(|word| word.starts_with("GLIBC_"));
    let names: BTreeSet<&str> = names.collect();
    assert!(names.contains("GLIBC_2.2.5") || names.contains("GLIBC_2.17"), "{listing}");
    for name in names {
        let version = glibc_version(name);
        assert!(version.is_some_and(|version| version <= vec![2, 17]), "{name} is needed");
    }
}

/// The plugin reads it there, to make pages that the shim can read.
#[test]
fn the_shim_and_the_plugin_tell_which_pages_they_speak_once() {
    for program in [artefacts().shim(), artefacts().dir.join("tessera")] {
        let bytes = std::fs::read(&program).unwrap();
        assert_eq!(abi::of_program(&bytes), abi::version(), "{}", program.display());
        let marks = bytes.windows(16).filter(|found| found == b"tessera page abi").count();
        assert_eq!(marks, 1, "{}", program.display());
    }
}

#[test]
fn the_shim_is_small() {
    // It is mapped into every process of the container.
    let bytes = std::fs::metadata(artefacts().shim()).expect("just found").len();
    assert!(bytes <= 500 << 10, "{bytes} bytes");
}

#[test]
fn the_shim_is_built_without_std() {
    // Which would bring its printer of backtraces (150 KiB), constructors, thread-locals that the
    // dynamic linker has to find, and locks that a fork may leave taken.
    let bytes = std::fs::read(artefacts().shim()).expect("just found");
    let mention = |text: &str| bytes.windows(text.len()).any(|found| found == text.as_bytes());
    assert!(mention("/library/core/"), "what a panic would name");
    assert!(!mention("RUST_BACKTRACE") && !mention("/library/std/"));
}

#[test]
fn the_shim_can_be_mapped_without_writing_to_code_or_an_executable_stack() {
    // SELinux and hardened kernels refuse either, and with it the shim.
    assert!(!about_the_shim("readelf", &["-dW"]).contains("TEXTREL"));
    let segments = about_the_shim("readelf", &["-lW"]);
    let stack = segments.lines().find(|line| line.contains("GNU_STACK")).expect("declared");
    assert!(stack.contains(" RW "), "{stack}");
    assert!(!segments.contains("RWE"), "{segments}");
}

#[test]
fn the_shims_tables_are_read_only_once_it_is_loaded() {
    // Nobody who overwrites memory finds the driver's entry points to bend, and no call is bound late,
    // in the middle of a launch.
    assert!(about_the_shim("readelf", &["-lW"]).contains("GNU_RELRO"));
    assert!(about_the_shim("readelf", &["-dW"]).contains("BIND_NOW"));
}

#[test]
fn the_shim_finds_all_that_it_needs_in_glibc_2_17() {
    // The linker leaves what no library has without a version, and would let it pass.
    if is_local() {
        return;
    }
    let listing = about_the_shim("nm", &["-D", "--undefined-only"]);
    let may_be_missing: BTreeSet<&str> = [
        "dlclose",
        "dlopen",
        "dlvsym",
        "gettid",
        // libpthread's before glibc 2.34.
        "pthread_attr_init",
        "pthread_attr_setstacksize",
        "pthread_create",
        "statx",
    ]
    .into();
    for line in listing.lines() {
        let (kind, name) = line.trim().split_once(' ').expect("a kind and a name");
        let found = name.contains("@GLIBC_");
        assert!(found || (kind == "w" && may_be_missing.contains(name)), "{line}");
    }
    // musl has none.
    assert!(!listing.lines().any(|line| line.contains("U dlvsym")), "it ends programs on musl");
}

#[test]
fn versions_of_the_shim_can_be_distinguished_in_a_process() {
    // What debuggers and profilers go by; a node may have several mapped after an upgrade.
    assert!(about_the_shim("readelf", &["-nW"]).contains("Build ID"));
}

#[test]
fn the_shim_takes_little_of_what_a_process_has_little_of() {
    // Static TLS: glibc keeps about 1.6 KiB for all libraries that are loaded late.
    let segments = about_the_shim("readelf", &["-lW"]);
    let tls = segments.lines().find(|line| line.trim_start().starts_with("TLS")).expect("one");
    let bytes = tls.split_whitespace().nth(5).and_then(|size| size.strip_prefix("0x"));
    let bytes = bytes.and_then(|size| u64::from_str_radix(size, 16).ok()).expect("a size");
    assert!(bytes <= 256, "{bytes} bytes of thread-local storage");
    // And no place to look for libraries but the image's own.
    let dynamic = about_the_shim("readelf", &["-dW"]);
    assert!(!dynamic.contains("RPATH") && !dynamic.contains("RUNPATH"), "{dynamic}");
    // Nothing of it runs before main, or at the end.
    assert!(!dynamic.contains("(INIT") && !dynamic.contains("(FINI"), "{dynamic}");
}

// The shim under C libraries that are not this machine's: musl, where it must load and be out of
// the way, and glibc from before 2.34, where libdl is a library that a program may not have.

/// What the stub driver calls its GPU.
const STUB_GPU: &str = "GPU-57ab0000-0000-4000-8000-000000000000";

/// Runs with and without the shim; what the program sees must be the same.
fn unnoticed(program: &Path, args: &[&str]) -> Output {
    let bare = Preloaded::bare(program).args(args).run();
    assert!(bare.success(), "{bare}");
    let shim = Preloaded::new(program).args(args).run();
    assert_eq!((shim.status, &shim.stdout), (bare.status, &bare.stdout), "{shim}");
    assert_eq!(shim.stderr, "");
    shim
}

/// Programs of this C library run as if there were no shim, and a driver answers for itself.
fn is_out_of_the_way(libc: &ForeignLibc) {
    // Neither libdl nor libpthread, which old glibc has apart.
    let plain = libc.compile(CProgram::new("plain").flag("-Wl,--as-needed"));
    assert_eq!(unnoticed(&plain, &[]).stdout, "hello\n");

    let program = libc.compile(CProgram::new("elsewhere"));
    unnoticed(&program, &["true"]);
    let out = unnoticed(&program, &[]);
    assert_eq!((out.value("child"), out.value("again")), ("3", "0"), "{out}");
    assert_eq!(out.value("exit"), "handler 0", "{out}");

    let driver = stub_driver(libc);
    let run =
        |preloaded: Preloaded| preloaded.env("LD_LIBRARY_PATH", driver.path()).arg("cuda").run();
    let (bare, shim) = (run(Preloaded::bare(&program)), run(Preloaded::new(&program)));
    assert!(bare.success() && shim.success(), "{bare}{shim}");
    assert_eq!((bare.number("beyond"), bare.value("free")), (0, "908 total 1024"), "{bare}");
    assert_eq!(shim.stdout, bare.stdout);
}

/// And a tenant is held to its quota.
fn holds_the_quota(libc: &ForeignLibc) {
    let pages = Pages::create(&[(STUB_GPU, 64 * MIB)]);
    let driver = stub_driver(libc);
    let out = Preloaded::new(libc.compile(CProgram::new("elsewhere")))
        .pages(&pages)
        .env("LD_LIBRARY_PATH", driver.path())
        .arg("cuda")
        .run();
    assert!(out.success(), "{out}");
    let results = ["init", "retain", "fits", "beyond", "info", "freed"].map(|key| out.number(key));
    assert_eq!(results, [0, 0, 0, 2, 0, 0], "{out}");
    assert_eq!(out.value("free"), "48 total 64", "{out}");
    assert_eq!(pages.charged(0), 0);
}

fn stub_driver(libc: &ForeignLibc) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let library = libc.compile(CProgram::new("stub_driver").shared());
    symlink(library, dir.path().join("libcuda.so.1")).expect("a fresh directory");
    dir
}

#[test]
fn musl_programs_do_not_notice_the_shim() {
    // 1.2.3 and 1.2.5: in between, the names that glibc gives to large files became aliases.
    for thing in ["musl", "musl-next"] {
        let Some(musl) = external::or_skip(ForeignLibc::musl(thing), "the shim under musl") else {
            return;
        };
        is_out_of_the_way(&musl);
    }
}

#[test]
fn under_an_old_glibc_programs_do_not_notice_the_shim_and_the_quota_holds() {
    // 2.31: `dlopen` is libdl's.
    let Some(glibc) = external::or_skip(ForeignLibc::old_glibc(), "the shim under an old glibc")
    else {
        return;
    };
    is_out_of_the_way(&glibc);
    holds_the_quota(&glibc);
}

#[test]
fn a_program_that_gets_libdl_late_finds_its_dlsym() {
    let Some(glibc) = external::or_skip(ForeignLibc::old_glibc(), "libdl loaded late") else {
        return;
    };
    let program = glibc.compile(CProgram::new("late_libdl").flag("-Wl,--as-needed"));
    let plugin = glibc.compile(CProgram::new("plugin").shared());
    let out = unnoticed(&program, &[plugin.to_str().expect("a path that we made")]);
    assert_eq!(out.number("found"), 1, "{out}");
}
