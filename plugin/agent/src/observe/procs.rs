//! Identifies a pid by `/proc`: the container it lives in, its pid there, and whether it still has its
//! memory. Read with care for pids that end and come again; remembered by pid and start time.
//!
//! A container is identified by its mounts ([`crate::trust::container`]): what kubelet mounted for the pages is a
//! directory named like the allocation, on the pages' own file system. A process that never loads the shim has the same mounts, needs
//! no session to be known, and is known again after a restart of the plugin. Its cgroup identifies pod and container where the mounts are gone.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::trust::container::{self, Mounts, PodContainer, Source};
use nix::sys::stat::{major, minor};
use tessera_model::allocation_id::AllocationId;

/// Longest file that is read of a process: a container can have a hundred thousand mounts
/// (`fs.mount-max`), and nobody waits for them.
const LONGEST: u64 = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub start: u64,
    pub namespace_pid: u32,
    /// The allocations whose pages are mounted where it lives, sorted.
    pub allocations: Vec<AllocationId>,
    pub place: Option<PodContainer>,
    /// The container's name in the pod, where its mounts tell it and agree with the kernel on the pod.
    pub container: Option<String>,
    pub name: String,
}

#[derive(Debug)]
pub struct Procs {
    root: PathBuf,
    /// Where the pages lie; `None`: not known.
    pages: Option<Source>,
    known: HashMap<u32, Identity>,
}

impl Default for Procs {
    fn default() -> Self {
        Self::at(Path::new("/proc"))
    }
}

impl Procs {
    /// With proc(5) mounted at `root`.
    pub fn at(root: &Path) -> Self {
        Procs { root: root.to_owned(), pages: None, known: HashMap::new() }
    }

    /// From now on only a mount of this directory's makes a pod's process an allocation's; a volume can have
    /// any name.
    pub fn set_pages(&mut self, pages: Option<Source>) {
        if self.pages != pages {
            self.pages = pages;
            self.known.clear();
        }
    }

    /// The process behind `pid`; `None` for one that has ended, or is ending: a process that has let go of its
    /// memory holds no slot any more, while the driver still takes its device memory down.
    pub fn living(&mut self, pid: u32) -> Option<&Identity> {
        let start = self.start_of_living(pid)?;
        if self.known.get(&pid).is_none_or(|known| known.start != start) {
            let identity = self.read(pid, start)?;
            self.known.insert(pid, identity);
        }
        self.known.get(&pid)
    }

    /// Whether `pid` has this file mapped, by device and inode (proc_pid_maps(5)). False where
    /// that may not be asked: of other users' processes.
    pub fn maps(&self, pid: u32, (device, inode): (u64, u64)) -> bool {
        let maps = self.file(pid, "maps").unwrap_or_default();
        maps_file(&maps, device, inode)
    }

    pub fn keep(&mut self, pids: impl Fn(u32) -> bool) {
        self.known.retain(|pid, _| pids(*pid));
    }

    fn file(&self, pid: u32, name: &str) -> Option<Vec<u8>> {
        use std::io::Read;
        let file = std::fs::File::open(self.root.join(pid.to_string()).join(name)).ok()?;
        let mut text = Vec::new();
        file.take(LONGEST).read_to_end(&mut text).ok()?;
        Some(text)
    }

    fn start_of_living(&self, pid: u32) -> Option<u64> {
        let stat = self.file(pid, "stat")?;
        let (state, start, memory) = parse_stat(&stat)?;
        (!matches!(state, b'Z' | b'X' | b'x') && memory > 0).then_some(start)
    }

    fn read(&self, pid: u32, start: u64) -> Option<Identity> {
        let status = String::from_utf8_lossy(&self.file(pid, "status")?).into_owned();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        // Outermost namespace first; kernels before 4.1 have no such line.
        let namespace_pid = field("NSpid:").and_then(|pids| pids.split_whitespace().last());
        let mounts = self.file(pid, "mountinfo").unwrap_or_default();
        let mounts = String::from_utf8_lossy(&mounts);
        let mounts = Mounts::parse(&mounts);
        let place = self.file(pid, "cgroup").and_then(|text| container::place(&text));
        let container = mounts
            .container()
            .filter(|(uid, _)| place.as_ref().is_some_and(|place| place.pod_uid == *uid));
        let identity = Identity {
            start,
            namespace_pid: namespace_pid.and_then(|text| text.parse().ok()).unwrap_or(pid),
            // Mounts of what is in no pod are the host's root's to make.
            allocations: mounts.allocations(self.pages.as_ref().filter(|_| place.is_some())),
            container: container.map(|(_, name)| name.to_owned()),
            place,
            name: field("Name:").unwrap_or_default().trim().to_owned(),
        };
        // All of it was the same process's.
        (self.start_of_living(pid) == Some(start)).then_some(identity)
    }
}

/// State, start time and virtual memory of `/proc/<pid>/stat`: fields 3, 22 and 23. The second, in
/// parentheses, is the process's to choose.
fn parse_stat(stat: &[u8]) -> Option<(u8, u64, u64)> {
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let start = fields.nth(22 - 4)?.parse().ok()?;
    let memory = fields.next()?.parse().ok()?;
    Some((state, start, memory))
}

/// Fields: addresses, permissions, offset, device (`major:minor`, hexadecimal), inode, path.
fn maps_file(maps: &[u8], device: u64, inode: u64) -> bool {
    let device = format!("{:02x}:{:02x}", major(device), minor(device));
    String::from_utf8_lossy(maps).lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(3);
        fields.next() == Some(device.as_str())
            && fields.next().and_then(|text| text.parse().ok()) == Some(inode)
    })
}

/// Inode of the first pid namespace (`PROC_PID_INIT_INO`, linux/proc_ns.h).
const FIRST: u64 = 0xEFFF_FFFC;

/// The pid namespace of this process: the host's, or its own container's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PidView {
    Host,
    /// Those of a pid namespace of its own: no tenant's.
    Own,
    /// Unknown before the first tenant comes: the node itself may be a container, as kind's
    /// nodes are.
    Unknown,
}

pub fn pid_view() -> PidView {
    let proc = Path::new("/proc");
    let inode = std::fs::metadata(proc.join("self/ns/pid")).ok().map(|meta| meta.ino());
    // With shareProcessNamespace the pod's sandbox is the first process.
    let first = std::fs::read_to_string(proc.join("1/comm")).unwrap_or_default();
    judge_view(inode, std::process::id(), first.trim())
}

fn judge_view(inode: Option<u64>, own_pid: u32, first: &str) -> PidView {
    match inode {
        Some(FIRST) => PidView::Host,
        _ if own_pid == 1 || first == "pause" => PidView::Own,
        _ => PidView::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    struct Fake {
        dir: tempfile::TempDir,
        procs: Procs,
    }

    impl Fake {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let procs = Procs::at(dir.path());
            let fake = Self { dir, procs };
            fs::create_dir(fake.dir.path().join("7")).unwrap();
            fake.write("status", "Name:\tserver\nNSpid:\t7\t3\n");
            fake.write("mountinfo", &mounts(ID));
            fake.stat('S', 99, 4096);
            fake
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.dir.path().join("7").join(name), text).unwrap();
        }

        fn stat(&self, state: char, start: u64, memory: u64) {
            let stat = format!(
                "7 (a) R) {state} 1 7 7 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 {start} {memory} 9 \
                 18446744073709551615 1 1\n"
            );
            self.write("stat", &stat);
        }
    }

    fn mounts(id: &str) -> String {
        format!(
            "22 1 0:21 / / rw - overlay overlay rw\n\
             23 22 0:30 /{id}/usage /usr/local/tessera/pages/{id}/usage rw - tmpfs tmpfs rw\n\
             24 22 0:30 /{id} /usr/local/tessera/pages/{id} ro,nosuid - tmpfs tmpfs rw\n"
        )
    }

    #[test]
    fn a_container_is_identified_by_what_is_mounted_at_the_pages_place() {
        let mut fake = Fake::new();
        let identity = fake.procs.living(7).unwrap();
        assert_eq!(identity.allocations.first().map(AllocationId::as_str), Some(ID));
        assert_eq!((identity.start, identity.namespace_pid), (99, 3));
        assert_eq!(identity.name, "server");
        assert_eq!(fake.procs.living(8), None);
    }

    #[test]
    fn pod_and_container_are_identified_by_the_kernel_and_named_by_kubelets_mounts() {
        let uid = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
        let fake = |cgroup: &str| {
            let mut fake = Fake::new();
            fake.write("cgroup", cgroup);
            let message = format!(
                "25 22 8:1 /var/lib/kubelet/pods/{uid}/containers/main/0a1b2c3d \
                 /dev/termination-log rw - ext4 /dev/sda rw\n"
            );
            fake.write("mountinfo", &(mounts(ID) + &message));
            fake.procs.living(7).unwrap().clone()
        };
        let id = "8b".repeat(32);
        let inside = fake(&format!("0::/kubepods/pod{uid}/{id}\n"));
        let place = PodContainer { pod_uid: uid.into(), container_id: id };
        assert_eq!((inside.place, inside.container.as_deref()), (Some(place), Some("main")));
        assert_eq!(fake("0::/system.slice\n").container, None, "mounts alone could be forged");
    }

    #[test]
    fn the_dead_and_the_dying_are_nobody() {
        let mut fake = Fake::new();
        for (state, memory) in [('Z', 0), ('X', 4096), ('R', 0)] {
            fake.stat(state, 99, memory);
            assert_eq!(fake.procs.living(7), None, "{state} {memory}");
        }
    }

    #[test]
    fn a_pid_that_comes_again_is_somebody_else() {
        let mut fake = Fake::new();
        assert!(!fake.procs.living(7).unwrap().allocations.is_empty());
        fake.write("mountinfo", "22 1 0:21 / / rw - ext4 /dev/sda rw\n");
        assert!(!fake.procs.living(7).unwrap().allocations.is_empty(), "remembered");
        fake.stat('S', 100, 4096);
        assert_eq!(fake.procs.living(7).unwrap().allocations, []);
        fake.procs.keep(|pid| pid != 7);
        assert!(fake.procs.known.is_empty());
    }

    #[test]
    fn a_mapped_file_is_identified_by_device_and_inode() {
        let maps = b"7f00-7f01 rw-s 00000000 fe:01 4711   /dev/shm/x/usage\n\
                     7f02-7f03 rw-p 00000000 00:00 0 \n";
        let device = nix::sys::stat::makedev(0xfe, 1);
        assert!(maps_file(maps, device, 4711));
        assert!(!maps_file(maps, device, 4712));
        assert!(!maps_file(maps, nix::sys::stat::makedev(0xfe, 2), 4711));
    }

    #[test]
    fn a_namespace_of_its_own_is_distinguished_from_the_hosts() {
        assert_eq!(judge_view(Some(FIRST), 4711, "systemd"), PidView::Host);
        assert_eq!(judge_view(Some(4_026_532_000), 1, "tessera"), PidView::Own);
        assert_eq!(judge_view(Some(4_026_532_000), 8, "pause"), PidView::Own);
        // A kind node, with hostPID.
        assert_eq!(judge_view(Some(4_026_532_000), 812, "systemd"), PidView::Unknown);
        assert_eq!(judge_view(None, 812, ""), PidView::Unknown);
    }
}
