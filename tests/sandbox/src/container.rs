//! A tenant's surroundings as a container runtime would make them from Allocate's answer.
//!
//! Where the kernel lets this user make namespaces, a tenant gets a mount namespace (and a user
//! namespace if not root) in which every mount of the answer is at the place the answer names,
//! read-only where it says so; it then finds shim and pages as it would in a pod. Where not, the
//! host paths of the answer are handed over through `TESSERA_DIR` and `LD_PRELOAD`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::sys::statvfs::{FsFlags, statvfs};
use serde::{Deserialize, Serialize};
use tessera_config::CONTAINER_DRIVER_DIR;
use tessera_fake_kubelet::RunOptions;
use tessera_region::layout::{CONTAINER_PAGES_DIR, CONTAINER_SHIM, PAGES_DIR_ENV};

/// What Allocate answered, as far as a process can have it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Surroundings {
    /// Mounts in the answer's order.
    pub mounts: Vec<Mount>,
    pub envs: BTreeMap<String, String>,
    /// An empty directory for what a mount namespace needs besides; without it there is none.
    pub scratch: PathBuf,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mount {
    pub host: PathBuf,
    pub container: PathBuf,
    /// Whether it is mounted read-only.
    pub read_only: bool,
}

/// How tenants get their surroundings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum Means {
    #[strum(to_string = "a mount namespace each")]
    Namespace,
    #[strum(to_string = "TESSERA_DIR and LD_PRELOAD")]
    Environment,
}

impl Means {
    /// Tries what this user may do, with a command that does nothing.
    pub fn probe(scratch: &Path) -> Self {
        let surroundings = Surroundings { scratch: scratch.to_owned(), ..Default::default() };
        let entered = Self::Namespace
            .command(&surroundings, Path::new("/bin/true"), &[])
            .and_then(|mut command| Ok(command.output()?))
            .is_ok_and(|output| output.status.success());
        if entered { Self::Namespace } else { Self::Environment }
    }

    /// A command that runs `program` in `surroundings`.
    pub fn command(
        self,
        surroundings: &Surroundings,
        program: &Path,
        arguments: &[String],
    ) -> anyhow::Result<Command> {
        let surroundings = match self {
            Self::Namespace => surroundings.clone(),
            Self::Environment => {
                Surroundings { envs: surroundings.environment(), ..Default::default() }
            }
        };
        let mut command = surroundings.command(program)?;
        command.args(arguments);
        // A group of its own: that is how the account knows a tenant's processes.
        command.process_group(0);
        Ok(command)
    }
}

impl Surroundings {
    /// Those of a container that kubelet starts with these options; `scratch` is an empty directory.
    pub fn of(options: RunOptions, scratch: PathBuf) -> Self {
        let mount = |m: tessera_kubelet_api::deviceplugin::Mount| Mount {
            host: m.host_path.into(),
            container: m.container_path.into(),
            read_only: m.read_only,
        };
        let mounts = options.mounts.into_iter().map(mount).collect();
        Self { mounts, envs: options.envs, scratch }
    }

    /// A command that enters these surroundings, becomes `program`, and dies with this process.
    pub fn command(&self, program: &Path) -> anyhow::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["in-sandbox", "enter-container"]).arg(serde_json::to_string(self)?);
        command.arg("--").arg(program);
        Ok(command)
    }

    fn host_of(&self, container: &str) -> Option<&Path> {
        self.mounts.iter().find(|m| m.container == Path::new(container)).map(|m| m.host.as_path())
    }

    /// The host's directory of the container's share.
    pub fn pages(&self) -> Option<&Path> {
        let is_in =
            |mount: &&Mount| mount.container.parent() == Some(Path::new(CONTAINER_PAGES_DIR));
        self.mounts.iter().find(is_in).map(|mount| mount.host.as_path())
    }

    /// The variables of a process that sees host paths: the answer's own, with what its mounts
    /// would have provided.
    fn environment(&self) -> BTreeMap<String, String> {
        let mut envs = self.envs.clone();
        if let Some(pages) = self.pages() {
            envs.insert(PAGES_DIR_ENV.into(), pages.to_string_lossy().into_owned());
        }
        if let Some(shim) = self.host_of(CONTAINER_SHIM) {
            envs.insert("LD_PRELOAD".into(), shim.to_string_lossy().into_owned());
        }
        if let Some(driver) = self.host_of(CONTAINER_DRIVER_DIR) {
            envs.insert("LD_LIBRARY_PATH".into(), driver.to_string_lossy().into_owned());
        }
        envs
    }
}

/// Enters `surroundings` (as JSON) and becomes `command`. Returns only on failure.
pub fn enter(surroundings: &str, command: &[OsString]) -> anyhow::Result<()> {
    let surroundings: Surroundings = serde_json::from_str(surroundings)
        .context("enter-container takes what the sandbox hands it")?;
    let program = command.first().context("no command to enter with")?;
    let parent = nix::unistd::getppid();
    // Whatever ends the sandbox ends its containers.
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    anyhow::ensure!(nix::unistd::getppid() == parent, "the sandbox is gone");
    if !surroundings.scratch.as_os_str().is_empty() {
        build(&surroundings)?;
    }
    let error = Command::new(program).args(&command[1..]).envs(&surroundings.envs).exec();
    Err(error).with_context(|| format!("cannot run {}", Path::new(program).display()))
}

/// The mounts, in a namespace that only this process and its children see.
fn build(surroundings: &Surroundings) -> anyhow::Result<()> {
    separate().context("no mount namespace")?;
    let (scratch, size) = (&surroundings.scratch, Some("size=1m"));
    mount(Some("tmpfs"), scratch, Some("tmpfs"), MsFlags::empty(), size).context("no tmpfs")?;
    let mut overlays = 0;
    for one in &surroundings.mounts {
        place(one, scratch, &mut overlays)
            .with_context(|| format!("cannot mount {}", one.container.display()))?;
    }
    Ok(())
}

/// A mount namespace of our own, whose changes stay in it.
fn separate() -> anyhow::Result<()> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    if uid.is_root() {
        unshare(CloneFlags::CLONE_NEWNS)?;
    } else {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
        fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    }
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    Ok(())
}

fn place(one: &Mount, scratch: &Path, overlays: &mut u32) -> anyhow::Result<()> {
    let is_dir = fs::metadata(&one.host)?.is_dir();
    if !one.container.exists() {
        make_target(&one.container, is_dir, scratch, overlays)?;
    }
    let bind = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(&one.host), &one.container, None::<&str>, bind, None::<&str>)?;
    if one.read_only {
        // A user namespace may not clear what the file system below was mounted with.
        let below = statvfs(&one.container)?.flags();
        let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        for (has, flag) in [
            (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
            (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
            (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        ] {
            if below.contains(has) {
                flags |= flag;
            }
        }
        mount(None::<&str>, &one.container, None::<&str>, flags, None::<&str>)?;
    }
    Ok(())
}

/// Makes an absent mount point without touching the host: in an overlay over the nearest
/// directory that exists.
fn make_target(
    target: &Path,
    is_dir: bool,
    scratch: &Path,
    overlays: &mut u32,
) -> anyhow::Result<()> {
    let base = target
        .ancestors()
        .find(|a| a.is_dir())
        .filter(|a| *a != Path::new("/"))
        .context("its parent directory is the root of the file system")?;
    let parent = target.parent().unwrap_or(base);
    let make = || -> std::io::Result<()> {
        fs::create_dir_all(parent)?;
        if is_dir { fs::create_dir(target) } else { fs::write(target, "") }
    };
    // Within our own scratch or an overlay that is there already, nothing more is needed.
    if is_overlay(base) {
        return Ok(make()?);
    }
    *overlays += 1;
    let (upper, work) =
        (scratch.join(format!("upper{overlays}")), scratch.join(format!("work{overlays}")));
    fs::create_dir(&upper)?;
    fs::create_dir(&work)?;
    let user = if nix::unistd::geteuid().is_root() { "" } else { ",userxattr" };
    let options = format!(
        "lowerdir={},upperdir={},workdir={}{user}",
        base.display(),
        upper.display(),
        work.display()
    );
    mount(Some("overlay"), base, Some("overlay"), MsFlags::empty(), Some(options.as_str()))?;
    Ok(make()?)
}

/// Whether the mount that `path` lies on was made by [`make_target`].
fn is_overlay(path: &Path) -> bool {
    // /proc/self/mountinfo: fields 5 (mount point) and, after " - ", the file system's type
    // (proc_pid_mountinfo(5)); the last matching line is the topmost mount.
    let Ok(info) = fs::read_to_string("/proc/self/mountinfo") else { return false };
    let mut best: Option<(usize, bool)> = None;
    for line in info.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let Some(point) = left.split(' ').nth(4) else { continue };
        let ours = right.starts_with("overlay ") && right.contains("/upper");
        if path.starts_with(point) && best.is_none_or(|(length, _)| point.len() >= length) {
            best = Some((point.len(), ours));
        }
    }
    best.is_some_and(|(_, ours)| ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn surroundings() -> Surroundings {
        let mount = |host: &str, container: &str| Mount {
            host: host.into(),
            container: container.into(),
            read_only: true,
        };
        Surroundings {
            mounts: vec![
                mount("/h/pages/0123", &format!("{CONTAINER_PAGES_DIR}/0123")),
                mount("/h/shim.so", CONTAINER_SHIM),
                mount("/h/driver", CONTAINER_DRIVER_DIR),
            ],
            envs: [("SIMGPU_STATE".to_owned(), "/h/state".to_owned())].into(),
            scratch: PathBuf::new(),
        }
    }

    #[test]
    fn without_namespaces_the_hosts_paths_are_handed_over() {
        let envs = surroundings().environment();
        assert_eq!(envs["TESSERA_DIR"], "/h/pages/0123");
        assert_eq!(envs["LD_PRELOAD"], "/h/shim.so");
        assert_eq!(envs["LD_LIBRARY_PATH"], "/h/driver");
        assert_eq!(envs["SIMGPU_STATE"], "/h/state");
    }
}
