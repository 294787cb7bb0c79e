//! Whose a process is by what is mounted where it lives, by `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).
//! Pure, and the only view into a container that needs no capability: nothing below `/proc/<pid>/root` is
//! opened, so there are no links, pipes or file systems of a tenant's to fall into.
//!
//! A mount names its file system (field 3) and where in it its root lies (field 4). The plugin knows both
//! for its own pages from its own mounts.

use tessera_region::layout::CONTAINER_PAGES_DIR;

use tessera_model::allocation_id::AllocationId;

/// A directory on the host, as every mount namespace names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    device: String,
    root: String,
}

impl Source {
    /// Where a directory of ours lies, by our own mounts.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mount<'a> {
    id: u64,
    parent: u64,
    device: &'a str,
    root: &'a str,
    point: &'a str,
}

#[derive(Clone, Debug, Default)]
pub struct Mounts<'a> {
    list: Vec<Mount<'a>>,
}

impl<'a> Mounts<'a> {
    /// Reads them; lines that are none are left out.
    pub fn parse(text: &'a str) -> Self {
        Mounts { list: text.lines().filter_map(line).collect() }
    }

    /// The allocations whose directories are mounted in the pages' place, sorted, whatever lies over them or
    /// under: a runtime may mount a pod's volume of the same place before ours or after. With `pages`, where
    /// the plugin's own lie, only what is of there counts: a volume can have a directory of any name. None
    /// also if several are mounted where one of an older plugin belongs, which only a pod with the host's
    /// directories can have.
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

    /// The pod's UID and the container's name, by what kubelet mounts into every container: the file for
    /// its termination message, `<kubelet>/pods/<uid>/containers/<name>/<8 digits>` (`makeMounts` in
    /// `pkg/kubelet/kuberuntime`). A process that may mount can forge it.
    pub fn container(&self) -> Option<(&'a str, &'a str)> {
        self.list.iter().find_map(|mount| {
            let (_, rest) = mount.root.rsplit_once("/pods/")?;
            let mut parts = rest.split('/');
            let (uid, kind, name) = (parts.next()?, parts.next()?, parts.next()?);
            let is_message = parts.next().is_some_and(is_digits8) && parts.next().is_none();
            (kind == "containers" && is_message).then_some((uid, name))
        })
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
    fields.next()?;
    // As the kernel writes it once somebody has removed the file.
    let root = root.strip_suffix("//deleted").unwrap_or(root);
    Some(Mount { id, parent, device, root, point })
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
