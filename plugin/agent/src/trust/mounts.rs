//! Whether a container still has the plugin's mounts, by `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).
//! Pure, and the only look into a container that needs no capability: nothing below `/proc/<pid>/root` is
//! opened, so there are no links, pipes or file systems of a tenant's to fall into.
//!
//! A mount names its file system (field 3) and where in it its root lies (field 4). The plugin knows both
//! for its own pages and shims from its own mounts. So another file, an empty one or a volume
//! mounted over ours, before the start or later, and a mount taken away show in what the path leads to:
//! ours, and read-only, or not. The content need not be read: it is the host's file, which the plugin
//! keeps whole.

use tessera_region::layout::{
    CONTAINER_PAGES_DIR, CONTAINER_SHIM, GATE_SOCKET, QUOTA_FILE, SESSION_SOCKET, USAGE_FILE,
};

use tessera_model::allocation_id::AllocationId;
use tessera_tenant::shim_install::{PRELOAD, SHIM};

/// Where a dynamic linker looks for what to preload.
pub const CONTAINER_PRELOAD: &str = "/etc/ld.so.preload";

/// Something that a container was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The directory of quota page, usage page and sockets.
    Pages,
    /// The quota page in it.
    Quota,
    /// The usage page over it.
    Usage,
    /// The session socket in it.
    Session,
    /// The gate socket in it.
    Gate,
    /// The library.
    Shim,
    /// The line that preloads it.
    Preload,
}

impl Part {
    const ALL: [Part; 7] = [
        Part::Pages,
        Part::Quota,
        Part::Usage,
        Part::Session,
        Part::Gate,
        Part::Shim,
        Part::Preload,
    ];

    /// Where it belongs.
    #[must_use]
    pub fn path(self) -> String {
        let in_pages = |file: &str| format!("{CONTAINER_PAGES_DIR}/{file}");
        match self {
            Part::Pages => CONTAINER_PAGES_DIR.to_owned(),
            Part::Quota => in_pages(QUOTA_FILE),
            Part::Usage => in_pages(USAGE_FILE),
            Part::Session => in_pages(SESSION_SOCKET),
            Part::Gate => in_pages(GATE_SOCKET),
            Part::Shim => CONTAINER_SHIM.to_owned(),
            Part::Preload => CONTAINER_PRELOAD.to_owned(),
        }
    }
}

/// What became of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Something else is mounted over it, or over a directory above.
    Shadowed,
    /// It is not mounted there at all.
    Missing,
    /// It is mounted writable, so that its content may be anything by now.
    Writable,
    /// What is mounted there bears the name of ours and is on another file system.
    Foreign,
}

/// What is amiss, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damage {
    /// The part.
    pub part: Part,
    /// What became of it.
    pub fault: Fault,
}

impl Damage {
    /// Whether it can have come about without the container's doing: then it explains what is found, and
    /// is no finding. A container keeps what it was given when `container.inject` changes.
    #[must_use]
    pub fn may_be_innocent(self) -> bool {
        self.part == Part::Preload && self.fault == Fault::Missing
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.part.path();
        match self.fault {
            Fault::Shadowed => write!(f, "something else is mounted over {path}"),
            Fault::Missing => write!(f, "nothing is mounted at {path}"),
            Fault::Writable => write!(f, "{path} was made writable"),
            Fault::Foreign => write!(
                f,
                "{path} is of another file system than the plugin's: made by somebody else, or the \
                 pages' file system was replaced while the container ran"
            ),
        }
    }
}

/// A directory on the host, as every mount namespace names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    device: String,
    root: String,
}

impl Source {
    /// Where a directory of ours lies, by our own mounts.
    #[must_use]
    pub fn of(own: &Mounts<'_>, directory: &str) -> Option<Self> {
        let mount = own.leads_to(directory)?;
        let below = directory.strip_prefix(mount.point.trim_end_matches('/'))?;
        let root = format!("{}{below}", mount.root.trim_end_matches('/'));
        Some(Source { device: mount.device.to_owned(), root })
    }

    /// What of it a mount shows, if its root lies in it.
    fn below<'m>(&self, mount: &Mount<'m>) -> Option<&'m str> {
        let rest = mount.root.strip_prefix(self.root.as_str())?;
        (mount.device == self.device).then(|| rest.strip_prefix('/')).flatten()
    }
}

/// Where pages and shims of this node lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// `paths.pages`.
    pub pages: Source,
    /// `paths.shim`.
    pub shim: Source,
}

/// One mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mount<'a> {
    id: u64,
    parent: u64,
    device: &'a str,
    root: &'a str,
    point: &'a str,
    read_only: bool,
}

/// The mounts of one process.
#[derive(Clone, Debug, Default)]
pub struct Mounts<'a> {
    list: Vec<Mount<'a>>,
}

impl<'a> Mounts<'a> {
    /// Reads them; lines that are none are left out.
    #[must_use]
    pub fn parse(text: &'a str) -> Self {
        Mounts { list: text.lines().filter_map(line).collect() }
    }

    /// The allocation whose directory is mounted at the pages' place, whatever lies over it or under it: a
    /// runtime may mount a pod's volume of the same place before ours or after. With `pages`, where
    /// the plugin's own lie, only what is of there counts: a volume can have a directory of any name. `None`
    /// also if there are several, which only a pod with the host's directories can have.
    #[must_use]
    pub fn allocation(&self, pages: Option<&Source>) -> Option<AllocationId> {
        let at = self.list.iter().filter(|mount| mount.point == CONTAINER_PAGES_DIR);
        let mut ids = at.filter_map(|mount| {
            AllocationId::parse(match pages {
                Some(pages) => pages.below(mount)?,
                None => last(mount.root),
            })
        });
        let first = ids.next()?;
        (pages.is_none() || ids.all(|id| id == first)).then_some(first)
    }

    /// The pod's UID and the container's name, by what kubelet mounts into every container: the file for
    /// its termination message, `<kubelet>/pods/<uid>/containers/<name>/<8 digits>` (`makeMounts` in
    /// `pkg/kubelet/kuberuntime`). Whoever may mount may forge it.
    #[must_use]
    pub fn container(&self) -> Option<(&'a str, &'a str)> {
        self.list.iter().find_map(|mount| {
            let (_, rest) = mount.root.rsplit_once("/pods/")?;
            let mut parts = rest.split('/');
            let (uid, kind, name) = (parts.next()?, parts.next()?, parts.next()?);
            let is_message = parts.next().is_some_and(is_digits8) && parts.next().is_none();
            (kind == "containers" && is_message).then_some((uid, name))
        })
    }

    /// What is amiss for a container of `allocation`; nothing if all is as it was given. `preload`:
    /// whether containers are given the preload file.
    #[must_use]
    pub fn damages(
        &self,
        allocation: &AllocationId,
        preload: bool,
        sources: &Sources,
    ) -> Vec<Damage> {
        let id = allocation.as_str();
        let given = Part::ALL.into_iter().filter(|part| preload || *part != Part::Preload);
        given
            .filter_map(|part| self.fault(part, id, sources).map(|fault| Damage { part, fault }))
            .collect()
    }

    fn fault(&self, part: Part, id: &str, sources: &Sources) -> Option<Fault> {
        let path = part.path();
        if matches!(part, Part::Quota | Part::Session | Part::Gate) {
            // Not mounts of their own: whatever is one lies over ours.
            let is_over = self.leads_to(&path).is_some_and(|mount| mount.point == path);
            return is_over.then_some(Fault::Shadowed);
        }
        let at = || self.list.iter().filter(|mount| mount.point == path);
        let Some(top) = self.leads_to(&path).filter(|mount| mount.point == path) else {
            return Some(if at().next().is_some() { Fault::Shadowed } else { Fault::Missing });
        };
        let usage = format!("{id}/{USAGE_FILE}");
        // Which version's shim it is does not matter: an upgrade leaves a container what it has.
        let in_home = |rest: &str, file: &str| {
            rest.split_once('/').is_some_and(|(home, name)| name == file && !home.is_empty())
        };
        let (is_ours, is_like_ours) = match part {
            Part::Pages => (sources.pages.below(top) == Some(id), last(top.root) == id),
            Part::Usage => (
                sources.pages.below(top) == Some(usage.as_str()),
                top.root.ends_with(&format!("/{usage}")),
            ),
            Part::Quota | Part::Session | Part::Gate => (true, true),
            Part::Shim => (
                sources.shim.below(top).is_some_and(|rest| in_home(rest, SHIM)),
                last(top.root) == SHIM,
            ),
            Part::Preload => (
                sources.shim.below(top).is_some_and(|rest| in_home(rest, PRELOAD)),
                last(top.root) == PRELOAD,
            ),
        };
        match (is_ours, is_like_ours) {
            (true, _) => (part != Part::Usage && !top.read_only).then_some(Fault::Writable),
            (false, true) if at().count() == 1 => Some(Fault::Foreign),
            (false, _) => Some(Fault::Shadowed),
        }
    }

    /// The mount that a path lies in, as the kernel walks there (path_resolution(7)): from the root, at
    /// each step into what is mounted upon the mount one is in.
    fn leads_to(&self, path: &str) -> Option<&Mount<'a>> {
        let is_known = |id: u64| self.list.iter().any(|mount| mount.id == id);
        let mut here: Option<&Mount<'a>> = None;
        // Each step goes to another mount; a list that goes in circles is nobody's.
        for _ in 0..=self.list.len() {
            let is_next = |mount: &&Mount<'a>| {
                lies_in(path, mount.point)
                    && match here {
                        Some(here) => {
                            mount.parent == here.id
                                && mount.id != here.id
                                && lies_in(mount.point, here.point)
                        }
                        None => mount.parent == mount.id || !is_known(mount.parent),
                    }
            };
            // The nearest to the root is met first; of several on one spot the last was laid over all.
            let next = self.list.iter().enumerate().filter(|(_, mount)| is_next(mount));
            let next = next.min_by_key(|(at, mount)| (mount.point.len(), std::cmp::Reverse(*at)));
            match next {
                Some((_, mount)) => here = Some(mount),
                None => return here,
            }
        }
        None
    }
}

/// Id, parent, device, root, mount point, options, …
fn line(text: &str) -> Option<Mount<'_>> {
    let mut fields = text.split(' ');
    let (id, parent) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let (device, root, point) = (fields.next()?, fields.next()?, fields.next()?);
    let read_only = fields.next()?.split(',').any(|option| option == "ro");
    // As the kernel writes it once somebody has removed the file.
    let root = root.strip_suffix("//deleted").unwrap_or(root);
    Some(Mount { id, parent, device, root, point, read_only })
}

fn lies_in(path: &str, directory: &str) -> bool {
    let rest = path.strip_prefix(directory.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn is_digits8(part: &str) -> bool {
    part.len() == 8 && part.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
#[path = "mounts_tests.rs"]
mod tests;
