//! Whose a process is by what is mounted where it lives, by `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).
//! Pure, and the only view into a container that needs no capability: nothing below `/proc/<pid>/root` is
//! opened, so there are no links, pipes or file systems of a tenant's to fall into.
//!
//! A mount names its file system (field 3) and where in it its root lies (field 4). The plugin knows both
//! for its own pages from its own mounts.
//!
//! And which pod and container a process is in, by `/proc/<pid>/cgroup` (cgroups(7)). The kernel writes it, and a process cannot leave its cgroup without write access to the hierarchy
//! above; a container with a delegated one can only nest deeper. So what counts is the *first* part of a
//! path that is named like a pod, and the part after it. What kubelet and the runtimes write:
//!
//! | driver | container runtime | path |
//! |---|---|---|
//! | cgroupfs | containerd | `/kubepods/burstable/pod<uid>/<id>` (guaranteed: no class) |
//! | cgroupfs | CRI-O | `/kubepods/burstable/pod<uid>/crio-<id>` |
//! | systemd | containerd | `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<u_i_d>.slice/cri-containerd-<id>.scope` |
//! | systemd | CRI-O, docker | … `/crio-<id>.scope`, `/docker-<id>.scope` |
//! | systemd, containerd set to cgroupfs | containerd | `/system.slice/containerd.service/kubepods-burstable-pod<u_i_d>.slice:cri-containerd:<id>` |
//!
//! A reader in a cgroup namespace of its own sees them relative to its own cgroup, `/../../…`.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;

use tessera_model::allocation_id::AllocationId;
use tessera_region::layout::CONTAINER_PAGES_DIR;

/// A directory on the host, as every mount namespace names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    device: String,
    root: String,
}

impl Source {
    /// The directory that is open as `directory`, by this process's own `mounts` (`/proc/self/mountinfo`).
    pub fn of(mounts: &Mounts<'_>, directory: &File) -> Option<Self> {
        let fd = directory.as_raw_fd();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()?;
        let path = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
        Source::on(mounts, id, path.to_str()?)
    }

    fn on(mounts: &Mounts<'_>, id: u64, directory: &str) -> Option<Self> {
        let mount = mounts.list.iter().find(|mount| mount.id == id)?;
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
    device: &'a str,
    root: &'a str,
    point: &'a str,
}

#[derive(Clone, Debug, Default)]
pub struct Mounts<'a> {
    list: Vec<Mount<'a>>,
}

impl<'a> Mounts<'a> {
    pub fn parse(text: &'a str) -> Self {
        Mounts { list: text.lines().filter_map(line).collect() }
    }

    /// The allocations whose directories are mounted in the pages' place, sorted, whatever lies over them or
    /// under: a runtime may mount a pod's volume of the same place before ours or after. With `pages`, where
    /// the plugin's own lie, only what is of there counts: a volume can have a directory of any name.
    pub fn allocations(&self, pages: Option<&Source>) -> Vec<AllocationId> {
        let of = |mount: &Mount<'a>| {
            let shown = match pages {
                Some(pages) => pages.below(mount)?,
                None => mount.root.rsplit('/').next()?,
            };
            AllocationId::parse(child(mount.point)?).filter(|id| id.as_str() == shown)
        };
        let ids: BTreeSet<_> = self.list.iter().filter_map(of).collect();
        ids.into_iter().collect()
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
}

/// Id, parent, device, root, mount point, options, …
fn line(text: &str) -> Option<Mount<'_>> {
    let mut fields = text.split(' ');
    let (id, _parent) = (fields.next()?.parse().ok()?, fields.next()?);
    let (device, root, point) = (fields.next()?, fields.next()?, fields.next()?);
    fields.next()?;
    // As the kernel writes it once somebody has removed the file.
    let root = root.strip_suffix("//deleted").unwrap_or(root);
    Some(Mount { id, device, root, point })
}

fn child(path: &str) -> Option<&str> {
    let name = path.strip_prefix(CONTAINER_PAGES_DIR)?.strip_prefix('/')?;
    (!name.contains('/')).then_some(name)
}

fn is_digits8(part: &str) -> bool {
    part.len() == 8 && part.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A pod's container, as the kernel and the runtime name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodContainer {
    /// The pod's UID as kubelet has it; of a static pod the hash of its manifest.
    pub pod_uid: String,
    /// The container's id, 64 hexadecimal digits as a rule; empty where it is unknown.
    pub container_id: String,
}

pub fn place(cgroup: &[u8]) -> Option<PodContainer> {
    let text = String::from_utf8_lossy(cgroup);
    // `id:controllers:path`; of a hierarchy that kubelet does not use the path says nothing.
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(of_path)
}

fn of_path(path: &str) -> Option<PodContainer> {
    let mut parts = path.split(['/', ':']);
    let pod_uid = parts.by_ref().find_map(pod)?;
    let mut rest = parts.peekable();
    // `…slice:cri-containerd:<id>` has a part between.
    let container_id = match rest.next().map(container) {
        Some(id) if !id.is_empty() => id,
        _ => rest.next().map(container).unwrap_or_default(),
    };
    Some(PodContainer { pod_uid, container_id })
}

/// The UID in `pod<uid>` and `kubepods-burstable-pod<u_i_d>.slice`.
fn pod(part: &str) -> Option<String> {
    let (slice, part) = match part.strip_suffix(".slice") {
        Some(part) => (true, part),
        None => (false, part),
    };
    let uid = match part.strip_prefix("pod") {
        Some(uid) => uid,
        // systemd's names contain their parents', separated by dashes, so that dashes become underscores.
        None if slice => part.rsplit_once("-pod")?.1,
        None => return None,
    };
    let uid = if slice { uid.replace('_', "-") } else { uid.to_owned() };
    is_uid(&uid).then_some(uid)
}

fn is_uid(uid: &str) -> bool {
    let digits = uid.bytes().filter(|byte| *byte != b'-');
    uid.len() <= 36 && digits.clone().count() == 32 && digits.clone().all(|b| b.is_ascii_hexdigit())
}

/// The id in `<id>`, `crio-<id>`, `cri-containerd-<id>.scope`.
fn container(part: &str) -> String {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit('-').next().unwrap_or_default();
    let whole = (12..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_hexdigit());
    if whole { id.to_ascii_lowercase() } else { String::new() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";
    const OTHER: &str = "fedcba9876543210fedcba9876543210";
    const UID: &str = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";

    /// The plugin's own mounts, as deploy/tessera.yaml makes them.
    const OWN: &str = "\
1 0 0:20 / / ro - overlay overlay ro
2 1 253:1 /var/lib/kubelet/plugins/tessera.dev /var/lib/kubelet/plugins/tessera.dev rw - ext4 /dev/vda1 rw
3 2 0:99 / /var/lib/kubelet/plugins/tessera.dev/pages rw - tmpfs tessera rw
4 1 253:1 /var/lib/tessera /var/lib/tessera rw - ext4 /dev/vda1 rw
";

    fn pages() -> Source {
        let place = "/var/lib/kubelet/plugins/tessera.dev/pages";
        let pages = Source::on(&Mounts::parse(OWN), 3, place).unwrap();
        assert_eq!(pages, Source { device: "0:99".into(), root: String::new() });
        pages
    }

    /// A container's mounts, as kubelet and runc make them, and more.
    fn container(more: &[&str]) -> String {
        let mut text = format!(
        "100 50 0:70 / / rw - overlay overlay rw
101 100 0:71 / /proc rw - proc proc rw
102 100 0:99 /{ID} /usr/local/tessera/pages/{ID} ro,nosuid - tmpfs tessera rw
103 102 0:99 /{ID}/usage /usr/local/tessera/pages/{ID}/usage rw,nosuid - tmpfs tessera rw
104 100 253:1 /var/lib/tessera/shim/00112233445566aa/libtessera.so /usr/local/tessera/libtessera.so ro - ext4 /dev/vda1 rw
105 100 253:1 /var/lib/tessera/shim/00112233445566aa/ld.so.preload /etc/ld.so.preload ro - ext4 /dev/vda1 rw
106 100 253:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw - ext4 /dev/vda1 rw
107 100 253:1 /var/lib/kubelet/pods/{UID}/containers/main/0a1b2c3d /dev/termination-log rw - ext4 /dev/vda1 rw
"
    );
        for line in more {
            text += line;
            text.push('\n');
        }
        text
    }

    /// Another share of the container, mounted at this name.
    fn beside(device: &str, root: &str, name: &str) -> String {
        format!("110 100 {device} {root} /usr/local/tessera/pages/{name} ro - tmpfs tessera rw")
    }

    fn allocations(text: &str) -> Vec<String> {
        let found = Mounts::parse(text).allocations(Some(&pages()));
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_container_is_its_shares_whatever_lies_over_them() {
        let text = container(&[]);
        assert_eq!(allocations(&text), [ID]);
        assert_eq!(Mounts::parse(&text).container(), Some((UID, "main")));
        assert_eq!(
            allocations(&container(&[&beside("0:99", &format!("/{OTHER}"), OTHER)])),
            [ID, OTHER]
        );
        // A volume over them all, or another's pages, by the host's directories.
        for over in ["253:1 /v".to_owned(), format!("0:99 /{OTHER}")] {
            let over = format!("108 100 {over} /usr/local/tessera/pages rw - ext4 /dev/vda1 rw");
            assert_eq!(allocations(&container(&[&over])), [ID]);
        }
        // Removed on the host, they are still ours.
        let removed = text.replace(&format!("0:99 /{ID} "), &format!("0:99 /{ID}//deleted "));
        assert_eq!(allocations(&removed), [ID]);
    }

    #[test]
    fn what_is_mounted_beside_the_shares_and_is_none_does_not_count() {
        let volume = format!("/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~secret/v");
        for (device, root, name) in [
            ("253:1", volume.as_str(), OTHER),
            ("253:1", volume.as_str(), "x"),
            // Ours under another's name, and another's of ours.
            ("0:99", &*format!("/{ID}"), OTHER),
            ("0:98", &*format!("/{OTHER}"), OTHER),
        ] {
            let text = container(&[&beside(device, root, name)]);
            assert_eq!(allocations(&text), [ID], "{device} {root} {name}");
        }
    }

    #[test]
    fn a_container_without_our_mounts_names_no_allocation() {
        assert_eq!(Mounts::parse("100 50 0:70 / / rw - overlay overlay rw").allocations(None), []);
        assert_eq!(Mounts::parse("garbage\n1 2 3\n").container(), None);
        // A volume's own directories say nothing.
        let line = "9 1 8:1 /var/lib/kubelet/pods/x/containers/y /v rw - ext4 d rw";
        assert_eq!(Mounts::parse(line).container(), None);
    }

    #[test]
    fn this_processes_own_mounts_lead_somewhere() {
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let of = |path: &str| Source::of(&Mounts::parse(&text), &File::open(path).unwrap());
        assert_eq!(of("/proc").unwrap().root, "");
        let inside = of("/proc/self/task").unwrap().root;
        assert_eq!(inside, format!("/{}/task", std::process::id()));
    }

    proptest! {
        #[test]
        fn no_cgroup_makes_it_stumble(text: Vec<u8>) {
            let _ = place(&text);
        }

        #[test]
        fn nothing_makes_it_stumble(lines in prop::collection::vec("[0-9]{1,2} [0-9]{1,2} [0-9:]{1,3} [/a-z]{1,9} (/|/a|/usr/local/tessera/pages|/etc) (ro|rw)", 0..12)) {
            let text = lines.join("\n");
            let mounts = Mounts::parse(&text);
            prop_assert_eq!(mounts.allocations(Some(&pages())), []);
            let _ = Source::on(&mounts, 1, "/usr/local/tessera/pages");
        }
    }

    const SLICE: &str = "7d5b3c1e_0f2a_4b6c_8d9e_aabbccddeeff";
    const CONTAINER: &str = "8bd099c6e217ca8fd06d964072dcd1ab9fb001db395f1dcd1250bec4e4799bf4";

    fn parsed(text: &str) -> Option<(String, String)> {
        place(text.as_bytes()).map(|place| (place.pod_uid, place.container_id))
    }

    #[test]
    fn every_driver_and_runtime_names_pod_and_container() {
        let nested = "/docker/0123/kubelet";
        for path in [
            format!("/kubepods/burstable/pod{UID}/{CONTAINER}"),
            format!("/kubepods/pod{UID}/{CONTAINER}"),
            format!("/kubepods/besteffort/pod{UID}/crio-{CONTAINER}"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{CONTAINER}.scope"),
            format!("/kubepods.slice/kubepods-pod{SLICE}.slice/docker-{CONTAINER}.scope"),
            format!(
                "/system.slice/containerd.service/kubepods-burstable-pod{SLICE}.slice:cri-containerd:{CONTAINER}"
            ),
            format!("{nested}/kubepods/burstable/pod{UID}/{CONTAINER}"),
            format!(
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope"
            ),
            // From a cgroup namespace of one's own.
            format!("/../../pod{UID}/{CONTAINER}"),
            format!("/../../kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope"),
            // Deeper, as with systemd in a container.
            format!("/kubepods/pod{UID}/{CONTAINER}/init.scope"),
        ] {
            for line in [format!("0::{path}\n"), format!("12:pids:/\n4:memory:{path}\n0::/\n")] {
                assert_eq!(parsed(&line), Some((UID.into(), CONTAINER.into())), "{line}");
            }
        }
    }

    #[test]
    fn a_static_pod_has_a_hash_for_a_uid() {
        let hash = "0a1b2c3d4e5f60718293a4b5c6d7e8f9";
        let line = format!("0::/kubepods/burstable/pod{hash}/{CONTAINER}");
        assert_eq!(parsed(&line), Some((hash.into(), CONTAINER.into())));
    }

    #[test]
    fn what_a_container_nests_below_its_own_cgroup_changes_nothing() {
        let other = "00000000-0000-0000-0000-000000000000";
        let line = format!(
            "0::/kubepods/pod{UID}/{CONTAINER}/kubepods/pod{other}/{}",
            CONTAINER.replace('8', "0")
        );
        assert_eq!(parsed(&line), Some((UID.into(), CONTAINER.into())));
    }

    #[test]
    fn outside_pods_there_is_none() {
        for text in [
            "",
            "0::/",
            "0::/system.slice/ssh.service",
            "0::/user.slice/user-0.slice/session-1.scope",
            "0::/kubepods/podman/x",
            "0::/machine.slice/libpod-8bd099c6e217ca8fd06d964072dcd1ab.scope",
            "garbage",
            "\n::\n:",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
        // The pod is known, and no container.
        assert_eq!(parsed(&format!("0::/kubepods/pod{UID}")), Some((UID.into(), String::new())));
    }
}
