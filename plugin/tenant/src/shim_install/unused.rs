//! Which installed shims may go. A container mounts the one that its Allocate named, and mounts it
//! again at every restart, until kubelet forgets the container. So what counts is the ledger; what
//! is mounted anywhere is left alone besides, whatever the ledger says.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{PRELOAD, SHIM, TEMPORARY};
use tessera_model::record::Record;
use tessera_system::files::Dir;

/// Since when each installed shim has been of no use to anybody.
#[derive(Clone, Debug, Default)]
pub struct Unused(BTreeMap<String, Instant>);

/// Which of `installed` nobody has needed for `grace`. Pure.
///
/// An allocation whose record does not say which shim it has (the record was lost) may have any.
pub fn decide<'a>(
    installed: &[String],
    current: &str,
    records: impl IntoIterator<Item = &'a Record>,
    unused: &mut Unused,
    grace: Duration,
    now: Instant,
) -> Vec<String> {
    let needed: Option<BTreeSet<&str>> =
        records.into_iter().map(|record| record.shim.as_deref()).collect();
    let Some(needed) = needed else {
        unused.0.clear();
        return Vec::new();
    };
    let idle = |name: &&String| *name != current && !needed.contains(name.as_str());
    let idle: Vec<&String> = installed.iter().filter(idle).collect();
    unused.0.retain(|name, _| idle.contains(&name));
    idle.into_iter()
        .filter(|name| {
            let since = *unused.0.entry((*name).clone()).or_insert(now);
            now.saturating_duration_since(since) >= grace
        })
        .cloned()
        .collect()
}

impl Unused {
    /// It is in use after all: the grace period restarts.
    pub fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }
}

/// Names of the shims installed under `dir`; whatever else is there is nobody's business.
pub fn installed(dir: &Path) -> Vec<String> {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.len() == 16 && name.bytes().all(hex))
        .collect()
}

/// Whether a process that is visible here has it mounted, as every process of a container that was
/// given it has; `proc(5)`, "mountinfo", field 4. An error means: not known.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn is_mounted(name: &str) -> io::Result<bool> {
    let place = format!("/{name}/");
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        let pid = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        if !pid.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        // It may have ended meanwhile.
        let mounts = std::fs::read_to_string(path.join("mountinfo")).unwrap_or_default();
        if is_root_in(&mounts, &place) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_root_in(mountinfo: &str, place: &str) -> bool {
    mountinfo.lines().filter_map(|line| line.split(' ').nth(3)).any(|root| {
        root.rsplit_once(place).is_some_and(|(_, file)| file == SHIM || file == PRELOAD)
    })
}

/// Removes an installed shim, and nothing that is not ours.
///
/// # Errors
/// The file system's; what is left is a directory that the next try finds again.
pub fn remove(dir: &Path, name: &str) -> io::Result<()> {
    let dir = Dir::open_trusted(dir)?;
    let home = dir.sub(OsStr::new(name))?;
    for file in home.names()? {
        let text = file.to_string_lossy();
        if text == SHIM || text == PRELOAD || text.contains(TEMPORARY) {
            home.remove(&file)?;
        }
    }
    dir.remove_dir(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::record::State;

    const GRACE: Duration = Duration::from_secs(3600);

    fn record(shim: Option<&str>) -> Record {
        Record {
            resource: "r".into(),
            state: State::Started,
            shim: shim.map(str::to_owned),
            ..Record::new(AllocationId::of("r", [shim.unwrap_or("?")]), 1, Vec::new())
        }
    }

    struct World {
        unused: Unused,
        start: Instant,
    }

    impl World {
        fn new() -> Self {
            World { unused: Unused::default(), start: Instant::now() }
        }

        fn at(&mut self, after: Duration, records: &[Record]) -> Vec<String> {
            let installed = ["new", "old", "older"].map(String::from);
            decide(&installed, "new", records, &mut self.unused, GRACE, self.start + after)
        }
    }

    #[test]
    fn what_no_allocation_names_goes_after_the_grace() {
        let mut world = World::new();
        let records = [record(Some("old")), record(Some("new"))];
        assert_eq!(world.at(Duration::ZERO, &records), [""; 0]);
        assert_eq!(world.at(GRACE / 2, &records), [""; 0]);
        assert_eq!(world.at(GRACE, &records), ["older"]);
        assert_eq!(world.at(GRACE * 9, &records), ["older"], "never one in use");
    }

    #[test]
    fn the_current_one_stays_without_any_allocation() {
        let mut world = World::new();
        world.at(Duration::ZERO, &[]);
        assert_eq!(world.at(GRACE, &[]), ["old", "older"]);
    }

    #[test]
    fn what_was_used_in_between_gets_a_new_grace() {
        let mut world = World::new();
        world.at(Duration::ZERO, &[]);
        world.at(GRACE / 2, &[record(Some("old"))]);
        assert_eq!(world.at(GRACE, &[]), ["older"]);
        world.unused.forget("older");
        assert_eq!(world.at(GRACE * 2, &[]), ["old"]);
    }

    #[test]
    fn while_an_allocation_does_not_say_which_it_has_none_goes() {
        let mut world = World::new();
        world.at(Duration::ZERO, &[]);
        assert_eq!(world.at(GRACE, &[record(None)]), [""; 0]);
        assert_eq!(world.at(GRACE * 2, &[]), [""; 0], "the grace starts again");
    }

    #[test]
    fn mounts_are_recognised_wherever_the_file_system_begins() {
        let line = |root: &str| {
            format!(
                "36 35 98:0 {root} /usr/local/tessera/libtessera.so ro,noatime shared:1 - ext4 /dev/sda rw\n"
            )
        };
        let place = "/0123456789abcdef/";
        assert!(is_root_in(&line("/var/lib/tessera/shim/0123456789abcdef/libtessera.so"), place));
        assert!(is_root_in(&line("/0123456789abcdef/ld.so.preload"), place));
        assert!(!is_root_in(&line("/shim/0123456789abcdee/libtessera.so"), place));
        assert!(!is_root_in(&line("/home/0123456789abcdef/else"), place));
        assert!(!is_root_in("garbage\n\n", place));
        assert!(!is_mounted("0123456789abcdef").unwrap());
    }

    #[test]
    fn only_what_was_installed_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let shims = dir.path().join("shims");
        let source = dir.path().join("built.so");
        std::fs::write(&source, b"\x7fELF").unwrap();
        let delivery = super::super::install(&source, &shims).unwrap();
        let name = super::super::name_of(&delivery).unwrap();
        std::fs::create_dir(shims.join("somebody's")).unwrap();
        std::fs::write(shims.join("0123456789abcdef"), "a file").unwrap();
        assert_eq!(installed(&shims), [name.as_str()]);
        std::fs::write(delivery.shim.with_file_name("notes"), "by hand").unwrap();
        assert!(remove(&shims, &name).is_err());
        assert!(shims.join(&name).join("notes").exists());
        std::fs::remove_file(delivery.shim.with_file_name("notes")).unwrap();
        remove(&shims, &name).unwrap();
        assert!(installed(&shims).is_empty() && shims.join("somebody's").is_dir());
    }
}
