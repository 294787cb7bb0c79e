//! Absence closes: pages that are missing, damaged or foreign let no process use the GPU unlimited.

use crate::{quota, ready};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use tessera_harness::{
    Conversation, MIB, Pages, Preloaded, SimGpu, can_contain, compile_c, external,
};
use tessera_region::layout::{QUOTA_BYTES, USAGE_BYTES};

/// What is wrong with the pages, and how it becomes so.
type Damage = (&'static str, fn(&Pages));

const DAMAGES: &[Damage] = &[
    ("no quota page", |pages| fs::remove_file(pages.quota_file()).unwrap()),
    ("an empty quota page", |pages| truncate(&pages.quota_file(), 0)),
    ("a short quota page", |pages| truncate(&pages.quota_file(), QUOTA_BYTES as u64 - 1)),
    ("garbage for a quota page", |pages| {
        fs::write(pages.quota_file(), [0xa5; QUOTA_BYTES]).unwrap()
    }),
    ("zeros for a quota page", |pages| fs::write(pages.quota_file(), [0; QUOTA_BYTES]).unwrap()),
    ("a quota page of another ABI", |pages| patch(&pages.quota_file(), 8, &[0xff, 0xff, 0, 0])),
    ("no GPU count", |pages| patch(&pages.quota_file(), 12, &[0; 4])),
    ("too many GPUs", |pages| patch(&pages.quota_file(), 12, &[17, 0, 0, 0])),
    ("a directory for a quota page", |pages| {
        fs::remove_file(pages.quota_file()).unwrap();
        fs::create_dir(pages.quota_file()).unwrap();
    }),
    ("a FIFO for a quota page", |pages| {
        fs::remove_file(pages.quota_file()).unwrap();
        fifo(&pages.quota_file());
    }),
    ("a dangling link for a quota page", |pages| {
        fs::remove_file(pages.quota_file()).unwrap();
        symlink("nowhere", pages.quota_file()).unwrap();
    }),
    ("no usage page", |pages| fs::remove_file(pages.usage_file()).unwrap()),
    ("an empty usage page", |pages| truncate(&pages.usage_file(), 0)),
    ("a short usage page", |pages| truncate(&pages.usage_file(), USAGE_BYTES as u64 - 1)),
    ("garbage for a usage page", |pages| {
        fs::write(pages.usage_file(), vec![0xa5; USAGE_BYTES]).unwrap()
    }),
    ("a usage page of another ABI", |pages| patch(&pages.usage_file(), 8, &[0xff, 0xff, 0, 0])),
    ("a FIFO for a usage page", |pages| {
        fs::remove_file(pages.usage_file()).unwrap();
        fifo(&pages.usage_file());
    }),
];

fn truncate(path: &Path, bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

fn patch(path: &Path, at: usize, bytes: &[u8]) {
    let mut page = fs::read(path).unwrap();
    page[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(path, page).unwrap();
}

fn fifo(path: &Path) {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path that lives through the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o666) }, 0);
}

/// The tenant must be refused by `cuInit`, whatever it tries after that, with one line that says why.
fn must_be_closed(what: &str, program: Preloaded) {
    let mut tenant = Conversation::start(program);
    let init = tenant.ask("init");
    assert_ne!(init.result, 0, "{what}");
    for command in
        ["init", "retain 0", "ctx 0", "alloc 1048576", "managed 1048576", "async 1048576"]
    {
        let reply = tenant.ask(command);
        assert_ne!(reply.result, 0, "{what}: {reply}");
    }
    let out = tenant.finish();
    assert!(out.success(), "{what}: the process must live: {out}");
    assert_eq!(out.stderr.lines().count(), 1, "{what}: one clear line, {out}");
    assert!(out.stderr.to_lowercase().contains("tessera"), "{what}: who says so? {out}");
}

#[test]
fn pages_that_are_absent_or_damaged_close_the_gpu() {
    let sim = SimGpu::start_default();
    let program = compile_c("calls");
    for (what, damage) in DAMAGES {
        let pages = Pages::create(&[(sim.uuid(0), 64 * MIB), (sim.uuid(1), 64 * MIB)]);
        damage(&pages);
        must_be_closed(what, Preloaded::new(&program).sim(&sim).pages(&pages));
    }
}

#[test]
fn the_line_names_the_file_and_what_is_wrong_with_it() {
    let (sim, pages) = quota(64 * MIB);
    patch(&pages.quota_file(), 8, &[0xff, 0xff, 0, 0]);
    let mut tenant = Conversation::tenant("calls", &sim, &pages);
    // CUDA_ERROR_SYSTEM_NOT_READY: frameworks print it, and it is not what a missing GPU gives.
    assert_eq!(tenant.ask("init").result, 802);
    let said = tenant.finish().stderr;
    assert!(said.contains(pages.quota_file().to_str().unwrap()), "{said}");
    assert!(said.contains("ABI") && said.contains("65535"), "{said}");
}

#[test]
fn a_named_directory_that_does_not_exist_closes_the_gpu() {
    let sim = SimGpu::start_default();
    let program = Preloaded::new(compile_c("calls")).sim(&sim);
    must_be_closed("no directory", program.env("TESSERA_DIR", "/nonexistent/pages"));
}

#[test]
fn a_session_socket_is_not_needed() {
    let sim = SimGpu::start_default();
    for make in [|_: &Path| (), |path: &Path| fs::write(path, "no socket").unwrap(), fifo] {
        let pages = Pages::create(&[(sim.uuid(0), 64 * MIB)]);
        make(&pages.dir.join(tessera_region::layout::SESSION_SOCKET));
        let mut tenant = Conversation::with_context("calls", &sim, &pages);
        tenant.must("alloc 67108864");
        assert_eq!(tenant.ask("alloc 1").result, 2);
    }
}

#[test]
fn a_grown_usage_page_still_holds() {
    // Its tenant can do that; the plugin restores the size.
    let (sim, pages) = quota(64 * MIB);
    truncate(&pages.usage_file(), 1 << 30);
    let mut tenant = Conversation::with_context("calls", &sim, &pages);
    assert_eq!(tenant.ask("alloc 67108865").result, 2);
    tenant.must("alloc 67108864");
}

#[test]
fn in_a_container_the_mounted_pages_count_and_the_environment_does_not() {
    if external::or_skip(can_contain(), "pages at their place in a container").is_none() {
        return;
    }
    let sim = SimGpu::start_default();
    let container = tempfile::tempdir().unwrap();
    let mounted = Pages::share(container.path(), "0123456789abcdef", &[(sim.uuid(0), 64 * MIB)]);
    let generous = Pages::create(&[(sim.uuid(0), 4096 * MIB)]);
    for other in [None, Some(&*generous.dir), Some(Path::new("/nonexistent"))] {
        let mut program =
            Preloaded::new(compile_c("calls")).sim(&sim).in_container(container.path());
        if let Some(other) = other {
            program = program.env("TESSERA_DIR", other);
        }
        let mut tenant = ready(program);
        assert_eq!(tenant.must("total 0"), 64 * MIB);
        assert_eq!(tenant.ask("alloc 67108865").result, 2);
        tenant.must("alloc 67108864");
        assert_eq!(mounted.charged(0), 64 * MIB);
    }
}
