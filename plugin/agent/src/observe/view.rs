//! The pid namespace of this process: the host's, or its own container's.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Inode of the first pid namespace (`PROC_PID_INIT_INO`, linux/proc_ns.h).
const FIRST: u64 = 0xEFFF_FFFC;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PidView {
    Host,
    /// Those of a pid namespace of its own: no tenant's.
    Own,
    /// Unknown before the first tenant comes: the node itself may be a container, as kind's
    /// nodes are.
    Unknown,
}

/// How it is with this process.
pub fn pid_view() -> PidView {
    let proc = Path::new("/proc");
    let inode = std::fs::metadata(proc.join("self/ns/pid")).ok().map(|meta| meta.ino());
    // With shareProcessNamespace the pod's sandbox is the first process.
    let first = std::fs::read_to_string(proc.join("1/comm")).unwrap_or_default();
    judge(inode, std::process::id(), first.trim())
}

fn judge(inode: Option<u64>, own_pid: u32, first: &str) -> PidView {
    match inode {
        Some(FIRST) => PidView::Host,
        _ if own_pid == 1 || first == "pause" => PidView::Own,
        _ => PidView::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_of_its_own_is_distinguished_from_the_hosts() {
        assert_eq!(judge(Some(FIRST), 4711, "systemd"), PidView::Host);
        assert_eq!(judge(Some(4_026_532_000), 1, "tessera"), PidView::Own);
        assert_eq!(judge(Some(4_026_532_000), 8, "pause"), PidView::Own);
        // A kind node, with hostPID.
        assert_eq!(judge(Some(4_026_532_000), 812, "systemd"), PidView::Unknown);
        assert_eq!(judge(None, 812, ""), PidView::Unknown);
    }
}
