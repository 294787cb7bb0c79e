//! The shim is a guest: what it must leave alone in the process that it is preloaded into.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tessera_harness::{CProgram, MIB, Preloaded, SimGpu, compile_c};

use crate::{held, quota, ready};

/// Names, sizes, times and contents of a directory's files.
fn contents(dir: &Path) -> Vec<(String, i64, i64, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .expect("a readable directory")
        .map(|entry| {
            let entry = entry.expect("readable");
            let name = entry.file_name().to_string_lossy().into_owned();
            let meta = entry.metadata().expect("readable");
            let bytes = std::fs::read(entry.path()).unwrap_or_default();
            (name, meta.mtime(), meta.mtime_nsec(), bytes)
        })
        .collect();
    files.sort();
    files
}

#[test]
fn a_process_that_never_uses_cuda_notices_nothing() {
    let (sim, pages) = quota(64 * MIB);
    let here = tempfile::tempdir().expect("a temporary directory");
    let before = contents(&pages.dir);
    for (program, args) in [
        ("/bin/true", &[][..]),
        ("/bin/echo", &["hello"][..]),
        ("/bin/sh", &["-c", "echo a | cat; exit 7"][..]),
    ] {
        let with_args = |preloaded: Preloaded| {
            preloaded.args(args).current_dir(here.path()).env("TMPDIR", here.path()).run()
        };
        let bare = with_args(Preloaded::bare(program).sim(&sim));
        let shim = with_args(Preloaded::new(program).sim(&sim).pages(&pages));
        assert_eq!(shim.status, bare.status, "{program}");
        assert_eq!((&shim.stdout, &shim.stderr), (&bare.stdout, &bare.stderr), "{program}");
    }
    assert_eq!(contents(&pages.dir), before, "the pages were touched");
    assert_eq!(contents(here.path()), [], "a file was made");
    assert!(!sim.state().exists(), "the driver was touched");
}

#[test]
fn a_process_that_uses_cuda_keeps_its_settings() {
    let (sim, pages) = quota(64 * MIB);
    let program = compile_c("guest_state");
    for args in [&[][..], &["cuda"][..]] {
        let bare = Preloaded::bare(&program).sim(&sim).args(args).run();
        let shim = Preloaded::new(&program).sim(&sim).pages(&pages).args(args).run();
        assert!(bare.success(), "{bare}");
        assert!(shim.success(), "{shim}");
        assert_eq!(shim.stdout, bare.stdout);
        assert_eq!(shim.stderr, "");
    }
}

#[test]
fn a_refused_tenant_can_learn_why() {
    let (sim, _pages, mut tenant) = held("calls", 64 * MIB);
    for _ in 0..1000 {
        assert_eq!(tenant.ask("alloc 67108865").result, 2);
    }
    let out = tenant.finish();
    // A loop of refusals must not become a flood.
    let lines = out.stderr.lines().count();
    assert!((1..=10).contains(&lines), "{lines} lines: {out}");
    assert!(out.stderr.lines().all(|line| line.to_lowercase().contains("tessera")), "{out}");
    assert!(out.stderr.contains(sim.uuid(0)), "which GPU? {out}");
}

#[test]
fn the_driver_may_be_loaded_late_and_again() {
    let (sim, pages) = quota(64 * MIB);
    let out = Preloaded::new(compile_c("reopen")).sim(&sim).pages(&pages).run();
    assert!(out.success(), "{out}");
    assert_eq!(out.stdout, "first 0\nbeyond 2\nsecond 0\nbeyond 2\n");
}

#[test]
fn without_pages_everything_passes_through() {
    let sim = SimGpu::start_default();
    let ask = |program: Preloaded| {
        let mut tenant = ready(program.sim(&sim));
        let large = tenant.must("alloc 4294967296");
        let info = tenant.ask("info").values;
        let answers = (info, tenant.ask("total 0").values, tenant.ask("nvml 0").values);
        tenant.must(&format!("free {large}"));
        let out = tenant.finish();
        assert_eq!(out.stderr, "");
        answers
    };
    let program = compile_c("calls");
    assert_eq!(ask(Preloaded::new(&program)), ask(Preloaded::bare(&program)));
}

#[test]
fn a_machine_without_a_driver_is_as_without_the_shim() {
    let empty = tempfile::tempdir().expect("a temporary directory");
    let run = |program: Preloaded| program.env("LD_LIBRARY_PATH", empty.path()).run();
    let program = CProgram::new("calls").build();
    let (bare, shim) = (run(Preloaded::bare(&program)), run(Preloaded::new(&program)));
    assert_eq!(shim.status, bare.status);
    assert_eq!((shim.stdout, shim.stderr), (bare.stdout, bare.stderr));
}
