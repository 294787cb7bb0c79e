//! The shim is a guest: what it must leave alone in the process that it is preloaded into.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command};

use tessera_harness::{
    CProgram, MIB, Pages, Preloaded, Running, SimGpu, artefacts, can_contain, compile_c, external,
};

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
fn python_runs_unharmed() {
    let python = external::or_skip(external::python_of("clients"), "Python under the shim");
    let Some(python) = python else { return };
    let (sim, pages) = quota(64 * MIB);
    // Threads, a subprocess, ctypes look-ups of libc and of nothing.
    let code = "import ctypes, subprocess, threading\n\
                c = ctypes.CDLL(None)\n\
                assert c.getpid() > 0\n\
                assert not hasattr(c, 'cuInit'), 'a driver where none is loaded'\n\
                t = [threading.Thread(target=lambda: None) for _ in range(50)]\n\
                [x.start() for x in t]; [x.join() for x in t]\n\
                print(subprocess.check_output(['echo', 'child']).decode().strip())";
    let out = Preloaded::new(python).sim(&sim).pages(&pages).arg("-c").arg(code).run();
    assert!(out.success(), "{out}");
    assert_eq!((out.stdout.as_str(), out.stderr.as_str()), ("child\n", ""));
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

// A new shim is installed while containers run that have the old one.

/// A host directory that `tessera prepare-host` installs shims into.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| dir.path().join(name).display().to_string();
        let config = format!("[paths]\nshim = \"{}\"\npages = \"{}\"\n", at("shim"), at("pages"));
        std::fs::write(dir.path().join("config.toml"), config).expect("a writable directory");
        Self { dir }
    }

    /// Installs a shim as the deployment's init container does, and says where.
    fn install(&self, shim: &Path) -> PathBuf {
        // In a mount namespace of its own, because it mounts the pages' tmpfs too.
        let mut command = Command::new("unshare");
        // SAFETY: geteuid has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            command.args(["--user", "--map-root-user"]);
        }
        command.arg("--mount").arg(artefacts().tessera());
        command.arg("--config").arg(self.dir.path().join("config.toml")).arg("prepare-host");
        let out = command.arg("--shim").arg(shim).output().expect("unshare is part of util-linux");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let said = String::from_utf8_lossy(&out.stdout);
        let line = said.lines().find_map(|line| line.strip_suffix(": installed"));
        PathBuf::from(line.unwrap_or_else(|| panic!("prepare-host said {said}")))
    }
}

/// The shim of another version: another content, the same behaviour.
fn next_version(dir: &Path) -> PathBuf {
    let path = dir.join("next.so");
    let mut library = std::fs::read(artefacts().shim()).expect("a readable artefact");
    // Behind the last section, where no loader looks.
    library.extend_from_slice(b"the next version");
    std::fs::write(&path, library).expect("a writable directory");
    path
}

/// A shell in a container, to start programs there as `kubectl exec` does.
struct Shell {
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    _running: Running,
}

impl Shell {
    fn start(preloaded: Preloaded) -> Self {
        let mut running = preloaded.spawn();
        let stdin = running.take_stdin().expect("piped");
        let stdout = BufReader::new(running.take_stdout().expect("piped"));
        Self { stdin, stdout, _running: running }
    }

    /// The one line that a command prints.
    fn ask(&mut self, command: &str) -> String {
        writeln!(self.stdin, "{command}").expect("the shell reads");
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("the shell answers");
        line.trim_end().to_owned()
    }

    /// Device and inode of the shim that a new program of this container has mapped.
    fn mapped(&mut self) -> String {
        self.ask("awk '/libtessera.so/ { print $4, $5; exit }' /proc/self/maps")
    }
}

#[test]
fn running_containers_keep_the_old_shim_and_new_ones_get_the_new() {
    if external::or_skip(can_contain(), "an upgrade under running containers").is_none() {
        return;
    }
    let (sim, host) = (SimGpu::start_default(), Host::new());
    let pages = Pages::create(&[(sim.uuid(0), 64 * MIB)]);
    let contained = |program: &Path, shim: &Path| {
        Preloaded::new(program).sim(&sim).shim(shim).in_container(&pages.dir)
    };
    let (shell, calls) = (Path::new("/bin/sh"), compile_c("calls"));

    let old = host.install(&artefacts().shim());
    let mut running = ready(contained(&calls, &old));
    let held = running.must("alloc 33554432");
    let mut exec = Shell::start(contained(shell, &old));
    let before = exec.mapped();
    assert!(!before.is_empty(), "the container's programs have the shim");

    let new = host.install(&next_version(host.dir.path()));
    assert_ne!(old, new);
    // The process goes on, and so does its fork.
    assert_eq!(running.ask("alloc 33554433").result, 2);
    assert_eq!(running.ask("forked dlsym").result, -1, "an unknown command, from a living child");
    // A program that starts in the old container still gets what the container mounted.
    assert_eq!(exec.mapped(), before);
    // A container that starts now gets the new one, beside the old ones.
    let mut fresh = Shell::start(contained(shell, &new));
    let after = fresh.mapped();
    assert!(!after.is_empty() && after != before, "{after}");
    let mut next = ready(contained(&calls, &new));
    assert_eq!(next.ask("alloc 33554433").result, 2, "one account for both versions");
    running.must(&format!("free {held}"));
    next.must("alloc 67108864");

    // Even with the file gone from the host, programs start in the old container, with their quota.
    std::fs::remove_dir_all(old.parent().expect("a directory of its own")).expect("removable");
    assert_eq!(exec.mapped(), before);
}
