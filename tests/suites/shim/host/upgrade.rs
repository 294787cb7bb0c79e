//! A new shim is installed while containers run that have the old one.

use crate::ready;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command};

use tessera_harness::{
    MIB, Pages, Preloaded, Running, SimGpu, artefacts, can_contain, compile_c, external,
};

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
    if let Err(reason) = can_contain() {
        return external::skip("an upgrade under running containers", &reason);
    }
    let (sim, host) = (SimGpu::start_default(), Host::new());
    let pages = Pages::create(&[(sim.uuid(0), 64 * MIB)]);
    let contained = |program: &Path, shim: &Path| {
        Preloaded::new(program).sim(&sim).shim(shim).in_container(pages.dir())
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
