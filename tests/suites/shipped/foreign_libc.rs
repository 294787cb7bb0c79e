//! The shim under C libraries that are not this machine's: musl, where it must load and be out of
//! the way, and glibc from before 2.34, where libdl is a library that a program may not have.

use std::os::unix::fs::symlink;
use std::path::Path;

use tessera_harness::foreign::ForeignLibc;
use tessera_harness::{CProgram, MIB, Output, Pages, Preloaded, external};

/// What the stub driver calls its GPU.
const STUB_GPU: &str = "GPU-57ab0000-0000-4000-8000-000000000000";

/// A suite's C library, or none with a word about it.
fn available(libc: Result<ForeignLibc, String>, test: &str) -> Option<ForeignLibc> {
    libc.map_err(|reason| external::skip(test, &reason)).ok()
}

/// Runs with and without the shim; what the program sees must be the same.
fn unnoticed(program: &Path, args: &[&str]) -> Output {
    let run = |preloaded: Preloaded| args.iter().fold(preloaded, |p, arg| p.arg(arg)).run();
    let bare = run(Preloaded::bare(program));
    assert!(bare.success(), "{bare}");
    let shim = run(Preloaded::new(program));
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
        let Some(musl) = available(ForeignLibc::musl(thing), "the shim under musl") else { return };
        is_out_of_the_way(&musl);
    }
}

#[test]
fn even_under_musl_a_driver_would_be_held_to_the_quota() {
    // There is no CUDA for musl. But what gives a program glibc's functions there may bring one.
    let Some(musl) = available(ForeignLibc::musl("musl"), "the quota under musl") else {
        return;
    };
    holds_the_quota(&musl);
}

#[test]
fn under_an_old_glibc_programs_do_not_notice_the_shim_and_the_quota_holds() {
    // 2.31: `dlopen` is libdl's.
    let Some(glibc) = available(ForeignLibc::old_glibc(), "the shim under an old glibc") else {
        return;
    };
    is_out_of_the_way(&glibc);
    holds_the_quota(&glibc);
}

#[test]
fn a_program_that_gets_libdl_late_finds_its_dlsym() {
    let Some(glibc) = available(ForeignLibc::old_glibc(), "libdl loaded late") else {
        return;
    };
    let program = glibc.compile(CProgram::new("late_libdl").flag("-Wl,--as-needed"));
    let plugin = glibc.compile(CProgram::new("plugin").shared());
    let out = unnoticed(&program, &[plugin.to_str().expect("a path that we made")]);
    assert_eq!(out.number("found"), 1, "{out}");
}
