use std::cell::Cell;
use std::fs;

use super::*;
use crate::trust::mounts::Source;

const ID: &str = "0123456789abcdef0123456789abcdef";
const UID: &str = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";
const OWN: &str = "1 0 8:1 / / rw - ext4 x rw\n2 1 0:99 / /pages rw - tmpfs x rw\n";

/// A proc(5) that a test writes.
struct World {
    dir: tempfile::TempDir,
    procs: Procs,
    sweep: Sweep,
    now: Instant,
    /// What kubelet gave the container `main`, and whether that is known.
    given: Cell<bool>,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (procs, now) = (Procs::at(dir.path()), Instant::now());
        World { dir, procs, sweep: Sweep::new(now, Duration::ZERO), now, given: Cell::new(false) }
    }

    fn process(&self, pid: u32, container: &str, mounts: &str) {
        let dir = self.dir.path().join(pid.to_string());
        fs::create_dir_all(&dir).unwrap();
        let cgroup = match container {
            "" => "0::/system.slice/sshd.service\n".to_owned(),
            id => format!("0::/kubepods/pod{UID}/{}\n", id.repeat(64)),
        };
        fs::write(dir.join("cgroup"), cgroup).unwrap();
        fs::write(dir.join("mountinfo"), mounts).unwrap();
    }

    /// Sweeps when that is due; the reports, and how long it waited.
    fn next(&mut self) -> (Vec<Report>, Duration) {
        let due = self.sweep.due();
        let waited = due.saturating_duration_since(self.now);
        self.now = self.now.max(due);
        let own = Mounts::parse(OWN);
        let sources = Sources {
            pages: Source::of(&own, "/pages").unwrap(),
            shim: Source::of(&own, "/shim").unwrap(),
        };
        let context = SweepContext {
            sources: Some(&sources),
            preload: true,
            is_live: &|id| id.as_str() == ID,
            holds: &|_| self.given.get(),
            given: &|_, name| {
                (self.given.get() && name == "main").then(|| AllocationId::parse(ID).unwrap())
            },
        };
        (self.sweep.sweep(&mut self.procs, &context, self.now), waited)
    }
}

fn mounts(more: &str) -> String {
    format!(
        "10 5 0:7 / / rw - overlay x rw
11 10 0:99 /{ID} /usr/local/tessera/pages/{ID} ro - tmpfs x rw
12 11 0:99 /{ID}/usage /usr/local/tessera/pages/{ID}/usage rw - tmpfs x rw
13 10 8:1 /shim/00112233445566aa/libtessera.so /usr/local/tessera/libtessera.so ro - ext4 x rw
14 10 8:1 /shim/00112233445566aa/ld.so.preload /etc/ld.so.preload ro - ext4 x rw
15 10 8:1 /kubelet/pods/{UID}/containers/main/0a1b2c3d /dev/termination-log rw - ext4 x rw
{more}"
    )
}

const SHADOW: &str = "16 10 8:2 /volume /usr/local/tessera/pages rw - ext4 x rw\n";

/// Of a container that lost all that it was given.
fn without_ours() -> String {
    mounts("").lines().filter(|l| !l.contains("tessera")).map(|l| format!("{l}\n")).collect()
}

#[test]
fn a_container_whose_pages_are_shadowed_is_reported_within_seconds() {
    let mut world = World::new();
    world.process(7, "", "1 0 8:1 / / rw - ext4 x rw\n");
    world.process(8, "a", &mounts(""));
    assert_eq!(world.next().0, []);
    let place = PodContainer { pod_uid: UID.into(), container_id: "a".repeat(64) };
    assert_eq!(world.sweep.home(&place)[0].as_str(), ID);
    world.process(8, "a", &mounts(SHADOW));
    let now = world.now;
    world.sweep.started(now);
    assert_eq!(world.next().0, [], "not confirmed");
    let (reports, waited) = world.next();
    assert!(waited <= CONFIRM, "{waited:?}");
    assert_eq!((reports.len(), reports[0].pid), (1, 8));
    assert_eq!(world.sweep.confirmed().len(), 1);
    assert_eq!(world.next().0, [], "reported once");
    // It ends.
    fs::remove_dir_all(world.dir.path().join("8")).unwrap();
    world.next();
    assert!(world.sweep.confirmed().is_empty() && world.sweep.home(&place).is_empty());
}

#[test]
fn a_container_that_lost_our_mounts_altogether_is_known_by_what_kubelet_gave_it() {
    let mut world = World::new();
    world.process(8, "a", &without_ours());
    world.next();
    world.next();
    assert!(world.sweep.confirmed().is_empty(), "any pod without a share");
    world.given.set(true);
    let mut world = World { sweep: Sweep::new(world.now, Duration::ZERO), ..world };
    world.next();
    let (reports, _) = world.next();
    assert_eq!(reports[0].damages.len(), 3, "{reports:?}");
}

#[test]
fn what_kubelet_tells_late_is_heard_all_the_same() {
    let mut world = World::new();
    world.process(8, "a", &without_ours());
    for _ in 0..4 {
        assert_eq!(world.next().0, [], "it holds no share, as far as anybody knows");
    }
    assert!(world.sweep.foreign.values().all(|since| world.now - *since > YOUNG));
    world.given.set(true);
    world.next();
    let (reports, _) = world.next();
    assert_eq!(reports[0].damages.len(), 3, "{reports:?}");
}

#[test]
fn a_volume_that_is_named_like_a_neighbours_allocation_is_not_taken_for_it() {
    let mut world = World::new();
    // A pod without a share, whose process the neighbour would pay for.
    world.process(
        9,
        "b",
        &format!(
            "10 5 0:7 / / rw - overlay x rw\n11 10 8:1 /v/{ID} /usr/local/tessera/pages rw - ext4 x rw\n"
        ),
    );
    world.next();
    world.next();
    assert_eq!(world.sweep.homes().count(), 0);
}

#[test]
fn a_container_that_is_being_set_up_is_no_finding_and_is_looked_at_again() {
    let mut world = World::new();
    // The runtime's own process, in the container's cgroup, with the host's mounts.
    world.process(8, "a", OWN);
    assert_eq!(world.next().0, []);
    world.process(8, "a", &mounts(""));
    let now = world.now;
    world.sweep.started(now);
    assert_eq!(world.next().0, []);
    assert_eq!(world.sweep.homes().count(), 1);
}

#[test]
fn sweeps_are_rare_when_nothing_happens() {
    let mut world = World::new();
    world.process(8, "a", &mounts(""));
    world.next();
    for _ in 0..5 {
        let (_, waited) = world.next();
        assert!(waited >= USUAL, "{waited:?}");
    }
    // However many containers start.
    let now = world.now;
    for _ in 0..1000 {
        world.sweep.started(now);
    }
    assert!(world.sweep.due.len() <= 10);
}

#[test]
fn containers_without_a_share_are_left_alone_after_a_while() {
    let mut world = World::new();
    world.process(9, "b", "1 0 8:1 / / rw - ext4 x rw\n");
    for _ in 0..3 {
        world.next();
    }
    // It would be reported if it were read.
    world.process(9, "b", &mounts(SHADOW));
    world.next();
    world.next();
    assert!(world.sweep.confirmed().is_empty());
}
