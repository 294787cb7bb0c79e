//! Which pod and container a process is in, by `/proc/<pid>/cgroup` (cgroups(7)). Pure.
//!
//! The kernel writes it, and a process cannot leave its cgroup without write access to the hierarchy
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

/// A pod's container, as the kernel and the runtime name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodContainer {
    /// The pod's UID as kubelet has it; of a static pod the hash of its manifest.
    pub pod_uid: String,
    /// The container's id, 64 hexadecimal digits as a rule; empty where it is unknown.
    pub container_id: String,
}

/// Where a process is; `None` for one that is in no pod.
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

/// A UUID, or a static pod's hash.
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

    const UID: &str = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
    const SLICE: &str = "7d5b3c1e_0f2a_4b6c_8d9e_aabbccddeeff";
    const ID: &str = "8bd099c6e217ca8fd06d964072dcd1ab9fb001db395f1dcd1250bec4e4799bf4";

    fn parsed(text: &str) -> Option<(String, String)> {
        place(text.as_bytes()).map(|place| (place.pod_uid, place.container_id))
    }

    #[test]
    fn every_driver_and_runtime_names_pod_and_container() {
        let nested = "/docker/0123/kubelet";
        for path in [
            format!("/kubepods/burstable/pod{UID}/{ID}"),
            format!("/kubepods/pod{UID}/{ID}"),
            format!("/kubepods/besteffort/pod{UID}/crio-{ID}"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope"),
            format!("/kubepods.slice/kubepods-pod{SLICE}.slice/docker-{ID}.scope"),
            format!(
                "/system.slice/containerd.service/kubepods-burstable-pod{SLICE}.slice:cri-containerd:{ID}"
            ),
            format!("{nested}/kubepods/burstable/pod{UID}/{ID}"),
            format!(
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope"
            ),
            // From a cgroup namespace of one's own.
            format!("/../../pod{UID}/{ID}"),
            format!("/../../kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{ID}.scope"),
            // Deeper, as with systemd in a container.
            format!("/kubepods/pod{UID}/{ID}/init.scope"),
        ] {
            for line in [format!("0::{path}\n"), format!("12:pids:/\n4:memory:{path}\n0::/\n")] {
                assert_eq!(parsed(&line), Some((UID.into(), ID.into())), "{line}");
            }
        }
    }

    #[test]
    fn a_static_pod_has_a_hash_for_a_uid() {
        let hash = "0a1b2c3d4e5f60718293a4b5c6d7e8f9";
        let line = format!("0::/kubepods/burstable/pod{hash}/{ID}");
        assert_eq!(parsed(&line), Some((hash.into(), ID.into())));
    }

    #[test]
    fn what_a_container_nests_below_its_own_cgroup_changes_nothing() {
        let other = "00000000-0000-0000-0000-000000000000";
        let line =
            format!("0::/kubepods/pod{UID}/{ID}/kubepods/pod{other}/{}", ID.replace('8', "0"));
        assert_eq!(parsed(&line), Some((UID.into(), ID.into())));
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

    proptest! {
        #[test]
        fn nothing_makes_it_stumble(text: Vec<u8>) {
            let _ = place(&text);
        }
    }
}
