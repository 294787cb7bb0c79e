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
pub enum GivenFile {
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

impl GivenFile {
    const ALL: [GivenFile; 7] = [
        GivenFile::Pages,
        GivenFile::Quota,
        GivenFile::Usage,
        GivenFile::Session,
        GivenFile::Gate,
        GivenFile::Shim,
        GivenFile::Preload,
    ];

    /// Where it belongs, if the share's pages are in the directory `pages`.
    fn path(self, pages: &str) -> String {
        let in_pages = |file: &str| format!("{pages}/{file}");
        match self {
            GivenFile::Pages => pages.to_owned(),
            GivenFile::Quota => in_pages(QUOTA_FILE),
            GivenFile::Usage => in_pages(USAGE_FILE),
            GivenFile::Session => in_pages(SESSION_SOCKET),
            GivenFile::Gate => in_pages(GATE_SOCKET),
            GivenFile::Shim => CONTAINER_SHIM.to_owned(),
            GivenFile::Preload => CONTAINER_PRELOAD.to_owned(),
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
    /// Beside it is mounted what is none of the plugin's pages.
    Added,
}

/// A damage, and the damaged file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damage {
    /// The part.
    pub part: GivenFile,
    /// What became of it.
    pub fault: Fault,
}

impl Damage {
    /// Whether it can have come about without the container's doing: then it explains what is found, and
    /// is no finding. A container keeps what it was given when `container.inject` changes.
    #[must_use]
    pub fn may_be_innocent(self) -> bool {
        self.part == GivenFile::Preload && self.fault == Fault::Missing
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Containers of older plugins have their one share's pages in the directory itself.
        let path = match self.part {
            GivenFile::Pages => CONTAINER_PAGES_DIR.to_owned(),
            part => part.path(&format!("{CONTAINER_PAGES_DIR}/…")),
        };
        match self.fault {
            Fault::Added => write!(
                f,
                "something else is mounted in {path}, as if it were a share: it may be taken for one"
            ),
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

    /// The allocations whose directories are mounted in the pages' place, sorted, whatever lies over them or
    /// under: a runtime may mount a pod's volume of the same place before ours or after. With `pages`, where
    /// the plugin's own lie, only what is of there counts: a volume can have a directory of any name. None
    /// also if several are mounted where one of an older plugin belongs, which only a pod with the host's
    /// directories can have.
    #[must_use]
    pub fn allocations(&self, pages: Option<&Source>) -> Vec<AllocationId> {
        let of = |mount: &Mount<'a>| {
            AllocationId::parse(match pages {
                Some(pages) => pages.below(mount)?,
                None => last(mount.root),
            })
        };
        let in_place = self.list.iter().filter_map(|mount| Some((child(mount.point)?, of(mount)?)));
        let mut ids: Vec<_> =
            in_place.filter(|(name, id)| *name == id.as_str()).map(|(_, id)| id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            let itself = self.list.iter().filter(|mount| mount.point == CONTAINER_PAGES_DIR);
            ids = itself.filter_map(of).collect();
            ids.dedup();
            if pages.is_some() && ids.len() > 1 {
                ids.clear();
            }
            ids.truncate(1);
        }
        ids
    }

    /// Where the pages of an allocation belong here: in the directory itself, if a plugin that knew one share
    /// for each container made it.
    fn home(&self, id: &str) -> String {
        let own = format!("{CONTAINER_PAGES_DIR}/{id}");
        let is_old =
            |mount: &Mount<'a>| mount.point == CONTAINER_PAGES_DIR && last(mount.root) == id;
        match !self.list.iter().any(|mount| mount.point == own) && self.list.iter().any(is_old) {
            true => CONTAINER_PAGES_DIR.to_owned(),
            false => own,
        }
    }

    /// Whether something that is none of the plugin's pages is mounted beside them: a shim takes what is
    /// mounted read-only there for a share.
    fn has_added(&self, id: &str, sources: &Sources) -> bool {
        self.list.iter().any(|mount| {
            let name = child(mount.point).filter(|name| *name != id);
            name.is_some_and(|name| sources.pages.below(mount) != Some(name))
        })
    }

    /// The pod's UID and the container's name, by what kubelet mounts into every container: the file for
    /// its termination message, `<kubelet>/pods/<uid>/containers/<name>/<8 digits>` (`makeMounts` in
    /// `pkg/kubelet/kuberuntime`). A process that may mount can forge it.
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

    /// The damages in a container of `allocation`; none if everything is as it was given. `preload`:
    /// whether containers are given the preload file.
    #[must_use]
    pub fn damages(
        &self,
        allocation: &AllocationId,
        preload: bool,
        sources: &Sources,
    ) -> Vec<Damage> {
        let (id, home) = (allocation.as_str(), self.home(allocation.as_str()));
        let given =
            GivenFile::ALL.into_iter().filter(|part| preload || *part != GivenFile::Preload);
        let fault = |part| self.fault(part, id, &home, sources);
        let damages = given.filter_map(|part| fault(part).map(|fault| Damage { part, fault }));
        let added = Damage { part: GivenFile::Pages, fault: Fault::Added };
        let is_added = home != CONTAINER_PAGES_DIR && self.has_added(id, sources);
        damages.chain(is_added.then_some(added)).collect()
    }

    fn fault(&self, part: GivenFile, id: &str, home: &str, sources: &Sources) -> Option<Fault> {
        let path = part.path(home);
        if matches!(part, GivenFile::Quota | GivenFile::Session | GivenFile::Gate) {
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
            GivenFile::Pages => (sources.pages.below(top) == Some(id), last(top.root) == id),
            GivenFile::Usage => (
                sources.pages.below(top) == Some(usage.as_str()),
                top.root.ends_with(&format!("/{usage}")),
            ),
            GivenFile::Quota | GivenFile::Session | GivenFile::Gate => (true, true),
            GivenFile::Shim => (
                sources.shim.below(top).is_some_and(|rest| in_home(rest, SHIM)),
                last(top.root) == SHIM,
            ),
            GivenFile::Preload => (
                sources.shim.below(top).is_some_and(|rest| in_home(rest, PRELOAD)),
                last(top.root) == PRELOAD,
            ),
        };
        match (is_ours, is_like_ours) {
            (true, _) => (part != GivenFile::Usage && !top.read_only).then_some(Fault::Writable),
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

/// The entry of the pages' place that a path is, if it is one.
fn child(path: &str) -> Option<&str> {
    let name = path.strip_prefix(CONTAINER_PAGES_DIR)?.strip_prefix('/')?;
    (!name.contains('/')).then_some(name)
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
