//! What a pod and a container are called that the kernel knows by a UID and an id ([`super::cgroup`]).
//!
//! PodResources has names and no UIDs. Two places that kubelet alone writes have both, and either is as
//! good as kubelet's word: its device checkpoint names the UID of every container with devices, and the
//! devices lead to the name ([`by_devices`]); `/var/log/containers` has a link for every container that is
//! named `<pod>_<namespace>_<container>-<id>.log` ([`by_log`]; `legacyLogSymlink` in
//! `pkg/kubelet/kuberuntime`). Of that directory only names are read: the links lead to where the
//! plugin's container has nothing mounted. What a process says itself (its hostname, its environment) is
//! the tenant's to choose and is not asked.

use std::path::Path;

use super::cgroup::PodContainer;
use tessera_kubelet::foreign_plugins::checkpoint::Entry;
use tessera_model::holding::Holding;
use tessera_model::record::Holder;

/// Names of files that are looked through: kubelet's most pods is 110 by default, and what has ended is
/// collected.
const MOST_LOGS: usize = 16 << 10;
/// Longest file name (`ext4MaxFileNameLen` in kubelet), without `.log`: longer ones are cut.
const LONGEST_LOG: usize = 255 - 4;

/// The name of a pod by the devices that it holds. `None` if it holds none, or kubelet's two sources
/// disagree.
pub fn by_devices(
    place: &PodContainer,
    container: Option<&str>,
    entries: &[Entry],
    holdings: &[Holding],
) -> Option<Holder> {
    let mut found: Option<Holder> = None;
    for entry in entries.iter().filter(|entry| entry.pod_uid == place.pod_uid) {
        let holders = holdings.iter().filter(|holding| {
            holding.resource_name == entry.resource
                && holding.container == entry.container
                && holding.device_ids.iter().eq(&entry.device_ids)
        });
        for holding in holders {
            let same = |found: &Holder| {
                (&found.namespace, &found.pod) == (&holding.namespace, &holding.pod)
            };
            match &found {
                Some(found) if !same(found) => return None,
                // Of several containers with devices, the one that is asked for.
                Some(_) if container != Some(holding.container.as_str()) => {}
                _ => {
                    found = Some(Holder {
                        namespace: holding.namespace.clone(),
                        pod: holding.pod.clone(),
                        container: holding.container.clone(),
                    });
                }
            }
        }
    }
    // The pod is certain; the container may be another of its.
    found.map(|found| match container {
        Some(container) => Holder { container: container.to_owned(), ..found },
        None => Holder { container: String::new(), ..found },
    })
}

/// The name of a container by kubelet's directory of logs. Blocking; reads names alone.
pub fn by_log(directory: &Path, container_id: &str) -> Option<Holder> {
    if container_id.len() < 64 {
        return None;
    }
    let entries = std::fs::read_dir(directory).ok()?.take(MOST_LOGS);
    entries.flatten().find_map(|entry| of_log(entry.file_name().to_str()?, container_id))
}

/// Neither names of pods nor of namespaces nor of containers have an underscore.
fn of_log(file: &str, container_id: &str) -> Option<Holder> {
    let name = file.strip_suffix(".log")?;
    let (names, id) = name.rsplit_once('-')?;
    let cut = name.len() == LONGEST_LOG && id.len() >= 12;
    if id != container_id && !(cut && container_id.starts_with(id)) {
        return None;
    }
    let mut names = names.split('_');
    let holder = Holder {
        pod: names.next()?.to_owned(),
        namespace: names.next()?.to_owned(),
        container: names.next()?.to_owned(),
    };
    names.next().is_none().then_some(holder)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
    const ID: &str = "8bd099c6e217ca8fd06d964072dcd1ab9fb001db395f1dcd1250bec4e4799bf4";

    fn place() -> PodContainer {
        PodContainer { pod_uid: UID.into(), container_id: ID.into() }
    }

    fn entry(uid: &str, container: &str, device: &str) -> Entry {
        Entry {
            pod_uid: uid.into(),
            container: container.into(),
            resource: "tessera.dev/gpu".into(),
            device_ids: vec![device.into()],
        }
    }

    fn holding(pod: &str, container: &str, device: &str) -> Holding {
        Holding {
            namespace: "team".into(),
            pod: pod.into(),
            container: container.into(),
            resource_name: "tessera.dev/gpu".into(),
            device_ids: vec![device.into()],
        }
    }

    fn holder(pod: &str, container: &str) -> Option<Holder> {
        let (namespace, pod, container) = ("team".into(), pod.into(), container.into());
        Some(Holder { namespace, pod, container })
    }

    #[test]
    fn devices_lead_from_a_uid_to_a_name() {
        let entries =
            [entry("other", "main", "a"), entry(UID, "main", "b"), entry(UID, "aux", "c")];
        let holdings =
            [holding("x", "main", "a"), holding("y", "main", "b"), holding("y", "aux", "c")];
        let named = |container| by_devices(&place(), container, &entries, &holdings);
        assert_eq!(named(Some("aux")), holder("y", "aux"));
        assert_eq!(named(Some("side-car")), holder("y", "side-car"), "one without devices");
        assert_eq!(named(None), holder("y", ""));
        assert_eq!(by_devices(&place(), None, &entries[..1], &holdings), None);
        assert_eq!(by_devices(&place(), None, &entries, &holdings[..1]), None);
    }

    #[test]
    fn where_kubelets_sources_disagree_nobody_is_named() {
        let entries = [entry(UID, "main", "b"), entry(UID, "aux", "c")];
        let holdings = [holding("y", "main", "b"), holding("z", "aux", "c")];
        assert_eq!(by_devices(&place(), None, &entries, &holdings), None);
    }

    #[test]
    fn a_log_names_its_container() {
        let file = format!("y-4q7mx_team_main-0_{ID}.log");
        assert_eq!(of_log(&file, ID), None);
        assert_eq!(of_log(&format!("y-4q7mx_team_main-{ID}.log"), ID), holder("y-4q7mx", "main"));
        assert_eq!(of_log(&format!("y_team_my-main-{ID}.log"), ID), holder("y", "my-main"));
        assert_eq!(of_log(&format!("y_team_main-{}.log", ID.replace('8', "9")), ID), None);
        assert_eq!(of_log(&format!("y_team-{ID}.log"), ID), None);
        // Cut to what a file system allows.
        let long = "p".repeat(200);
        let mut file = format!("{long}_team_main-{ID}");
        file.truncate(LONGEST_LOG);
        assert_eq!(of_log(&format!("{file}.log"), ID), holder(&long, "main"));
        assert_eq!(of_log(&format!("y_team_main-{}.log", &ID[..20]), ID), None, "not by chance");
    }

    #[test]
    fn the_directory_is_looked_through() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join(format!("y_team_main-{ID}.log"));
        std::os::unix::fs::symlink("/nowhere", link).unwrap();
        assert_eq!(by_log(dir.path(), ID), holder("y", "main"));
        assert_eq!(by_log(dir.path(), &ID.replace('8', "7")), None);
        assert_eq!(by_log(dir.path(), ""), None);
        assert_eq!(by_log(Path::new("/nonexistent"), ID), None);
    }
}
