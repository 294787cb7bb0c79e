//! Processes that use a shared GPU without a share of it: which are new, which to report, and what their pods are called.
//!
//! The kernel knows a container by an id ([`super::container`]). Kubelet's `/var/log/containers` has a link for every container
//! that is named `<pod>_<namespace>_<container>-<id>.log` (`legacyLogSymlink` in `pkg/kubelet/kuberuntime`). Of that directory
//! only names are read: the links lead to where the plugin's container has nothing mounted. What a process says itself (its
//! hostname, its environment) is the tenant's to choose and is not asked.

use std::fmt;
use std::path::Path;

use super::container::PodContainer;
use tessera_model::quantity::format_bytes;
use tessera_model::record::Holder;

/// As much as `comm` holds of `nvidia-cuda-mps-server` and `nvidia-cuda-mps-control`.
const MPS: &str = "nvidia-cuda-mps";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stranger {
    pub pid: u32,
    pub start: u64,
    /// What the driver says it uses; `None` where it does not tell.
    pub bytes: Option<u64>,
    /// What it calls itself (`comm`): its own word.
    pub name: String,
    pub place: Option<PodContainer>,
    /// What that is called, as far as kubelet tells.
    pub holder: Option<Holder>,
    pub tenant: bool,
}

impl Stranger {
    pub fn whereabouts(&self) -> String {
        let id = |id: &str| id.get(..12).unwrap_or(id).to_owned();
        match (&self.holder, &self.place) {
            (Some(Holder { namespace, pod, container }), _) => {
                let container = match container.as_str() {
                    "" => String::new(),
                    name => format!(" (container {name})"),
                };
                let other = if self.tenant { ", whose share is of another GPU" } else { "" };
                format!("pod {namespace}/{pod}{container}{other}")
            }
            (None, Some(place)) => format!(
                "the pod with UID {}, container {} (kubelet's names for them cannot be read: mount \
                 /var/log/containers into the plugin, or look for the UID with kubectl)",
                place.pod_uid,
                id(&place.container_id)
            ),
            (None, None) => "no pod: a process of the host itself".to_owned(),
        }
    }
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stranger { pid, name, .. } = self;
        // A name is up to 15 bytes of the process's choice.
        let mps = match name.as_str() {
            MPS => {
                ": CUDA MPS, whose clients run at once, whatever their shares; end it on this node"
            }
            _ => "",
        };
        let (name, whereabouts) = (name.escape_debug(), self.whereabouts());
        write!(f, "process {pid} ({name}{mps}) of {whereabouts}")?;
        match self.bytes {
            Some(bytes) => write!(f, " uses {}", format_bytes(bytes)),
            None => f.write_str(" uses it"),
        }
    }
}

/// Processes, pid and start, that two looks in a row saw.
#[derive(Clone, Debug, Default)]
pub struct Confirmed {
    before: Vec<(u32, u64)>,
    known: Vec<(u32, u64)>,
}

impl Confirmed {
    /// Takes a look: the places of those that it confirms of the look before, each once.
    pub fn see(&mut self, all: impl Iterator<Item = (u32, u64)>) -> Vec<usize> {
        let mut new = Vec::new();
        let all: Vec<_> = all.collect();
        for (at, who) in all.iter().enumerate() {
            if self.before.contains(who) && !self.known.contains(who) {
                self.known.push(*who);
                new.push(at);
            }
        }
        self.known.retain(|who| all.contains(who));
        self.before = all;
        new
    }

    /// Whether one was seen once.
    pub fn waits(&self) -> bool {
        self.before.iter().any(|who| !self.known.contains(who))
    }

    pub fn any(&self) -> bool {
        !self.known.is_empty()
    }

    pub fn knows(&self, who: (u32, u64)) -> bool {
        self.known.contains(&who)
    }
}

/// Names of files that are looked through: kubelet's most pods is 110 by default, and what has ended is
/// collected.
const MOST_LOGS: usize = 16 << 10;
/// Longest file name (`ext4MaxFileNameLen` in kubelet), without `.log`: longer ones are cut.
const LONGEST_LOG: usize = 255 - 4;

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

    const ID: &str = "8bd099c6e217ca8fd06d964072dcd1ab9fb001db395f1dcd1250bec4e4799bf4";

    fn holder(pod: &str, container: &str) -> Option<Holder> {
        let (namespace, pod, container) = ("team".into(), pod.into(), container.into());
        Some(Holder { namespace, pod, container })
    }

    fn stranger(pid: u32, container: &str) -> Stranger {
        let place = PodContainer { pod_uid: "u".into(), container_id: container.into() };
        Stranger {
            pid,
            start: 1,
            bytes: Some(300 << 20),
            name: "a\nb".into(),
            place: (!container.is_empty()).then_some(place),
            holder: None,
            tenant: false,
        }
    }

    #[test]
    fn the_text_says_where_it_is_and_how_sure_that_is() {
        let holder = Holder { namespace: "team".into(), pod: "x".into(), container: "main".into() };
        let named = Stranger { holder: Some(holder), ..stranger(7, "c") };
        let text = "process 7 (a\\nb) of pod team/x (container main) uses 300 MiB";
        assert_eq!(named.to_string(), text);
        assert!(stranger(7, "c").to_string().contains("the pod with UID u, container c ("));
        assert!(stranger(7, "").to_string().contains("of no pod: a process of the host itself"));
        let mps = Stranger { name: "nvidia-cuda-mps".into(), ..stranger(7, "") };
        assert!(mps.to_string().contains("(nvidia-cuda-mps: CUDA MPS, "), "{mps}");
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
